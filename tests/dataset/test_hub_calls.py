from __future__ import annotations

import errno
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import errors
from huggingface_hub.utils import are_progress_bars_disabled, get_session

from streamtap.dataset.hub import HubSource
from streamtap.dataset.hub_calls import HubCalls, quiet_bars
from streamtap.dataset.hub_target import HubTarget
from streamtap.errors import AccessDenied, DatasetNotFound, InvalidInput, MissingExtra, NotEnoughSpace, TransferFailed
from streamtap.settings import Settings


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(cache_dir=tmp_path / "cache", hub_cache_dir=tmp_path / "hf")


def answered(kind: type[errors.HfHubHTTPError], status: int, **headers: str) -> errors.HfHubHTTPError:
    request = get_session().build_request("GET", "https://hub.example/x")
    return kind("their words", response=errors.Response(status, headers=headers, request=request))


def caused(outer: Exception, inner: Exception) -> Exception:
    outer.__cause__ = inner
    return outer


class Work:
    """Fails with the errors given, one after the other, the last one for ever."""

    def __init__(self, *failures: Exception | None) -> None:
        self.failures = list(failures)
        self.n_tries = 0

    def __call__(self) -> str:
        self.n_tries += 1
        failure = self.failures.pop(0) if len(self.failures) > 1 else self.failures[0]
        if failure is not None:
            raise failure
        return "done"


@pytest.fixture
def call(settings: Settings) -> Callable[..., str]:
    def run(work: Work, **options: Any) -> str:
        calls = HubCalls("user/name", "hf_x", None, settings, **{"sleep": lambda _: None, **options})
        return calls.call("reading x of user/name", work)

    return run


@pytest.mark.parametrize(
    ("failure", "kind", "words"),
    [
        (answered(errors.GatedRepoError, 403), AccessDenied, "user/name is gated: ask for access"),
        (answered(errors.DisabledRepoError, 403), AccessDenied, "is disabled on the Hub"),
        (answered(errors.RepositoryNotFoundError, 404), DatasetNotFound, "or it is private and this token may not"),
        (answered(errors.RevisionNotFoundError, 404), DatasetNotFound, "no such branch, tag or commit"),
        (answered(errors.RemoteEntryNotFoundError, 404), DatasetNotFound, "there is no such file"),
        (answered(errors.HfHubHTTPError, 401), AccessDenied, "does not accept this token"),
        (answered(errors.HfHubHTTPError, 418), TransferFailed, "refuses it with HTTP 418"),
        (caused(RuntimeError("wrapped"), answered(errors.HfHubHTTPError, 403)), AccessDenied, "but not for this"),
        (caused(ValueError("wrapped"), errors.OfflineModeIsEnabled("off")), TransferFailed, "HF_HUB_OFFLINE is set"),
        (PermissionError("of the Xet client"), AccessDenied, "but not for this"),
        (ValueError("odd"), TransferFailed, "reading x of user/name failed: odd"),
        (OSError(errno.ENOSPC, "full"), NotEnoughSpace, "filled the disk"),
    ],
)
def test_what_will_not_pass_is_said_at_once(
    call: Callable[..., str], failure: Exception, kind: type[Exception], words: str
) -> None:
    work = Work(failure)

    with pytest.raises(kind, match=words) as caught:
        call(work)
    assert type(caught.value) is kind
    assert work.n_tries == 1


@pytest.mark.parametrize(
    "failure",
    [
        answered(errors.HfHubHTTPError, 503),
        answered(errors.HfHubHTTPError, 429, **{"RateLimit": '"api";r=0;t=5'}),
        errors.HTTPError("cut"),
        ConnectionResetError("cut"),
        TimeoutError("too long"),
        RuntimeError("of the Xet client"),
        OSError("Consistency check failed"),
        caused(RuntimeError("while uploading"), ConnectionResetError("cut")),
    ],
)
def test_what_may_pass_is_tried_again(call: Callable[..., str], failure: Exception) -> None:
    assert call(Work(failure, failure, None)) == "done"


def test_of_what_nobody_knows_three_tries_are_enough(call: Callable[..., str]) -> None:
    work = Work(RuntimeError("of the Xet client"))

    with pytest.raises(TransferFailed, match="failed: of the Xet client"):
        call(work)
    assert work.n_tries == 3


def test_the_limits_of_a_rate_are_kept(call: Callable[..., str]) -> None:
    waits: list[float] = []
    failure = answered(errors.HfHubHTTPError, 429, **{"RateLimit": '"api";r=0;t=55'})

    call(Work(failure, None), sleep=waits.append)
    assert [int(wait) for wait in waits] == [55]


def test_a_wait_is_told(call: Callable[..., str], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "streamtap"):
        call(Work(TimeoutError("too long"), None))

    assert "reading x of user/name failed; tried again after 1." in caplog.text


def test_faults_of_this_machine_are_passed_on(call: Callable[..., str]) -> None:
    failure = PermissionError(errno.EACCES, "no", "/x")

    with pytest.raises(PermissionError) as caught:
        call(Work(failure))
    assert caught.value is failure


def test_our_own_errors_are_passed_on(call: Callable[..., str]) -> None:
    failure = InvalidInput("no.")

    with pytest.raises(InvalidInput) as caught:
        call(Work(failure))
    assert caught.value is failure


@pytest.mark.parametrize("make", [HubSource, HubTarget])
def test_without_the_library_the_command_is_named(
    monkeypatch: pytest.MonkeyPatch, settings: Settings, make: Callable[..., object]
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)

    with pytest.raises(MissingExtra, match=r"pip install 'streamtap\[hub\]'"):
        make("user/name", settings=settings)


def test_the_library_is_loaded_when_it_is_needed() -> None:
    code = "import sys, streamtap.dataset.hub_target; sys.exit('huggingface_hub' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_bars_of_the_client_come_back() -> None:
    assert not are_progress_bars_disabled()

    with quiet_bars():
        with quiet_bars():
            assert are_progress_bars_disabled()
        assert are_progress_bars_disabled()
    assert not are_progress_bars_disabled()
