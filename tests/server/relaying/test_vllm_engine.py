"""A model whose engine is a vLLM, behind the gateway: what it is asked, and what a client gets of its answer."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from streamtap.completion import SteeringVector
from streamtap.engines.vllm import to_vllm
from streamtap.errors import CaptureInterrupted
from streamtap.server.config import ModelConfig
from streamtap.testing.stub_engine import BREAK, Script, completion
from streamtap.testing.stub_gateway import StubGateway
from streamtap.wire.completions import read_completion, read_safetensors
from streamtap.wire.steering import vector_body

Array = NDArray[Any]
Answer = Callable[..., bytes]
Make = Callable[..., Array]
BINARY = "application/vnd.safetensors"
#: A BOS and a letter, three new tokens: four positions.
PROMPT, NEW = [0, 1], [2, 3, 4]
ASK = {"model": "stub", "prompt": "a", "max_tokens": 3}
CAPTURE = ASK | {"output_residual_stream": [1, 2]}
VECTOR = vector_body(SteeringVector((1,), np.ones((1, 8), np.float32)))
SPANS = VECTOR | {"position_spans": [[1, 99]]}


def _positions(*places: int) -> dict[str, Any]:
    return vector_body(SteeringVector((1,), np.ones((1, len(places), 8), np.float32), positions=places))


def test_what_a_vllm_is_asked_for_a_capture(
    behind: Any, stub_vllm: Any, answer_of_vllm: Answer, made_rows: Make
) -> None:
    async def act(gateway: StubGateway, engine: Any) -> None:
        asked = {"output_positions": "last", "output_dtype": "float32", "apply_steering_vectors": [VECTOR]}
        assert (await gateway.ask(CAPTURE | asked)).status == 200
        assert (await gateway.ask(ASK | {"output_residual_stream": False})).status == 200

        captured, plain = engine.bodies
        assert captured["vllm_xargs"]["output_residual_stream"] == [1, 2]
        assert set(captured["vllm_xargs"]) == {"output_residual_stream", "apply_steering_vectors"}
        assert captured["return_token_ids"] is True
        assert len(captured["cache_salt"]) >= 16
        assert not {"vllm_xargs", "return_token_ids", "cache_salt"} & set(plain)
        assert engine.headers[0]["accept"] == "application/json"

    behind(stub_vllm(Script([answer_of_vllm(made_rows(2, 4), PROMPT, NEW)])), act)


def test_a_capture_comes_as_a_client_of_ours_reads_it(
    behind: Any, stub_vllm: Any, answer_of_vllm: Answer, made_rows: Make
) -> None:
    values = made_rows(2, 4, np.float32)

    async def act(gateway: StubGateway, engine: Any) -> None:
        for asked, places, dtype in (
            ({}, [0, 1, 2, 3], "bfloat16"),
            ({"output_dtype": "float32"}, [0, 1, 2, 3], "float32"),
            ({"output_positions": [3, 1]}, [1, 3], "bfloat16"),
            ({"output_positions": "last"}, [3], "bfloat16"),
        ):
            answer = await gateway.ask(CAPTURE | asked)

            found = read_completion(answer.body, layers=(1, 2)).choices[0].rows
            assert found is not None
            assert found.values.dtype.name == dtype
            assert found.values.tobytes() == values[:, places].astype(found.values.dtype).tobytes()
            assert (found.positions.tolist(), found.token_ids.tolist()) == (places, [[0, 1, 2, 3][at] for at in places])
        assert gateway.usage["usage"]["monthly_activations"]["used"] == 4
        assert gateway.pool.good == 4

    behind(stub_vllm(Script([answer_of_vllm(values, PROMPT, NEW)])), act)


def test_a_capture_as_a_file(behind: Any, stub_vllm: Any, answer_of_vllm: Answer, made_rows: Make) -> None:
    values = made_rows(2, 4)

    async def act(gateway: StubGateway, engine: Any) -> None:
        answer = await gateway.ask(CAPTURE, accept=BINARY)

        assert answer.headers["content-type"] == BINARY
        assert int(answer.headers["content-length"]) == len(answer.body)
        found = read_safetensors(answer.body, layers=(1, 2)).choices[0].rows
        assert found is not None
        assert found.values.tobytes() == values.tobytes()
        assert (found.positions.tolist(), found.token_ids.tolist()) == ([0, 1, 2, 3], [0, 1, 2, 3])
        # Nothing to put into a file.
        plain = await gateway.ask(ASK, accept=BINARY)
        assert (plain.status, plain.headers["content-type"]) == (200, "application/json")

    behind(stub_vllm(Script([answer_of_vllm(values, PROMPT, NEW)])), act)


@pytest.mark.parametrize("accept", ["*/*", BINARY])
def test_rows_that_are_not_whole_fail_with_a_status(
    accept: str, behind: Any, stub_vllm: Any, answer_of_vllm: Answer, made_rows: Make
) -> None:
    nan, dead = made_rows(2, 4), made_rows(2, 4)
    nan[0, 0, 0] = np.nan
    dead[1] = 0
    for values in (made_rows(1, 4), made_rows(2, 3), nan, dead, None):

        async def act(gateway: StubGateway, engine: Any) -> None:
            answer = await gateway.ask(CAPTURE, accept=accept)

            assert (answer.status, answer.code) == (500, "capture_failed")
            assert gateway.usage["usage"]["monthly_activations"]["used"] == 0
            assert [failure.code for failure in gateway.pool.failures] == ["capture_failed"]

        behind(stub_vllm(Script([answer_of_vllm(values, PROMPT, NEW)])), act)


def test_rows_that_a_vector_drove_out_of_range_are_the_callers(
    behind: Any, stub_vllm: Any, answer_of_vllm: Answer, made_rows: Make
) -> None:
    values = made_rows(2, 4)
    values[1, 2, 3] = np.inf

    async def act(gateway: StubGateway, engine: Any) -> None:
        answer = await gateway.ask(CAPTURE | {"apply_steering_vectors": [VECTOR]})

        assert (answer.status, answer.code) == (400, "steering_not_finite")
        assert gateway.pool.failures == []
        # What no number holds is not even sent.
        answer = await gateway.ask(ASK | {"apply_steering_vectors": [VECTOR | {"scale": 1e39}]})
        assert (answer.status, answer.code, len(engine.bodies)) == (400, "steering_not_finite", 1)

    behind(stub_vllm(Script([answer_of_vllm(values, PROMPT, NEW)])), act)


#: Its answer is too large to be held in memory by anyone who passes it on.
LARGE = ModelConfig(id="stub", checkpoint="org/stub", engine="vllm", max_activation_prompt_tokens=2048)
LARGE_ASK = {"prompt": "a" * 1999, "max_tokens": 1, "output_residual_stream": True, "output_dtype": "float32"}


def _large(answer_of_vllm: Answer, last: float = 1.0) -> tuple[Array, list[bytes]]:
    """Four layers of 2000 positions, the answer with them in pieces, and the very last value."""
    values = np.random.default_rng(0).normal(size=(4, 2000, 8)).astype(np.float32)
    values[3, 1999, 7] = last
    raw = answer_of_vllm(values, list(range(2000)), [1])
    return values, [raw[at : at + 65_536] for at in range(0, len(raw), 65_536)]


@pytest.mark.parametrize("accept", ["*/*", BINARY])
def test_what_is_found_wrong_in_the_last_value_is_the_whole_answer(
    accept: str, behind: Any, stub_vllm: Any, answer_of_vllm: Answer
) -> None:
    _, pieces = _large(answer_of_vllm, last=np.nan)

    async def act(gateway: StubGateway, engine: Any) -> None:
        answer = await gateway.ask(LARGE_ASK, accept=accept)
        assert (answer.status, answer.code, answer.whole) == (500, "capture_failed", True)
        assert answer.json["error"]["layer"] == 3
        used = gateway.usage["usage"]
        assert (used["monthly_input_tokens"]["used"], used["monthly_activations"]["used"]) == (0, 0)
        answer = await gateway.ask(LARGE_ASK | {"apply_steering_vectors": [VECTOR]}, accept=accept)
        assert (answer.status, answer.code, answer.whole) == (400, "steering_not_finite", True)

    # Apart from each other, what could go on would have gone on.
    apart = [*pieces[:-2], 0.3, pieces[-2], 0.3, pieces[-1]]
    behind(stub_vllm(Script(apart)), act, LARGE, first_answer_seconds=60.0)


@pytest.mark.parametrize("last", [1.0, np.nan])
def test_a_client_is_kept_alive_until_the_last_value_was_looked_at(
    last: float, behind: Any, stub_vllm: Any, answer_of_vllm: Answer
) -> None:
    values, pieces = _large(answer_of_vllm, last)
    was_patient = threading.Event()

    def slow() -> Iterator[Any]:
        yield from pieces[:-1]
        while not was_patient.is_set():
            yield 0.01
        yield pieces[-1]

    async def act(gateway: StubGateway, engine: Any) -> None:
        call = gateway.begin(LARGE_ASK)
        await call.until(lambda answered: answered.body == b"   ")
        was_patient.set()
        answer = await call.answer()

        assert answer.status == 200
        if np.isnan(last):
            assert answer.code == "capture_failed"
        else:
            found = read_completion(answer.body, layers=(0, 1, 2, 3)).choices[0].rows
            assert found is not None
            assert found.values.tobytes() == values.tobytes()

    behind(stub_vllm(Script(slow())), act, LARGE, first_answer_seconds=0.1)


def test_spans_are_sent_as_a_vector_a_position(
    behind: Any, stub_vllm: Any, answer_of_vllm: Answer, made_rows: Make
) -> None:
    async def act(gateway: StubGateway, engine: Any) -> None:
        asked = ASK | {"prompt": "abcd", "max_tokens": 1, "apply_steering_vectors": [SPANS, VECTOR]}
        assert (await gateway.ask(asked)).status == 200

        spans, plain = json.loads(engine.bodies[0]["vllm_xargs"]["apply_steering_vectors"])
        assert spans["position_indices"] == [1, 2, 3, 4]
        assert spans["activations"]["shape"] == [1, 4, 8]
        assert "position_spans" not in spans
        assert plain == VECTOR

    behind(stub_vllm(Script([answer_of_vllm(None, [0, 1, 2, 3, 4], [1])])), act)


def test_the_cap_of_a_capture_counts_what_the_engine_captures(behind: Any, stub_vllm: Any) -> None:
    async def act(gateway: StubGateway, engine: Any) -> None:
        answer = await gateway.ask(
            ASK | {"prompt": "a" * 90, "output_residual_stream": True, "output_positions": "last"}
        )

        assert (answer.status, answer.code) == (400, "activation_prompt_too_long")
        assert engine.bodies == []

    behind(stub_vllm(Script([b"{}"])), act)


@pytest.mark.parametrize(("counts", "status"), [([3, 4], 500), ([3, 3], 200), (None, 400)])
def test_a_capture_beside_an_interruption_or_an_unknown_number_of_them_is_not_trusted(
    counts: list[int] | None, status: int, behind: Any, stub_vllm: Any, answer_of_vllm: Answer, made_rows: Make
) -> None:
    async def act(gateway: StubGateway, engine: Any) -> None:
        answer = await gateway.ask(CAPTURE)

        assert answer.status == status
        assert engine.looks.count("/metrics") == (1 if counts is None else 2)
        if status == 500:
            error = answer.json["error"]
            assert (error["code"], error["retryable"]) == ("capture_failed", True)
            assert int(answer.headers["retry-after"]) == error["retry_after_seconds"]
            assert "interrupted" in error["message"]
            # It says nothing of the engine's health.
            assert [type(failure) for failure in gateway.pool.failures] == [CaptureInterrupted]
        if status == 400:
            assert answer.code == "unsupported"
            assert "--disable-log-stats" in answer.json["error"]["message"]
            assert (engine.bodies, gateway.pool.failures) == ([], [])

    behind(stub_vllm(Script([answer_of_vllm(made_rows(2, 4), PROMPT, NEW)]), interruptions=counts), act)


def test_a_prompt_that_runs_in_one_piece_is_captured_before_any_interruption(
    behind: Any, stub_vllm: Any, answer_of_vllm: Answer, made_rows: Make
) -> None:
    async def act(gateway: StubGateway, engine: Any) -> None:
        assert (await gateway.ask(CAPTURE | {"max_tokens": 1})).status == 200
        assert (await gateway.ask(ASK)).status == 200
        assert engine.looks == []

    for counts in ([3, 4], None):
        behind(stub_vllm(Script([answer_of_vllm(made_rows(2, 2), PROMPT, NEW[:1])]), interruptions=counts), act)


def test_what_a_vllm_cannot_be_sent_starts_none(behind: Any, stub_vllm: Any) -> None:
    wide = vector_body(SteeringVector((1,), np.ones((1, 8), np.float32), spans=((0, 40),)))

    async def act(gateway: StubGateway, engine: Any) -> None:
        once = ASK | {"prompt": "a" * 40, "max_tokens": 1}
        for vector, code in ((VECTOR | {"scale": 1e39}, "steering_not_finite"), (wide, "steering_unsupported")):
            answer = await gateway.ask(once | {"apply_steering_vectors": [vector]})
            assert (answer.status, answer.code) == (400, code)
        assert gateway.pool.leases == []

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("streamtap.engines.vllm_limits._MOST_BYTES", 1000)
        behind(stub_vllm(Script([b"{}"])), act)


def test_spans_are_spread_beside_the_loop(behind: Any, stub_vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    where: list[bool] = []

    def spread(*asked: Any, **told: Any) -> Any:
        where.append(threading.current_thread() is threading.main_thread())
        return to_vllm(*asked, **told)

    monkeypatch.setattr("streamtap.server.engine_call.to_vllm", spread)

    async def act(gateway: StubGateway, engine: Any) -> None:
        for vector in (SPANS, VECTOR):
            body = ASK | {"prompt": "abcd", "max_tokens": 1, "apply_steering_vectors": [vector]}
            assert (await gateway.ask(body)).status == 200
        assert where == [False, True]

    behind(stub_vllm(Script([json.dumps(completion()).encode()])), act)


def test_what_a_vllm_refuses_is_the_callers_and_what_breaks_it_is_not(behind: Any, stub_vllm: Any) -> None:
    said = {"error": {"message": "too long", "type": "BadRequestError", "param": None, "code": 400}}

    async def refused(gateway: StubGateway, engine: Any) -> None:
        answer = await gateway.ask(CAPTURE)
        assert (answer.status, answer.code, gateway.pool.failures) == (400, "invalid_request", [])

    async def broken(gateway: StubGateway, engine: Any) -> None:
        answer = await gateway.ask(CAPTURE)
        assert (answer.status, answer.code, len(gateway.pool.failures)) == (502, "engine_dead", 1)

    behind(stub_vllm(Script([json.dumps(said).encode()], status=400)), refused)
    behind(stub_vllm(Script([0.01, BREAK])), broken)


def test_one_that_may_run_prompts_in_pieces_steers_every_position_alone(behind: Any, stub_vllm: Any) -> None:
    pieces = ModelConfig(id="stub", checkpoint="org/stub", engine="vllm", arguments=("--enable-chunked-prefill",))
    own = ModelConfig(id="stub", checkpoint="org/stub", engine="vllm", command=("run", "{port}"))

    async def act(gateway: StubGateway, engine: Any) -> None:
        for vector in (SPANS, _positions(0)):
            answer = await gateway.ask(ASK | {"max_tokens": 1, "apply_steering_vectors": [vector]})
            assert (answer.status, answer.code) == (400, "steering_unsupported")
            assert "in pieces" in answer.json["error"]["message"]
        assert engine.bodies == []

    for model in (pieces, own, replace(pieces, arguments=("--enable_chunked_prefill=True",))):
        behind(stub_vllm(Script([b"{}"])), act, model)
