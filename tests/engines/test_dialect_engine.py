from __future__ import annotations

import base64
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import ml_dtypes
import numpy as np
import pytest

from streamtap.activations import join
from streamtap.codec import base64_chunks
from streamtap.engines.base import AcrossNetwork, Engine
from streamtap.engines.dialect_engine import DialectEngine
from streamtap.engines.transformers import TransformersEngine
from streamtap.errors import (
    CaptureMissed,
    InvalidInput,
    InvalidKey,
    PromptTooLong,
    StreamtapError,
    TransferFailed,
    Unsupported,
)
from streamtap.settings import child_environment
from streamtap.spec import CaptureSpec
from streamtap.testing.fake_engine import FakeEngine
from streamtap.testing.models import tiny_model
from streamtap.testing.tokenizers import tiny_tokenizer

KEY = "key-of-the-process"
PROMPTS = [(31, 45, 28, 77), (64,), (31, 45, 28, 90, 33, 41), (70, 26, 88)]


def _free_port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as held:
        return int(held.getsockname()[1])


@contextmanager
def _process(module: str, *arguments: str) -> Iterator[str]:
    """The address of an engine process that is ready, under a keeper so that nothing outlives the tests."""
    port = _free_port()
    command = [sys.executable, "-m", "streamtap.engines.keeper", "--", sys.executable, "-m", module]
    process = subprocess.Popen(
        [*command, "--port", str(port), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=child_environment({}, STREAMTAP_WORKER_KEY=KEY),
    )
    url = f"http://127.0.0.1:{port}"
    try:
        _until_ready(url, process)
        yield url
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(30)


def _until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert process.poll() is None, "the engine process ended"
        try:
            if httpx2.get(f"{url}/health", trust_env=False).status_code == 200:
                return
        except httpx2.HTTPError:
            pass
        time.sleep(0.05)
    raise AssertionError("the engine process did not come up")


@pytest.fixture(scope="module")
def fake_url() -> Iterator[str]:
    with _process("streamtap.testing.fake_worker", "--served-model-name", "org/fake", "--max-model-len", "64") as url:
        yield url


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dialect") / "tiny"
    tiny_model("llama").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def worker_url(folder: Path) -> Iterator[str]:
    with _process("streamtap.engines.worker", "--model", str(folder), "--served-model-name", "tiny") as url:
        yield url


@pytest.fixture
def fake(fake_url: str) -> Iterator[DialectEngine]:
    with closing(DialectEngine.load(fake_url, key=KEY)) as engine:
        yield engine


def _captured(engine: Engine, prompts: Any, **spec: Any) -> Any:
    return join(list(engine.capture(prompts, CaptureSpec(**spec))))


def _fake_rows(ids: Any, layer: int) -> Any:
    return FakeEngine(dtype="bfloat16", named={"model": "org/fake"}).rows(ids, layer)


def test_a_real_worker_gives_what_the_model_gives_in_this_process(worker_url: str, folder: Path) -> None:
    here = TransformersEngine.load(str(folder))
    with closing(DialectEngine.load(worker_url, key=KEY, checkpoint=str(folder))) as there:
        assert isinstance(there, Engine)
        assert there.provenance.commit == here.provenance.commit
        assert there.provenance.tokenizer == here.provenance.tokenizer
        assert (there.provenance.n_layers, there.provenance.hidden) == (3, 32)
        for spec in ({}, {"pooling": "mean", "layers": [0, 2]}, {"pooling": "last_token"}, {"positions": [0, -1]}):
            mine, right = (
                _captured(there, ["a cat sat", "on", "a mat, so"], **spec),
                _captured(here, ["a cat sat", "on", "a mat, so"], **spec),
            )
            np.testing.assert_array_equal(mine.offsets, right.offsets)
            np.testing.assert_array_equal(mine.token_ids, right.token_ids)
            np.testing.assert_array_equal(mine.positions, right.positions)
            assert mine.layers == right.layers
            for layer in right.layers:
                assert mine.acts[layer].dtype == np.float32
                np.testing.assert_allclose(mine.acts[layer], right.acts[layer], rtol=1e-4, atol=1e-4)


def test_what_the_process_says_of_its_model_is_enough_for_token_ids(fake: DialectEngine) -> None:
    about = fake.provenance
    assert (about.model, about.dtype, about.n_layers, about.hidden) == ("org/fake", "bfloat16", 4, 8)
    assert about.engine == "transformers"
    assert (fake.tokenizer.context_length, fake.tokenizer.vocabulary) == (64, 97)

    found = _captured(fake, PROMPTS)

    assert found.index.tolist() == [0, 1, 2, 3]
    for place, prompt in enumerate(PROMPTS):
        for layer, rows in found.prompt(place).items():
            assert rows.dtype == ml_dtypes.bfloat16
            np.testing.assert_array_equal(rows, _fake_rows(prompt, layer))


def test_layers_and_positions_are_chosen_by_the_process(fake_url: str) -> None:
    sent: list[dict[str, Any]] = []
    plain = httpx2.HTTPTransport()

    class Watching(httpx2.BaseTransport):
        def handle_request(self, request: httpx2.Request) -> httpx2.Response:
            sent.append(json.loads(request.content or b"{}"))
            return plain.handle_request(request)

    with closing(DialectEngine.load(fake_url, key=KEY, transport=Watching())) as engine:
        found = _captured(engine, [PROMPTS[2]], layers=[1, 3], positions=[0, -2], exclude_special_tokens=True)
        last = _captured(engine, [PROMPTS[2]], layers=2, pooling="last_token")

    asked = [each["vllm_xargs"] for each in sent if "vllm_xargs" in each]
    assert [each["output_residual_stream"] for each in asked] == [[1, 3], [2]]
    # Behind the last position that is kept nothing runs, so that the last of five is number four.
    assert [each.get("output_positions") for each in asked] == [[0, 4], [5]]
    np.testing.assert_array_equal(found.acts[3], _fake_rows(PROMPTS[2], 3)[[0, 4]])
    np.testing.assert_array_equal(last.acts[2], _fake_rows(PROMPTS[2], 2)[[5]])


def test_a_prompt_may_fill_the_context_and_no_more(fake: DialectEngine) -> None:
    assert len(_captured(fake, [[40] * 64], layers=0).acts[0]) == 64
    with pytest.raises(PromptTooLong, match="prompt 1 has 65 tokens"):
        _captured(fake, [[40], [40] * 65], layers=0)


def test_many_prompts_come_in_order_and_equal_ones_run_once(fake: DialectEngine) -> None:
    prompts = [(40 + i % 50, 41, 42 + i % 3) for i in range(120)]

    found = _captured(fake, [*prompts, prompts[0]], layers=[2])

    assert found.index.tolist() == list(range(121))
    np.testing.assert_array_equal(found.prompt(120)[2], found.prompt(0)[2])
    for place in (0, 57, 119):
        np.testing.assert_array_equal(found.prompt(place)[2], _fake_rows(prompts[place], 2))


def test_what_a_process_does_not_give_is_refused_before_it_is_asked(fake: DialectEngine) -> None:
    for spec in (CaptureSpec(perplexity=True), CaptureSpec(logits="last"), CaptureSpec(exact=True)):
        with pytest.raises(Unsupported, match="backend='local'"):
            fake.capture([PROMPTS[0]], spec)
    fake.close()
    with pytest.raises(InvalidInput, match="closed"):
        fake.capture([PROMPTS[0]], CaptureSpec())


def test_a_wrong_key_is_told_as_such_and_is_in_no_message(fake_url: str) -> None:
    for key in ("wrong-key", None):
        with pytest.raises(InvalidKey) as caught:
            DialectEngine.load(fake_url, key=key)
        assert "wrong-key" not in str(caught.value)


def test_a_model_that_is_not_served_is_refused_by_name(fake_url: str) -> None:
    with pytest.raises(InvalidInput, match=r"serves no model 'other'; it has 'org/fake'\."):
        DialectEngine.load(fake_url, key=KEY, model="other")


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://", "http://me:secret@host", "http://h:99999"])
def test_what_is_no_address_is_refused_without_being_shown(url: str) -> None:
    with pytest.raises(InvalidInput, match="such as http://127") as caught:
        DialectEngine.load(url)
    assert "secret" not in str(caught.value)


def test_a_process_that_is_gone_is_asked_as_often_as_it_was_told() -> None:
    process = _Stub()
    with closing(process.engine()) as engine:
        assert isinstance(engine, AcrossNetwork)
        process.gone, before = True, process.asked
        assert (engine.trying(0), engine.trying(0)) == (3, 0)
        with pytest.raises(TransferFailed, match="cannot be reached"):
            _captured(engine, [PROMPTS[0]])
        assert process.asked == before + 1
        with pytest.raises(InvalidInput, match="max_retries must be a whole number of at least 0; got -1"):
            engine.trying(-1)


class _Stub:
    """A ``vllm serve`` with vllm-lens, as far as its answers go; ``mend`` changes one before it is sent."""

    def __init__(self, dtype: str = "bfloat16", mend: Callable[[dict[str, Any]], None] = lambda _body: None) -> None:
        self.fake = FakeEngine(n_layers=4, hidden=8, dtype=dtype)
        self.mend = mend
        self.gone = False
        self.asked = 0
        self.bodies: list[dict[str, Any]] = []
        self.most_at_once = 0
        self._at_once = 0
        self._lock = threading.Lock()

    def engine(self, **options: Any) -> DialectEngine:
        shape = options.pop("shape", (4, 8))
        transport = httpx2.MockTransport(self._answer)
        return DialectEngine.load("http://127.0.0.1:9", shape=shape, transport=transport, **options)

    def _answer(self, request: httpx2.Request) -> httpx2.Response:
        with self._lock:
            self.asked += 1
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            if self.gone:
                raise httpx2.ConnectError("refused")
            if request.url.path == "/v1/models":
                entry = {"id": "org/x", "object": "model", "owned_by": "vllm", "root": "org/x", "max_model_len": 16}
                return httpx2.Response(200, json={"object": "list", "data": [entry]})
            return self._completion(json.loads(request.content))
        finally:
            with self._lock:
                self._at_once -= 1

    def _completion(self, body: dict[str, Any]) -> httpx2.Response:
        time.sleep(0.01)
        self.bodies.append(body)
        ids, layers = body["prompt"], body["vllm_xargs"]["output_residual_stream"]
        rows = np.stack([self.fake.rows(ids, layer) for layer in layers])
        answer: dict[str, Any] = {
            "id": "cmpl-1",
            "model": "org/x",
            "choices": [{"index": 0, "text": "x", "finish_reason": "length"}],
            "usage": {"prompt_tokens": len(ids), "completion_tokens": 1, "total_tokens": len(ids) + 1},
            "activations": {"residual_stream": _envelope(rows)},
        }
        self.mend(answer)
        return httpx2.Response(200, json=answer)


def _envelope(rows: Any) -> dict[str, Any]:
    narrow = rows.dtype.name
    about = {"shape": list(rows.shape), "dtype": "int16" if narrow == "bfloat16" else narrow}
    about |= {"original_dtype": "torch.bfloat16"} if narrow == "bfloat16" else {}
    if narrow == "float16":
        return {**about, "compression": "none", "data": base64.b64encode(rows.tobytes()).decode()}
    return {**about, "compression": "zstd", "data": b"".join(base64_chunks(rows)).decode()}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_vllm_gives_rows_of_the_dtype_that_it_computes_in(dtype: str) -> None:
    process = _Stub(dtype)
    with closing(process.engine()) as engine:
        assert (engine.provenance.engine, engine.provenance.dtype) == ("vllm", dtype)
        found = _captured(engine, PROMPTS, layers=[1, 3], positions=[0])

    assert found.acts[3].dtype.name == dtype
    for place, prompt in enumerate(PROMPTS):
        np.testing.assert_array_equal(found.prompt(place)[1], process.fake.rows(prompt, 1)[:1])
    # It draws a token in any case, chooses no positions, and knows none of our arguments.
    assert {body["max_tokens"] for body in process.bodies} == {1}
    assert all(set(body["vllm_xargs"]) == {"output_residual_stream"} for body in process.bodies)


def test_vllm_needs_a_place_for_the_token_that_it_draws() -> None:
    with closing(_Stub().engine()) as engine:
        assert len(_captured(engine, [[40] * 15], layers=0).acts[0]) == 15
        with pytest.raises(PromptTooLong):
            _captured(engine, [[40] * 16], layers=0)


def test_no_more_requests_run_at_a_time_than_was_asked() -> None:
    process = _Stub()
    with closing(process.engine(concurrency=3)) as engine:
        _captured(engine, [(40 + i,) for i in range(30)], layers=0)

    assert process.most_at_once == 3
    with pytest.raises(InvalidInput, match="concurrency must be at least 1"):
        process.engine(concurrency=0)


def test_a_run_that_is_left_ends_its_requests() -> None:
    process = _Stub()
    with closing(process.engine(concurrency=2)) as engine:
        parts = engine.capture([(40 + i // 50, 40 + i % 50) for i in range(1000)], CaptureSpec(layers=0), ordered=False)
        next(parts)
        parts.close()  # type: ignore[attr-defined]
        asked = process.asked
        time.sleep(0.1)

    assert process.asked == asked < 200


def test_nobody_says_how_deep_a_vllm_is_without_its_checkpoint(folder: Path) -> None:
    with pytest.raises(InvalidInput, match="how deep and wide 'org/x' is; name its checkpoint"):
        _Stub().engine(shape=None)
    with closing(_Stub().engine(shape=None, checkpoint=str(folder))) as engine:
        assert (engine.provenance.n_layers, engine.provenance.hidden) == (3, 32)


def _without_rows(body: dict[str, Any]) -> None:
    del body["activations"]


def _lacking_a_layer(body: dict[str, Any]) -> None:
    envelope = body["activations"]["residual_stream"]
    body["activations"]["residual_stream"] = _envelope(np.zeros([0, *envelope["shape"][1:]], np.float32))


def _lacking_a_row(body: dict[str, Any]) -> None:
    body["usage"]["prompt_tokens"] += 1


def _wider(body: dict[str, Any]) -> None:
    layers, rows, _ = body["activations"]["residual_stream"]["shape"]
    body["activations"]["residual_stream"] = _envelope(np.ones([layers, rows, 9], np.float32))


def _not_finite(body: dict[str, Any]) -> None:
    shape = body["activations"]["residual_stream"]["shape"]
    body["activations"]["residual_stream"] = _envelope(np.full(shape, np.nan, np.float32))


def _zeros(body: dict[str, Any]) -> None:
    shape = body["activations"]["residual_stream"]["shape"]
    body["activations"]["residual_stream"] = _envelope(np.zeros(shape, np.float32))


@pytest.mark.parametrize(
    ("mend", "said"),
    [
        (_without_rows, "answered without rows; is it a vLLM whose vllm-lens is missing"),
        (_lacking_a_layer, "rows of 0 layers where 4 were expected"),
        (_lacking_a_row, "rows of 4 positions; its usage says 5"),
        (_wider, r"shape \[4, 4, 9\] for prompt 0; expected \[4, 4, 8\]"),
        (_not_finite, "rows of layer 0 hold a value that is not finite"),
        (_zeros, "block 0 put out only zeros for prompt 0"),
    ],
)
def test_an_answer_that_is_not_whole_is_refused(mend: Callable[[dict[str, Any]], None], said: str) -> None:
    process = _Stub("float32")
    with closing(process.engine()) as engine:
        process.mend = mend
        with pytest.raises(CaptureMissed, match=said):
            _captured(engine, [PROMPTS[0]])


def test_an_error_of_the_process_is_the_class_that_it_names(fake: DialectEngine) -> None:
    shallow = DialectEngine(fake._connect, fake._process, _deeper(fake), fake.tokenizer)
    with pytest.raises(StreamtapError, match="4") as caught:
        _captured(shallow, [PROMPTS[0]])
    assert caught.value.code == "invalid_request"


def _deeper(engine: DialectEngine) -> Any:
    from dataclasses import replace

    return replace(engine.provenance, n_layers=5)
