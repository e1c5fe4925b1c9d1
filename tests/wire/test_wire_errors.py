"""Errors on the wire: one shape, and back to the class that was raised."""

from __future__ import annotations

import inspect
import json
from typing import Any

import pytest

from streamtap import errors
from streamtap.errors import (
    ActivationQuotaExceeded,
    CaptureMissed,
    CapturePromptTooLong,
    CircuitOpen,
    EngineFailed,
    InvalidInput,
    InvalidKey,
    InvalidPrompt,
    LimitReached,
    MissingAuthorization,
    NotFound,
    NotServing,
    QueueFull,
    RequestTooLarge,
    ScopeDenied,
    StreamtapError,
)
from streamtap.wire.errors import error_body, read_error

CLASSES = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, StreamtapError)]


def body(error: StreamtapError, request_id: str | None = "r1") -> dict[str, Any]:
    return json.loads(error_body(error, request_id))


def made(kind: type[StreamtapError], message: str, **extra: Any) -> StreamtapError:
    error = kind.__new__(kind)
    error.args = (message,)
    vars(error).update(extra)
    return error


def test_one_shape() -> None:
    assert body(InvalidInput("n must be 1.")) == {
        "error": {
            "message": "n must be 1.",
            "type": "invalid_request_error",
            "code": "invalid_request",
            "retryable": False,
        },
        "request_id": "r1",
    }


def test_what_else_an_error_says_stands_beside() -> None:
    error = QueueFull("too many requests.")
    error.retry_after_seconds = 5
    vars(error).update(model_id="m", live=("a", "b"), _hidden=1, thing=object())

    said = body(error)["error"]

    assert (said["retry_after_seconds"], said["model_id"], said["live"], said["retryable"]) == (
        5,
        "m",
        ["a", "b"],
        True,
    )
    assert "thing" not in said
    assert "_hidden" not in said


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (CapturePromptTooLong, "invalid_request_error"),
        (InvalidKey, "authentication_error"),
        (ScopeDenied, "permission_error"),
        (ActivationQuotaExceeded, "rate_limit_error"),
        (NotFound, "not_found_error"),
        (RequestTooLarge, "invalid_request_error"),
        (EngineFailed, "server_error"),
        (CircuitOpen, "server_error"),
        (StreamtapError, "server_error"),
    ],
)
def test_the_kinds_that_openai_knows(kind: type[StreamtapError], name: str) -> None:
    assert body(made(kind, "m"))["error"]["type"] == name


@pytest.mark.parametrize("kind", CLASSES)
def test_each_class_comes_back_as_one_that_catches_the_same_code(kind: type[StreamtapError]) -> None:
    back = read_error(body(made(kind, "one sentence.")), 500)

    assert back.code == kind.code
    assert back.retryable == kind.retryable
    assert issubclass(kind, type(back)) or kind.code == InvalidKey.code
    assert str(back) == "one sentence."


def test_a_class_of_its_own_code_comes_back_as_itself() -> None:
    own = [kind for kind in CLASSES if "code" in vars(kind) and kind.code != InvalidKey.code]

    assert [kind for kind in own if type(read_error(body(made(kind, "m")), 400)) is not kind] == []
    assert type(read_error(body(InvalidKey("m")), 401)) is InvalidKey


def test_attributes_come_back() -> None:
    assert vars(read_error(body(CapturePromptTooLong("m", index=3)), 400)) == {"index": 3, "request_id": "r1"}
    assert vars(read_error(body(CaptureMissed("m", layer=7)), 500)) == {"layer": 7, "request_id": "r1"}
    assert read_error(body(made(QueueFull, "m", retry_after_seconds=5)), 429).retry_after_seconds == 5


def test_attributes_that_a_class_promises_are_always_there() -> None:
    bare = {"error": {"code": "context_length_exceeded", "message": "m"}}
    missed = read_error({"error": {"code": "capture_failed", "message": "m"}}, 500)

    assert isinstance(error := read_error(bare, 400), InvalidPrompt)
    assert error.index == 0
    assert isinstance(missed, CaptureMissed)
    assert missed.layer == -1


def test_a_body_cannot_set_what_is_not_data() -> None:
    said = {"code": "queue_full", "message": "m", "args": [1], "__class__": "x", "with_traceback": 1, "a b": 2, "x": {}}

    error = read_error({"error": said}, 429)

    assert type(error) is QueueFull
    assert error.args == ("m",)
    assert vars(error) == {}


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, InvalidInput),
        (401, InvalidKey),
        (403, ScopeDenied),
        (404, NotFound),
        (413, RequestTooLarge),
        (422, InvalidInput),
        (429, LimitReached),
        (500, EngineFailed),
        (502, EngineFailed),
        (503, NotServing),
        (200, StreamtapError),
    ],
)
def test_a_code_that_is_not_ours_is_judged_by_the_status_and_kept(status: int, kind: type[StreamtapError]) -> None:
    error = read_error({"error": {"message": "m", "code": "harvest_unknown", "retryable": True}}, status)

    assert type(error) is kind
    assert error.code == "harvest_unknown"
    assert error.retryable is True
    assert body(error)["error"]["code"] == "harvest_unknown"


@pytest.mark.parametrize("said", [{}, {"error": None}, {"error": "it broke"}, {"error": []}, {"message": "it broke"}])
def test_other_shapes_are_read_as_far_as_they_go(said: dict[str, Any]) -> None:
    error = read_error(said, 401)

    assert type(error) is InvalidKey
    assert str(error) in ("it broke", "the server answered with status 401 and no message.")
    assert type(read_error({"error": {"code": ["x"], "message": 3}}, 401)) is InvalidKey


def test_no_key_was_sent() -> None:
    assert type(read_error(body(MissingAuthorization("m"), None), 401)) is MissingAuthorization
