"""NDIF in trouble, as its stand-in shows it: what is asked again, and how every refusal is told."""

from __future__ import annotations

import ast
import itertools
import logging
import re
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nnsight.schema.config import CONFIG

from streamtap.activations import Activations, join
from streamtap.engines.nnsight import engine as engine_module
from streamtap.engines.nnsight import ndif_jobs
from streamtap.engines.nnsight.engine import NnsightEngine
from streamtap.engines.nnsight.patience import Patience, unmiscounted
from streamtap.engines.opening import load_engine
from streamtap.engines.references import ModelReference
from streamtap.errors import (
    EngineFailed,
    EngineOutOfMemory,
    InvalidInput,
    InvalidKey,
    MissingAuthorization,
    ModelNotFound,
    StreamtapError,
    TransferFailed,
    Unsupported,
    UnsupportedModel,
)
from streamtap.spec import CaptureSpec
from streamtap.testing.ndif_server import NdifServer, Served
from streamtap.testing.ndif_server.handling import Handler
from streamtap.testing.reference import plain_rows, worst_row_error

KEY = "11111111-2222-3333-4444-555555555555"
RAGGED = [np.random.default_rng(n).integers(3, 90, n).tolist() for n in (3, 40, 1, 17, 8)]

Open = Callable[..., NnsightEngine]


def capture(engine: NnsightEngine, prompts: list[Any], **spec: Any) -> Activations:
    return join(list(engine.capture(prompts, CaptureSpec(**spec))))


# Retries


@pytest.mark.parametrize(
    "fault",
    [
        {"kind": "http", "status": 503},
        {"kind": "http", "status": 500},
        {"kind": "job"},
        {"kind": "drop"},
        {"kind": "goodbye"},
    ],
)
def test_what_fails_for_a_while_is_asked_again_later_and_later(
    open_remote: Open, ndif: NdifServer, model: Any, fault: dict[str, Any]
) -> None:
    engine = open_remote(dtype="float32")
    waits: list[float] = []
    engine.patience = Patience(pause=waits.append)
    ndif.fail(**fault, times=3)

    acts = capture(engine, RAGGED)

    assert waits == [1.0, 2.0, 4.0]
    assert worst_row_error(acts.prompt(3)[2], plain_rows(model, RAGGED[3])[2]) <= 5e-5


def test_another_thread_that_parses_meanwhile_costs_no_wait(
    open_remote: Open, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.11 loses count of the depth of a tree where two threads parse at once, as formatting an error does."""
    engine = open_remote(dtype="float32")
    waits: list[float] = []
    engine.patience = Patience(pause=waits.append)
    parse, here, parsed = ast.parse, threading.current_thread(), itertools.count()

    def parse_that_loses_count(*arguments: Any, **options: Any) -> ast.AST:
        if threading.current_thread() is here and next(parsed) % 2 == 0:
            raise SystemError("AST constructor recursion depth mismatch (before=213, after=34)")
        return parse(*arguments, **options)

    with monkeypatch.context() as patch:  # pytest parses, too, to tell of a failure
        patch.setattr(ast, "parse", parse_that_loses_count)
        acts = capture(engine, RAGGED)

    assert next(parsed) >= 2
    assert waits == []
    assert worst_row_error(acts.prompt(3)[2], plain_rows(model, RAGGED[3])[2]) <= 5e-5


@pytest.mark.parametrize("said", ["AST constructor recursion depth mismatch (before=2, after=1)", "something else"])
def test_a_fault_of_python_that_stays_is_told(said: str) -> None:
    def ask() -> None:
        asked.append(1)
        raise SystemError(said)

    asked: list[int] = []
    with pytest.raises(SystemError, match=re.escape(said)):
        unmiscounted(ask)
    assert (len(asked) > 1) == said.startswith("AST")


def test_max_retries_is_how_often(open_remote: Open, ndif: NdifServer) -> None:
    engine = open_remote()
    waits: list[float] = []
    engine.patience = Patience(pause=waits.append)
    engine.trying(1)
    ndif.fail("job", times=2, said="the node caught fire")

    with pytest.raises(EngineFailed, match=r"a job failed at 127.0.0.1:\d+: RuntimeError: the node caught fire"):
        capture(engine, RAGGED)

    assert waits == [1.0]
    assert engine.trying(0) == 1
    ndif.fail("http")
    with pytest.raises(TransferFailed, match="not serving now: Try later."):
        capture(engine, RAGGED)
    with pytest.raises(InvalidInput, match="max_retries must be a whole number of at least 0; got -1"):
        engine.trying(-1)


def test_waits_are_told_without_prompts_or_key(
    open_remote: Open, ndif: NdifServer, caplog: pytest.LogCaptureFixture
) -> None:
    ndif.fail("http", times=1, said=f"who is {KEY}?")

    with caplog.at_level(logging.DEBUG):
        capture(open_remote(), ["a secret text"], layers=[0])

    assert "asking again in 1 s, 1 of 4" in caplog.text
    assert KEY not in caplog.text
    assert "secret" not in caplog.text


def test_a_goodbye_is_told_as_a_way_that_broke(open_remote: Open, ndif: NdifServer) -> None:
    engine = open_remote()
    engine.trying(0)
    ndif.fail("goodbye")

    said = told(lambda: capture(engine, RAGGED[:1]), TransferFailed)

    assert "failed (WebSocketConnectionClosedException)" in said


def test_a_goodbye_before_the_first_word_too(
    open_remote: Open, ndif: NdifServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NdifServer, "subscribe", lambda _server, client: client.say_goodbye() or "")
    engine = open_remote()
    engine.trying(0)

    said = told(lambda: capture(engine, RAGGED[:1]), TransferFailed)

    assert "failed (WebSocketConnectionClosedException)" in said


@pytest.mark.parametrize("word", ["hello", "[]", "{}", "3", b"\x80no text", f"who is {KEY}?"])
def test_a_first_word_that_is_not_ndifs(
    open_remote: Open, ndif: NdifServer, monkeypatch: pytest.MonkeyPatch, word: str | bytes
) -> None:
    monkeypatch.setattr(NdifServer, "subscribe", lambda _server, client: str(client.send(word)))
    engine = open_remote()
    engine.trying(0)

    assert "answered with what cannot be read" in told(lambda: capture(engine, RAGGED[:1]), TransferFailed)


@pytest.mark.parametrize("inline_bytes", [0, 1 << 20])
@pytest.mark.parametrize("packed", [True, False])
def test_a_result_that_cannot_be_read(
    open_remote: Open, ndif: NdifServer, monkeypatch: pytest.MonkeyPatch, packed: bool, inline_bytes: int
) -> None:
    monkeypatch.setattr(CONFIG.API, "COMPRESS", packed)
    monkeypatch.setattr(Served, "run", lambda *_given, **_named: b"neither a frame nor what torch has saved")
    monkeypatch.setattr(ndif, "_inline_bytes", inline_bytes)
    engine = open_remote()
    engine.trying(0)

    assert "answered with what cannot be read" in told(lambda: capture(engine, RAGGED[:1]), TransferFailed)


def test_a_word_on_a_job_that_cannot_be_read(
    open_remote: Open, ndif: NdifServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NdifServer, "take", lambda *_given: "this is no word of NDIF's")
    engine = open_remote()
    engine.trying(0)

    assert "answered with what cannot be read" in told(lambda: capture(engine, RAGGED[:1]), TransferFailed)


def test_an_hour_without_a_word_is_not_waited_out(
    open_remote: Open, ndif: NdifServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ndif_jobs, "_PING_SECONDS", 0.05)
    monkeypatch.setattr(ndif_jobs, "_MOST_PINGS", 2)
    monkeypatch.setattr(NdifServer, "_run", lambda *_arguments: time.sleep(0.6))
    engine = open_remote()
    engine.trying(0)

    with pytest.raises(TransferFailed, match="failed \\(WebSocketTimeoutException\\)"):
        capture(engine, RAGGED[:1])


# Refusals


def told(call: Callable[[], Any], kind: type[StreamtapError]) -> str:
    """The one sentence of an error, which holds no key, and neither does what it came of."""
    with pytest.raises(kind) as caught:
        call()
    error: BaseException | None = caught.value
    said = str(error)
    while error is not None:
        assert KEY not in str(error)
        error = error.__cause__ if error.__suppress_context__ else error.__context__
    assert "\n" not in said
    return said


def test_ndif_without_a_key_is_refused_before_anything_is_read() -> None:
    said = told(lambda: load_engine("org/nowhere", backend="nnsight", remote=True), MissingAuthorization)

    assert "set NDIF_API_KEY" in said


def test_a_server_that_wants_a_key_says_so(open_remote: Open) -> None:
    engine = open_remote(api_key=None)

    assert "wants an API key: pass api_key=;" in told(lambda: capture(engine, RAGGED), MissingAuthorization)


@pytest.mark.parametrize("key", ["11111111-2222-3333-4444-000000000000", "tell-nobody"])
def test_a_key_that_is_not_taken(open_remote: Open, key: str) -> None:
    engine = open_remote(api_key=key)

    with pytest.raises(InvalidKey, match="does not take this API key: check api_key=") as caught:
        capture(engine, RAGGED)

    assert key not in str(caught.value)
    assert key not in "".join(traceback.format_exception(caught.value))
    assert "key" not in repr(engine.patience)


def test_a_model_that_is_not_served(open_remote: Open, bare_folder: Path, ndif: NdifServer) -> None:
    known = ModelReference("org/other", bare_folder, None, "sha256:of-files")
    engine = NnsightEngine.load("org/other", remote=ndif.url, api_key=KEY, reference=known)

    said = told(lambda: capture(engine, RAGGED), ModelNotFound)

    assert "does not serve this model" in said


def test_a_job_that_does_not_fit_is_cut(open_remote: Open, ndif: NdifServer, model: Any) -> None:
    engine = open_remote(dtype="float32")
    before = len(ndif.jobs)
    ndif.fail("job", said="torch.OutOfMemoryError: CUDA out of memory.")

    acts = capture(engine, RAGGED)

    assert len(ndif.jobs) - before > 2
    assert worst_row_error(acts.prompt(1)[2], plain_rows(model, RAGGED[1])[2]) <= 5e-5
    ndif.fail("job", said="CUDA out of memory.")
    with pytest.raises(EngineOutOfMemory, match=r"prompt 0 alone \(3 tokens\)"):
        capture(engine, RAGGED[:1])


@pytest.mark.parametrize(("status", "said"), [(400, "Client nnsight version 0.8.1 is below the least."), (422, "No.")])
def test_a_request_that_is_not_understood_is_not_asked_again(
    open_remote: Open, ndif: NdifServer, status: int, said: str
) -> None:
    engine = open_remote()
    ndif.fail("http", status=status, said=said)

    assert said in told(lambda: capture(engine, RAGGED), Unsupported)


def test_a_trace_that_gives_nothing_back_is_a_failure(open_remote: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "run_trace", lambda *_given, **_named: None)

    assert "gave nothing back" in told(lambda: capture(open_remote(), RAGGED), EngineFailed)


@pytest.mark.parametrize("status", [404, 200])
def test_an_address_of_something_else_is_told_at_once(
    open_remote: Open, ndif: NdifServer, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setattr(Handler, "_subscribe", lambda handler: handler._problem(status, "Another service."))
    engine = open_remote()
    waits: list[float] = []
    engine.patience = Patience(pause=waits.append)

    said = told(lambda: capture(engine, RAGGED), InvalidInput)

    assert f"answers, but not as NDIF does (HTTP {status}); check the address" in said
    assert waits == []


def test_nobody_at_the_address(open_remote: Open) -> None:
    engine = open_remote(remote="http://127.0.0.1:9")
    engine.trying(0)

    assert "the way to 127.0.0.1:9 failed" in told(lambda: capture(engine, RAGGED), TransferFailed)


def test_a_name_and_password_in_the_address_are_not_told(open_remote: Open) -> None:
    engine = open_remote(remote="http://me:secret@127.0.0.1:9/")
    engine.trying(0)

    assert "secret" not in told(lambda: capture(engine, RAGGED), TransferFailed)
    assert "secret" not in str(engine.provenance)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"remote": "ftp://there"}, "remote must be True, False, 'local' or http"),
        ({"dtype": "int8"}, "dtype must be one of auto, bfloat16, float32, float16; got 'int8'"),
        ({"device": "cuda"}, "device, device_map and quantization are the server's"),
        ({"quantization": "4bit"}, "device, device_map and quantization are the server's"),
        ({"batch_size": 0}, "batch_size must be at least 1; got 0"),
        ({"remote": False}, "api_key is a server's, and the model runs here"),
    ],
)
def test_options_that_mean_nothing_are_refused(open_remote: Open, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        open_remote(**options)


def test_ndif_itself_takes_hub_ids_alone(whole_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NDIF_API_KEY", KEY)

    for name in (str(whole_folder), "demo"):
        with pytest.raises(InvalidInput, match="NDIF knows models by their Hub id"):
            NnsightEngine.load(name, remote=True)


def test_a_model_that_is_no_causal_one_is_told(tmp_path: Path, ndif: NdifServer) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "t5", "num_layers": 2, "d_model": 8, "vocab_size": 9}')
    known = ModelReference("org/t5", tmp_path, None, "sha256:x")

    with pytest.raises(UnsupportedModel):
        NnsightEngine.load("org/t5", remote=ndif.url, reference=known)
