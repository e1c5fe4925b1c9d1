"""Answers on their way through the gateway: passed on unchanged, and never half as whole."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load, save

from streamtap.server.relaying.relay import HEAD_BYTES
from streamtap.testing.stub_engine import BREAK, Script, StubEngine, StubPool, answers, completion
from streamtap.testing.stub_gateway import Answer, StubGateway

ASK = {"model": "stub", "prompt": "a", "max_tokens": 3}
CAPTURE = ASK | {"output_residual_stream": [1, 2]}
BINARY = "application/vnd.safetensors"
EVENTS = "text/event-stream"

Act = Callable[[StubGateway, StubEngine], Coroutine[Any, Any, None]]


def _with(folder: Path, script: Script, act: Act) -> None:
    with StubEngine(lambda _body: script) as engine:

        async def main() -> None:
            gateway = StubGateway(folder, StubPool(engine.base_url))
            await act(gateway, engine)
            assert gateway.pool.held == 0
            assert gateway.usage["requests"]["active"]["now"] == 0
            await gateway.close()

        asyncio.run(main())


def _asked(folder: Path, script: Script, body: Any, **headers: str) -> tuple[Answer, dict[str, int], StubPool]:
    """The answer, what was charged of input, output and captures, and the pool."""
    found: list[Any] = []

    async def act(gateway: StubGateway, engine: StubEngine) -> None:
        answer = await gateway.ask(body, **headers)
        assert len(engine.bodies) == 1
        used = gateway.usage["usage"]
        charged = {name: used[f"monthly_{name}"]["used"] for name in ("input_tokens", "output_tokens", "activations")}
        found.extend([answer, charged, gateway.pool])

    _with(folder, script, act)
    answer, charged, pool = found
    return answer, charged, pool


def _captured(shape: Iterable[int], data: str = "AAAA", **more: Any) -> dict[str, Any]:
    envelope = {
        "dtype": "float32",
        "original_dtype": "torch.float32",
        "shape": list(shape),
        "compression": "zstd",
        "data": data,
    }
    return {"activations": {"residual_stream": envelope, **more}}


def test_an_answer_passes_unchanged_and_is_charged(tmp_path: Path) -> None:
    body = json.dumps(completion(completion_tokens=3)).encode()

    answer, charged, pool = _asked(tmp_path, Script([body[:10], body[10:50], body[50:]]), ASK)

    assert (answer.status, answer.body, answer.whole) == (200, body, True)
    assert charged == {"input_tokens": 2, "output_tokens": 3, "activations": 0}
    assert (pool.leases, pool.good, pool.failures) == ([("stub", "completions")], 1, [])


def test_what_was_used_is_settled_before_the_last_bytes_go_out(tmp_path: Path) -> None:
    body = json.dumps(completion(text="x" * 3 * HEAD_BYTES)).encode()

    async def act(gateway: StubGateway, engine: StubEngine) -> None:
        call = gateway.begin(ASK)
        seen = []
        while not call.task.done():
            await asyncio.sleep(0)
            seen.append((call.answered.whole, gateway.usage["requests"]["active"]["now"]))
        assert (await call.answer()).body == body
        assert (True, 1) not in seen

    _with(tmp_path, answers(json.loads(body)), act)


def test_a_capture_of_the_right_shape_passes(tmp_path: Path) -> None:
    body = json.dumps(completion(completion_tokens=3, **_captured([2, 4, 8], layer_indices=[1, 2]))).encode()

    answer, charged, pool = _asked(tmp_path, Script([body]), CAPTURE)

    assert (answer.status, answer.body) == (200, body)
    assert charged["activations"] == 1
    assert pool.leases == [("stub", "activations")]


@pytest.mark.parametrize(
    "more",
    [
        _captured([1, 4, 8]),
        _captured([2, 3, 8]),
        _captured([2, 4, 7]),
        _captured([2, 4, 8], layer_indices=[0, 2]),
        {},
        {"activations": {}},
    ],
    ids=["layers", "rows", "hidden", "other layers", "none", "no envelope"],
)
def test_a_capture_that_is_not_whole_is_an_error_and_costs_nothing(more: dict[str, Any], tmp_path: Path) -> None:
    answer, charged, pool = _asked(tmp_path, answers(completion(completion_tokens=3, **more)), CAPTURE)

    assert (answer.status, answer.code) == (500, "capture_failed")
    assert b"AAAA" not in answer.body
    assert charged == {"input_tokens": 0, "output_tokens": 0, "activations": 0}
    assert [failure.code for failure in pool.failures] == ["capture_failed"]


@pytest.mark.parametrize(
    ("positions", "rows"), [("last", 1), ("prompt", 2), ("generated", 2), ([0, 3], 2), ([1, 2, 3], 3)]
)
def test_chosen_positions_are_counted(positions: Any, rows: int, tmp_path: Path) -> None:
    asked = CAPTURE | {"output_positions": positions}
    right = answers(completion(completion_tokens=3, **_captured([2, rows, 8])))
    wrong = answers(completion(completion_tokens=3, **_captured([2, rows + 1, 8])))
    (tmp_path / "wrong").mkdir()

    assert _asked(tmp_path, right, asked)[0].status == 200
    assert _asked(tmp_path / "wrong", wrong, asked)[0].code == "capture_failed"


def test_positions_that_a_short_generation_did_not_reach_have_no_rows(tmp_path: Path) -> None:
    ended_early = answers(completion(completion_tokens=1, **_captured([2, 1, 8])))

    assert _asked(tmp_path, ended_early, CAPTURE | {"output_positions": [0, 3]})[0].status == 200


def _batch(*rows: int) -> dict[str, Any]:
    whole = completion(prompt_tokens=5, completion_tokens=4)
    choices = [whole["choices"][0] | {"index": index} | _captured([2, count, 8]) for index, count in enumerate(rows)]
    return whole | {"choices": choices}


@pytest.mark.parametrize(
    ("rows", "status"), [([4, 3], 200), ([3, 4], 200), ([4, 4], 500), ([1, 6], 500), ([7], 500), ([4, 3, 1], 500)]
)
def test_captures_of_a_batch_are_held_against_the_whole(rows: list[int], status: int, tmp_path: Path) -> None:
    """Prompts of 2 and 3 tokens, 4 new ones in all: 7 positions went through the model."""
    assert _asked(tmp_path, answers(_batch(*rows)), CAPTURE | {"prompt": ["a", "ab"]})[0].status == status


def test_a_wrong_shape_late_in_a_large_answer_breaks_the_connection(tmp_path: Path) -> None:
    large = _captured([2, 4, 8], data="A" * 2 * HEAD_BYTES)
    whole = completion(prompt_tokens=5, completion_tokens=4)
    whole["choices"] = [whole["choices"][0] | large, whole["choices"][0] | _captured([2, 9, 8])]

    answer, charged, _pool = _asked(tmp_path, answers(whole), CAPTURE | {"prompt": ["a", "ab"]})

    assert (answer.status, answer.whole) == (200, False)
    with pytest.raises(json.JSONDecodeError):
        json.loads(answer.body)
    assert charged == {"input_tokens": 0, "output_tokens": 0, "activations": 0}


def test_an_engine_that_ends_early_in_a_small_answer_keeps_its_status(tmp_path: Path) -> None:
    answer, charged, pool = _asked(tmp_path, Script([json.dumps(completion()).encode()[:-1], BREAK]), ASK)

    assert (answer.status, answer.code, answer.whole) == (502, "engine_dead", True)
    assert int(answer.headers["retry-after"]) > 0
    assert charged["input_tokens"] == 0
    assert [failure.code for failure in pool.failures] == ["engine_dead"]


@pytest.mark.parametrize("last", [[BREAK], []], ids=["broken", "cut short"])
def test_an_engine_that_ends_early_in_a_large_answer_breaks_the_connection(last: list[Any], tmp_path: Path) -> None:
    half = json.dumps(completion(text="x" * 4 * HEAD_BYTES)).encode()[: 3 * HEAD_BYTES]

    answer, charged, _pool = _asked(tmp_path, Script([half, *last]), ASK)

    assert (answer.status, answer.whole) == (200, False)
    assert charged["output_tokens"] == 0


@pytest.mark.parametrize(
    ("said", "status", "code", "counts"),
    [
        (
            answers({"error": {"message": "too hot", "code": "steering_not_finite"}}, status=400),
            400,
            "steering_not_finite",
            0,
        ),
        (
            answers({"object": "error", "message": "bad", "type": "BadRequestError"}, status=400),
            400,
            "invalid_request",
            0,
        ),
        (answers({"error": {"message": "no", "code": "vllm_says"}}, status=422), 400, "invalid_request", 0),
        (answers({"error": {"message": "who?"}}, status=401), 502, "upstream_server_error", 1),
        (answers({"error": {"message": "busy"}}, status=429), 502, "upstream_server_error", 1),
        (
            answers({"error": {"message": "3", "code": "capture_failed", "layer": 3}}, status=500),
            500,
            "capture_failed",
            1,
        ),
        (
            answers({"error": {"message": "oom", "code": "engine_out_of_memory"}}, status=500),
            502,
            "engine_out_of_memory",
            1,
        ),
        (answers({"error": {"message": "secret", "code": "other"}}, status=500), 502, "upstream_server_error", 1),
        (Script([b"<html>"], status=503, media="text/html"), 502, "upstream_server_error", 1),
        (Script([b"<html>"], media="text/html"), 502, "upstream_server_error", 1),
        (Script([b"{]"]), 502, "upstream_server_error", 1),
        (answers({"choices": []}), 502, "upstream_server_error", 1),
        (answers({"error": {"message": "late", "code": "capture_failed", "layer": 0}}), 500, "capture_failed", 1),
    ],
)
def test_what_an_engine_says_of_itself(said: Script, status: int, code: str, counts: int, tmp_path: Path) -> None:
    answer, charged, pool = _asked(tmp_path, said, ASK)

    assert (answer.status, answer.code, len(pool.failures), pool.good) == (status, code, counts, 0)
    assert b"secret" not in answer.body
    # Of these only a vector that broke its own request is neither refused before it ran nor the server's failure.
    ran = 2 if code == "steering_not_finite" else 0
    assert charged == {"input_tokens": ran, "output_tokens": 0, "activations": 0}


def test_nobody_answers_where_the_engine_should_be(tmp_path: Path) -> None:
    async def main() -> None:
        gateway = StubGateway(tmp_path, StubPool("http://127.0.0.1:9"))

        answer = await gateway.ask(ASK)

        assert (answer.status, answer.code) == (502, "upstream_unreachable")
        assert len(gateway.pool.failures) == 1
        await gateway.close()

    asyncio.run(main())


def test_a_client_that_leaves_stops_the_engine_and_frees_its_slot(tmp_path: Path) -> None:
    body = json.dumps(completion(text="x" * 3 * HEAD_BYTES)).encode()
    slow = Script([body[: 2 * HEAD_BYTES], 30.0, body[2 * HEAD_BYTES :]])

    async def act(gateway: StubGateway, engine: StubEngine) -> None:
        call = gateway.begin(ASK)
        await call.until(lambda answer: bool(answer.pieces))
        call.leave()
        await call.answer()

        assert not call.answered.whole
        async with asyncio.timeout(10):
            while not engine.left:
                await asyncio.sleep(0.01)
        # Two tokens went in and, as usage said before the text, one came out.
        used = gateway.usage["usage"]
        assert (used["monthly_input_tokens"]["used"], used["monthly_output_tokens"]["used"]) == (2, 1)

    _with(tmp_path, slow, act)


def _event(**chunk: Any) -> bytes:
    return b"data: " + json.dumps({"id": "cmpl-1", **chunk}, separators=(",", ":")).encode() + b"\n\n"


TEXTS = [_event(choices=[{"index": 0, "text": text}], usage=None) for text in ("a", 'b\\"usage\\":{', "c")]
USAGE = _event(choices=[], usage={"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5})
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize("asked", [True, False])
def test_events_pass_one_by_one_with_usage_only_where_it_was_asked_for(asked: bool, tmp_path: Path) -> None:
    whole = b"".join([*TEXTS, USAGE, DONE])
    cut_anywhere = [whole[at : at + 7] for at in range(0, len(whole), 7)]
    body = ASK | {"stream": True, **({"stream_options": {"include_usage": True}} if asked else {})}

    answer, charged, _pool = _asked(tmp_path, Script(cut_anywhere, media=EVENTS), body)

    told = TEXTS if asked else [text.replace(b',"usage":null', b"") for text in TEXTS]
    assert answer.pieces == [*told, *([USAGE] if asked else []), DONE]
    assert answer.headers["content-type"].startswith(EVENTS)
    assert (answer.headers["x-accel-buffering"], answer.headers["cache-control"]) == ("no", "no-cache")
    assert charged == {"input_tokens": 2, "output_tokens": 3, "activations": 0}


def test_the_engine_is_always_asked_for_usage(tmp_path: Path) -> None:
    async def act(gateway: StubGateway, engine: StubEngine) -> None:
        await gateway.ask(ASK | {"stream": True}, x_request_id="mine")
        assert engine.bodies[0]["stream_options"] == {"include_usage": True}
        assert engine.bodies[0]["model"] == "org/stub"
        assert engine.headers[0]["accept"] == EVENTS
        assert "mine" not in engine.headers[0]["x-request-id"]
        assert gateway.key not in str(engine.headers)

    _with(tmp_path, Script([USAGE, DONE], media=EVENTS), act)


@pytest.mark.parametrize(
    ("pieces", "code"),
    [
        ([*TEXTS, BREAK], "engine_dead"),
        ([*TEXTS], "engine_dead"),
        ([*TEXTS, DONE], "upstream_server_error"),
        ([*TEXTS, _event(error={"message": "oom", "code": "engine_out_of_memory"})], "engine_out_of_memory"),
        ([*TEXTS, b'data: {"usage":{]\n\n'], "upstream_server_error"),
    ],
)
def test_a_late_error_of_a_stream_is_its_last_event(pieces: list[Any], code: str, tmp_path: Path) -> None:
    answer, charged, pool = _asked(tmp_path, Script(pieces, media=EVENTS), ASK | {"stream": True})

    assert answer.status == 200
    assert answer.whole
    *texts, last = answer.pieces
    assert len(texts) == 3
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == code
    assert charged["output_tokens"] == 0
    assert len(pool.failures) == 1


def test_a_stream_whose_client_leaves_is_charged_for_what_it_got(tmp_path: Path) -> None:
    async def act(gateway: StubGateway, engine: StubEngine) -> None:
        call = gateway.begin(ASK | {"stream": True, "max_tokens": 100})
        await call.until(lambda answer: len(answer.pieces) == 3)
        call.leave()
        await call.answer()
        used = gateway.usage["usage"]
        assert (used["monthly_input_tokens"]["used"], used["monthly_output_tokens"]["used"]) == (2, 3)
        assert gateway.pool.failures == []

    _with(tmp_path, Script([*TEXTS, 30.0, DONE], media=EVENTS), act)


def _tensors(rows: int, cut: int | None = None, more_bytes: int = 0) -> Script:
    told = {"completion": json.dumps(completion(completion_tokens=3))}
    tensors = {"residual_stream": np.ones((2, rows, 8), np.float32), "token_ids": np.ones(rows, np.int32)}
    raw = save({**tensors, "more": np.ones(more_bytes, np.int8)}, told)
    size = 50 + more_bytes // 8
    return Script([raw[at : at + size] for at in range(0, len(raw), size)][:cut], media=BINARY)


def test_a_binary_answer_passes_with_its_length(tmp_path: Path) -> None:
    answer, charged, _pool = _asked(tmp_path, _tensors(4), CAPTURE, accept=BINARY)

    assert load(answer.body)["residual_stream"].shape == (2, 4, 8)
    assert answer.headers["content-type"] == BINARY
    assert int(answer.headers["content-length"]) == len(answer.body)
    assert charged == {"input_tokens": 2, "output_tokens": 3, "activations": 1}


def test_a_binary_answer_that_is_not_whole(tmp_path: Path) -> None:
    for name in ("wrong", "cut", "short"):
        (tmp_path / name).mkdir()

    assert _asked(tmp_path / "wrong", _tensors(3), CAPTURE, accept=BINARY)[0].code == "capture_failed"
    assert _asked(tmp_path / "cut", _tensors(4, cut=2), CAPTURE, accept=BINARY)[0].code == "engine_dead"
    # More than can wait in one place: a part of it is out before its end is missed.
    large = _tensors(4, cut=-1, more_bytes=4_000_000)
    broken, charged, _pool = _asked(tmp_path / "short", large, CAPTURE, accept=BINARY)
    assert (broken.status, broken.whole, charged["activations"]) == (200, False, 0)


def test_an_engine_without_binary_answers_in_json(tmp_path: Path) -> None:
    body = completion(completion_tokens=3, **_captured([2, 4, 8]))

    answer, _charged, _pool = _asked(tmp_path, answers(body), CAPTURE, accept=BINARY)

    assert answer.json == body
    assert answer.headers["content-type"] == "application/json"


@pytest.mark.parametrize("after", [[0.02], [0.02, BREAK]])
def test_an_engine_whose_stream_ended_well_sees_no_client_leave(after: list[Any], tmp_path: Path) -> None:
    told = completion()
    usage = told.pop("usage")
    events = [told, told | {"choices": [], "usage": usage}]
    pieces = [b"data: " + json.dumps(event).encode() + b"\n\n" for event in events]

    async def act(gateway: StubGateway, engine: StubEngine) -> None:
        for _ in range(3):
            answer = await gateway.ask(ASK | {"stream": True})
            assert (answer.whole, answer.pieces[-1]) == (True, b"data: [DONE]\n\n")
        assert engine.left == 0
        assert (gateway.pool.good, gateway.pool.failures) == (3, [])

    _with(tmp_path, Script([*pieces, b"data: [DONE]\n\n", *after], media=EVENTS), act)
