"""A real ``vllm serve`` with vllm-lens behind our gateway, over the demo model, against that model in float32.

The gateway runs with this Python and starts vLLM from an environment of its own. Two starts serve all of it.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from streamtap import Client, TransformersEngine, steering_vector
from streamtap.completion import Completion
from streamtap.engines.self_check import compare
from streamtap.errors import InvalidInput, SteeringNotFinite, SteeringUnsupported, Unsupported
from streamtap.server.db import Database
from streamtap.server.ledger.keys import Keys
from streamtap.server.toml.config_file import read_config
from streamtap.wire.completions import read_completion

Rows = NDArray[np.float32]
LAYERS, HIDDEN, AT = 30, 576, 15
PROMPT = "The capital city of France is"
SEED = Path(__file__).parents[1] / "tests" / "acceptance" / "seed_service"
FLOAT: dict[str, Any] = {"output_residual_stream": True, "output_dtype": "float32", "temperature": 0}


class Gateway:
    """`streamtap serve` in a process of its own, with one model that vLLM runs when it is asked for."""

    def __init__(self, folder: Path, checkpoint: str, vllm_program: str, **model: Any) -> None:
        self.folder, self._program = folder, vllm_program
        table = {"id": "llama-8b", "checkpoint": checkpoint, "engine": "vllm", "max_model_len": 512, "idle_seconds": 0}
        keys = "".join(f"{key} = {json.dumps(value)}\n" for key, value in (table | model).items())
        self._file = folder / "streamtap.toml"
        self._file.write_text(f'port = 0\nengines = "shared"\n[[models]]\n{keys}', encoding="utf-8")
        path = f"{Path(vllm_program).parent}{os.pathsep}{os.environ['PATH']}"
        command = [sys.executable, "-m", "streamtap", "serve", "--config", str(self._file)]
        with (folder / "service.log").open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "PATH": path, "PYTHONUNBUFFERED": "1"},
            )
        assert self._process.stdout is not None
        said = ""
        for line in self._process.stdout:
            said += line
            if "Ctrl-C" in line:
                break
        found = re.search(r"at (http://127\.0\.0\.1:\d+/v1)", said)
        assert found is not None, said + (folder / "service.log").read_text()
        self.base_url = found[1]
        database = Database.open(read_config(self._file).database_url)
        self.key = Keys(database).create("tester").secret
        database.close()

    def client(self) -> Client:
        """One that never asks again."""
        return Client(self.base_url, self.key, retries=None)

    def ask(self, **body: Any) -> httpx2.Response:
        """The answer to one completion, whatever it is."""
        headers = {"Authorization": f"Bearer {self.key}"}
        return httpx2.post(f"{self.base_url}/completions", json=body, headers=headers, timeout=600, trust_env=False)

    def servers(self) -> list[int]:
        """Process ids of the ``vllm serve`` under this gateway."""
        table = subprocess.run(["ps", "-Awwo", "pid=,ppid=,args="], capture_output=True, text=True, check=True)
        lines = [line.split(None, 2) for line in table.stdout.splitlines()]
        ours = {self._process.pid}
        for _ in range(3):
            ours |= {int(pid) for pid, parent, *_ in lines if int(parent) in ours}
        found = [(int(pid), "".join(args)) for pid, _, *args in lines if int(pid) in ours]
        return [pid for pid, args in found if self._program in args and "streamtap.engines.keeper" not in args]

    def close(self) -> None:
        """End it and its engine."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(90)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(30)
        if self._process.stdout is not None:
            self._process.stdout.close()


@pytest.fixture(scope="module")
def gateway(demo: str, vllm_program: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """In float32; no request has been there before the first test."""
    made = Gateway(tmp_path_factory.mktemp("gateway"), demo, vllm_program, dtype="float32")
    yield made
    made.close()


@pytest.fixture(scope="module")
def client(gateway: Gateway) -> Iterator[Client]:
    with gateway.client() as found:
        yield found


@pytest.fixture(scope="module")
def reference(demo: str) -> Iterator[TransformersEngine]:
    engine = TransformersEngine.load(demo, dtype="float32", device="cpu")
    yield engine
    engine.close()


def _block(done: Completion) -> Rows:
    assert done.activations is not None
    return np.stack([np.asarray(done.activations.acts[layer]) for layer in done.activations.layers])


def _ids(done: Completion) -> list[int]:
    assert done.activations is not None
    return [int(token) for token in done.activations.token_ids]


def _check(mine: Rows, other: Rows, dtype: str = "float32") -> None:
    assert compare(mine, other, name="vLLM", dtype=dtype).fault is None


def test_the_curl_command_of_the_seed_wakes_it_and_is_kept_alive(
    gateway: Gateway, reference: TransformersEngine
) -> None:
    command = (SEED / "capture.txt").read_text(encoding="utf-8")
    variables = {**os.environ, "ACS_API_BASE": gateway.base_url, "ACS_API_KEY": gateway.key}
    done = subprocess.run(["bash", "-s"], input=command, capture_output=True, text=True, env=variables, check=True)

    # The first after a second, one more every five; no start takes less than ten.
    assert len(done.stdout) - len(done.stdout.lstrip(" ")) >= 2
    snippets = "".join((SEED / f"{name}.txt").read_text(encoding="utf-8") for name in ("decode", "check"))
    told = f"import json\nresp = json.loads({done.stdout!r})\nn_layers_for_model = {LAYERS}\n"
    shown = "\nprint(json.dumps([x.shape, layer16.shape]))\n"
    ran = subprocess.run(
        [sys.executable, "-"], input=told + snippets + shown, capture_output=True, text=True, check=True
    )
    body = json.loads(done.stdout)
    assert json.loads(ran.stdout) == [[LAYERS, 5, HIDDEN], [5, HIDDEN]]
    assert body["choices"][0]["text"] == " Paris"
    assert body["activations"]["layer_indices"] == list(range(LAYERS))
    envelope = body["activations"]["residual_stream"]
    assert (envelope["dtype"], envelope["original_dtype"]) == ("int16", "torch.bfloat16")
    with gateway.client() as found:
        rows = _block(found.complete("The capital of France is", max_tokens=1, **FLOAT))
        narrowed = _block(
            found.complete("The capital of France is", max_tokens=1, **FLOAT | {"output_dtype": "bfloat16"})
        )
    assert rows.astype(ml_dtypes.bfloat16).tobytes() == narrowed.tobytes()


def test_a_capture_with_generation_is_the_models(client: Client, reference: TransformersEngine) -> None:
    done = client.complete(PROMPT, max_tokens=6, **FLOAT)

    expected = reference.complete(PROMPT, max_tokens=6, capture=True, output_dtype="float32", temperature=0)
    assert done.text == expected.text
    assert _ids(done) == _ids(expected)
    assert _block(done).shape == (LAYERS, 11, HIDDEN)
    _check(_block(done), _block(expected))


def test_the_same_prompt_again_and_one_that_begins_alike_have_all_their_rows(
    client: Client, reference: TransformersEngine
) -> None:
    long = " ".join([PROMPT] * 40)
    for prompt in (long, long, long + " Paris, they say"):
        expected = reference.complete(prompt, max_tokens=1, capture=True, output_dtype="float32")
        _check(_block(client.complete(prompt, max_tokens=1, **FLOAT)), _block(expected))


@pytest.mark.parametrize("binary", [False, True])
def test_chosen_layers_and_positions_are_those_of_the_whole(binary: bool, client: Client) -> None:
    whole = client.complete(PROMPT, max_tokens=4, **FLOAT)
    for positions, places in (("last", [8]), ("generated", [6, 7, 8]), ([0, 5, 7], [0, 5, 7]), ("all", list(range(9)))):
        ask = FLOAT | {"output_residual_stream": [3, 29], "output_positions": positions}
        part = client.complete(PROMPT, max_tokens=4, binary=binary, **ask)

        assert part.activations is not None
        assert part.activations.positions.tolist() == places
        assert _ids(part) == [_ids(whole)[place] for place in places]
        assert _block(part).tobytes() == _block(whole)[[3, 29]][:, places].tobytes()


V = np.random.default_rng(0).normal(size=(3, HIDDEN), scale=0.2).astype(ml_dtypes.bfloat16).astype(np.float32)


def test_scale_zero_changes_no_bit(client: Client) -> None:
    plain = client.complete(PROMPT, max_tokens=5, **FLOAT)
    for more in ({}, {"norm_match": True}):
        same = client.complete(
            PROMPT, max_tokens=5, apply_steering_vectors=[steering_vector(V[0], AT, 0.0, **more)], **FLOAT
        )

        assert same.text == plain.text
        assert _block(same).tobytes() == _block(plain).tobytes()


STEERED: dict[str, tuple[list[dict[str, Any]], int]] = {
    "every position": ([steering_vector(V[0], AT, 1.5)], 5),
    "two vectors": ([steering_vector(V[0], AT, 1.5), steering_vector(V[1:], [AT, 20], -0.7)], 5),
    "norm_match": ([steering_vector(V[0], AT, 0.3, norm_match=True)], 5),
    "norm_match and then another": (
        [steering_vector(V[0], AT, 0.3, norm_match=True), steering_vector(V[1], AT, 2.0)],
        3,
    ),
    "a vector a position": ([steering_vector(V, AT, 1.5, positions=(0, 4, 2))], 1),
    "spans": ([steering_vector(V[0], AT, 1.5, spans=((1, 3), (5, 90)))], 1),
    "spans with norm_match": ([steering_vector(V[0], AT, 0.3, norm_match=True, spans=((2, 4),))], 1),
}


@pytest.mark.parametrize("name", STEERED)
def test_a_vector_does_what_it_does_in_the_reference(name: str, client: Client, reference: TransformersEngine) -> None:
    vectors, new = STEERED[name]

    done = client.complete(PROMPT, max_tokens=new, apply_steering_vectors=vectors, **FLOAT)

    steered = {"capture": True, "output_dtype": "float32", "temperature": 0, "steer": vectors}
    expected = reference.complete(PROMPT, max_tokens=new, **steered)
    assert done.text == expected.text
    _check(_block(done), _block(expected))
    plain = client.complete(_ids(done), max_tokens=1, **FLOAT)
    assert (np.abs(_block(done)[:AT] - _block(plain)[:AT]) <= 1e-3 * np.abs(_block(plain)[:AT]).max()).all()
    assert np.abs(_block(done)[AT] - _block(plain)[AT]).max() > 0.1


def test_a_vector_that_drives_values_out_of_range_is_the_callers(client: Client) -> None:
    push = steering_vector(np.full(HIDDEN, 2.5e38, np.float32), AT)

    with pytest.raises(SteeringNotFinite, match="block 15"):
        client.complete(PROMPT, max_tokens=1, apply_steering_vectors=[push, push], **FLOAT)
    with pytest.raises(SteeringNotFinite, match="lower its scale"):
        client.complete(PROMPT, max_tokens=1, apply_steering_vectors=[push | {"scale": 10}])


def test_requests_side_by_side_get_their_own_rows_and_no_others_vector(client: Client) -> None:
    prompts = [f"{PROMPT} {number} and" for number in range(6)]
    push = steering_vector(V[0], AT, 3.0)
    alone = {prompt: _block(client.complete(prompt, max_tokens=4, **FLOAT)) for prompt in prompts}

    def ask(number: int) -> Rows:
        steers = {"apply_steering_vectors": [push]} if number >= len(prompts) else {}
        return _block(client.complete(prompts[number % len(prompts)], max_tokens=4, **FLOAT, **steers))

    with ThreadPoolExecutor(12) as threads:
        together = list(threads.map(ask, range(2 * len(prompts))))

    for number, prompt in enumerate(prompts):
        _check(together[number][:, :7], alone[prompt][:, :7])
        moved = together[number + len(prompts)][AT, :7] - alone[prompt][AT, :7]
        assert np.abs(moved - 3.0 * V[0]).max() < 0.01


def test_log_probabilities_and_stops_are_read_by_our_client(client: Client, reference: TransformersEngine) -> None:
    ask: dict[str, Any] = {"max_tokens": 3, "temperature": 0, "logprobs": 30, "prompt_logprobs": 25, "echo": True}
    done, expected = client.complete(PROMPT, **ask), reference.complete(PROMPT, **ask)

    assert done.text == expected.text
    (choice,), (other,) = done.choices, expected.choices
    assert choice.prompt_logs is not None
    assert other.prompt_logs is not None
    assert len(choice.prompt_logs) == len(other.prompt_logs)
    assert choice.prompt_logs.at(0).logprob is None
    for place in range(1, len(other.prompt_logs)):
        mine, theirs = choice.prompt_logs.at(place).logprob, other.prompt_logs.at(place).logprob
        assert mine == pytest.approx(theirs, abs=1e-3)
    several = client.complete([PROMPT, "Water boils at"], max_tokens=4, n=2, temperature=0)
    assert [each.index for each in several.choices] == [0, 1, 2, 3]
    assert several.choices[0].text == several.choices[1].text
    stopped = client.complete(PROMPT, max_tokens=20, temperature=0, stop=["."])
    assert (stopped.choices[0].finish_reason, stopped.choices[0].stop_reason) == ("stop", ".")
    assert "." not in stopped.text
    assert "".join(delta.text for delta in client.stream(PROMPT, max_tokens=5, temperature=0))


def test_what_it_would_answer_wrongly_it_is_not_asked(client: Client) -> None:
    push = steering_vector(V[0], AT)
    with pytest.raises(Unsupported):
        client.complete([PROMPT, PROMPT], max_tokens=1, output_residual_stream=[1])
    with pytest.raises(SteeringUnsupported):
        client.complete(PROMPT, max_tokens=2, apply_steering_vectors=[steering_vector(V[0], AT, spans=[(0, 1)])])
    with pytest.raises(SteeringUnsupported):
        client.complete(PROMPT, max_tokens=2, n=2, apply_steering_vectors=[push])
    with pytest.raises(InvalidInput, match="wide"):
        client.complete(PROMPT, max_tokens=2, apply_steering_vectors=[steering_vector(V[0][:100], AT)])
    # And it is still there, with nothing left in it of any of these.
    assert client.complete(PROMPT, max_tokens=2, temperature=0).text


class Asking(threading.Thread):
    """One request under way; ``outcome`` is its answer, or how the connection broke."""

    def __init__(self, gateway: Gateway, **body: Any) -> None:
        super().__init__()
        self._gateway, self._body = gateway, body
        self.outcome: httpx2.Response | httpx2.HTTPError | None = None
        self.start()

    def run(self) -> None:
        try:
            self.outcome = self._gateway.ask(**self._body)
        except httpx2.HTTPError as error:
            self.outcome = error


@pytest.fixture(scope="module")
def tight(demo: str, vllm_program: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """In bfloat16, with a prefix cache, and with room for the keys and values of nine times 128 tokens."""
    arguments = ["--enable-prefix-caching", "--num-gpu-blocks-override", "10"]
    made = Gateway(
        tmp_path_factory.mktemp("tight"), demo, vllm_program, dtype="bfloat16", arguments=arguments, max_model_len=1024
    )
    yield made
    made.close()


def test_a_prefix_cache_keeps_nothing_of_a_vector(tight: Gateway, reference: TransformersEngine) -> None:
    long = " ".join([PROMPT] * 60)
    ask: dict[str, Any] = {"max_tokens": 1, "temperature": 0, "logprobs": 1}
    with tight.client() as client:
        steered = client.complete(long, apply_steering_vectors=[steering_vector(V[0], 2, 40.0)], **ask)
        plain = client.complete(long, **ask)

    expected = reference.complete(long, **ask).choices[0].logs
    found, pushed = plain.choices[0].logs, steered.choices[0].logs
    assert expected is not None
    assert found is not None
    assert pushed is not None
    assert pushed[0].text != found[0].text
    assert (found[0].text, found[0].logprob) == (expected[0].text, pytest.approx(expected[0].logprob, abs=0.2))


def test_a_capture_that_was_interrupted_is_none(tight: Gateway, reference: TransformersEngine) -> None:
    """Three times 376 tokens fill the room; the next block that one of them needs is another's."""
    text = Path(__file__).with_name("conftest.py").read_text(encoding="utf-8")
    tokens = [int(token) for token in reference.tokenizer.read(text, 0)]
    prompts = [tokens[at : at + 376] for at in (0, 20, 40)]
    ask: dict[str, Any] = {"max_tokens": 16, "temperature": 0, "output_residual_stream": True}

    with ThreadPoolExecutor(3) as threads:
        answers = list(threads.map(lambda ids: tight.ask(prompt=ids, **ask), prompts))

    failed = [answer.json()["error"] for answer in answers if "error" in answer.json()]
    assert failed
    assert all(error["code"] == "capture_failed" and "interrupted" in error["message"] for error in failed)
    alone = read_completion(tight.ask(prompt=prompts[0], **ask).content)
    ids = _ids(alone)
    assert len(ids) == 391
    _check(_block(alone), _block(reference.complete(ids, max_tokens=1, capture=True)), "bfloat16")


def test_a_killed_engine_fails_its_requests_and_comes_back(tight: Gateway, reference: TransformersEngine) -> None:
    capture = {"prompt": PROMPT, "max_tokens": 1, "output_residual_stream": True}
    before = tight.ask(**capture).json()["activations"]
    (server,) = tight.servers()
    asking = Asking(tight, prompt=PROMPT, max_tokens=900, output_residual_stream=[1])
    time.sleep(2)

    os.kill(server, signal.SIGKILL)
    asking.join()

    assert isinstance(asking.outcome, httpx2.Response), asking.outcome
    error = asking.outcome.json()["error"]
    assert (error["code"], error["retryable"]) == ("engine_dead", True)
    assert tight.ask(**capture).json()["activations"] == before
    (again,) = tight.servers()
    assert again != server
    rows = _block(read_completion(tight.ask(**capture).content))
    _check(rows, _block(reference.complete(PROMPT, max_tokens=1, capture=True)), "bfloat16")
