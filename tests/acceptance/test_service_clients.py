"""Our own clients at the running service, and requests that run side by side."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from safetensors.numpy import load_file

from streamtap import AsyncClient, Client
from streamtap.engines.opening import load_engine
from streamtap.errors import InvalidInput

pytestmark = pytest.mark.xdist_group("demo-model")

PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def client(demo_service: Any) -> Iterator[Client]:
    with Client(demo_service.base_url, demo_service.key) as found:
        yield found


def test_what_is_served_is_described(client: Client) -> None:
    (model,) = client.models()
    capabilities = model["capabilities"]

    assert (model["id"], model["served_model_name"]) == ("llama-8b", "demo")
    assert (capabilities["n_layers"], capabilities["hidden_size"], capabilities["dtype"]) == (30, 576, "float32")
    assert capabilities["activations"] is True
    assert client.model_status("llama-8b")["warm"] is True


def test_a_stream_of_deltas(client: Client) -> None:
    whole = client.complete(PROMPT, max_tokens=6, temperature=0)

    with client.stream(PROMPT, max_tokens=6, temperature=0) as stream:
        text = "".join(delta.text for delta in stream)

    assert text == whole.text
    assert stream.usage == whole.usage


def test_the_asynchronous_client_asks_many_at_once(client: Client, demo_service: Any) -> None:
    prompts = ["Water boils at", PROMPT, "Two and two make", "a"]

    async def main() -> list[str]:
        async with AsyncClient(demo_service.base_url, demo_service.key) as many:
            asked = [many.complete(prompt, max_tokens=5, temperature=0) for prompt in prompts]
            return [done.text for done in await asyncio.gather(*asked)]

    assert asyncio.run(main()) == [client.complete(prompt, max_tokens=5, temperature=0).text for prompt in prompts]


def test_the_servers_refusal_is_raised_as_its_class(client: Client) -> None:
    with pytest.raises(InvalidInput, match="0 to 29"):
        client.complete(PROMPT, output_residual_stream=[30])


def test_in_one_process_without_a_server_the_same_comes_out(client: Client) -> None:
    served = client.complete(PROMPT, max_tokens=5, temperature=0, output_residual_stream=[15], output_dtype="float32")

    engine = load_engine("demo", device="cpu")
    try:
        done = engine.complete(PROMPT, max_tokens=5, temperature=0, capture=[15])
    finally:
        engine.close()

    assert done.text == served.text
    assert done.usage == served.usage
    assert done.activations is not None
    assert served.activations is not None
    mine, theirs = (np.asarray(each.acts[15], np.float32) for each in (done.activations, served.activations))
    apart = np.linalg.norm(mine - theirs, axis=1) / np.linalg.norm(theirs, axis=1)
    assert apart.max() <= 1e-5


def test_the_command_line_writes_text_and_rows(client: Client, demo_service: Any, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "streamtap", "complete", PROMPT, "--max-tokens", "5", "--temperature", "0"]
    variables = {**os.environ, "ACS_API_BASE": demo_service.base_url, "ACS_API_KEY": demo_service.key}

    done = subprocess.run(
        [*command, "--layers", "15,20", "--out", str(tmp_path / "rows.safetensors")],
        capture_output=True,
        text=True,
        check=False,
        env=variables,
    )

    assert done.returncode == 0, done.stderr
    expected = client.complete(PROMPT, max_tokens=5, temperature=0, output_residual_stream=[15, 20])
    assert done.stdout == expected.text + "\n"
    assert "wrote 2 layers of 9 rows" in done.stderr
    assert expected.activations is not None
    written = load_file(tmp_path / "rows.safetensors")
    assert written["layer_indices"].tolist() == [15, 20]
    assert np.array_equal(written["residual_stream"][1], expected.activations.acts[20])


def test_the_whole_vocabulary_for_each_token_of_a_prompt(demo_service: Any, plain: Any) -> None:
    ids = plain.ids(PROMPT)
    body = demo_service.complete(prompt=ids, max_tokens=0, prompt_logprobs=-1)

    logs = body["choices"][0]["prompt_logprobs"]
    expected = plain.logprobs(ids)
    assert logs[0] is None
    assert len(logs) == len(ids)
    for place in range(1, len(ids)):
        assert len(logs[place]) == expected.shape[1]
        told = np.array([logs[place][str(token)]["logprob"] for token in range(expected.shape[1])])
        assert np.allclose(told, expected[place - 1], atol=1e-3)
        own = logs[place][str(ids[place])]
        assert own["rank"] == 1 + int((told > own["logprob"]).sum())


def test_a_capture_beside_it_does_not_change_an_answer(demo_service: Any) -> None:
    greedy = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    drawn = {"prompt": "Once upon a time", "max_tokens": 12, "seed": 3, "n": 2}
    capture = {
        "prompt": ["Water boils at one hundred degrees. " * 4] * 2,
        "max_tokens": 8,
        "output_residual_stream": True,
    }
    alone = [_choices(demo_service.ask(body)) for body in (greedy, drawn)]

    async def together() -> list[httpx2.Response]:
        async with demo_service.client(asynchronous=True) as many:
            bodies = [capture, greedy, capture, drawn, capture]
            return await asyncio.gather(*(many.post("/completions", json=body) for body in bodies))

    found = asyncio.run(together())

    assert [_choices(found[1]), _choices(found[3])] == alone
    for answer in (found[0], found[2], found[4]):
        captures = [choice["activations"]["residual_stream"] for choice in answer.json()["choices"]]
        rows = answer.json()["usage"]["completion_tokens"] + answer.json()["usage"]["prompt_tokens"] - 2
        assert sum(each["shape"][1] for each in captures) == rows
        assert {(each["shape"][0], each["shape"][2]) for each in captures} == {(30, 576)}


def _choices(answer: httpx2.Response) -> bytes:
    """The bytes of the choices, which is all but the request's own id and time."""
    assert answer.status_code == 200
    assert json.loads(answer.content)["choices"]
    return answer.content[answer.content.index(b'"usage"') :]


def test_the_cap_is_told_before_anything_runs(demo_service: Any) -> None:
    before = demo_service.usage()["usage"]

    refused = demo_service.ask({"prompt": [504] * 2049, "max_tokens": 1, "output_residual_stream": True})

    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "activation_prompt_too_long")
    assert "2049" in refused.json()["error"]["message"]
    assert "2048" in refused.json()["error"]["message"]
    assert demo_service.usage()["usage"] == before
