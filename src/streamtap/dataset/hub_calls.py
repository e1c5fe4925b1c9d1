"""Calls to one dataset repository of the Hub: its address, its token, and another try when a server fails."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

from streamtap.dataset.hub_errors import client_errors, failure, is_of_this_machine, local_failure
from streamtap.dataset.hub_secrets import checked_token, token_that_is_sent
from streamtap.dataset.hub_waiting import Failure, Patience
from streamtap.errors import InvalidInput, MissingExtra, StreamtapError
from streamtap.settings import Settings

if TYPE_CHECKING:
    from huggingface_hub import HfApi

PATIENCE_SECONDS = 600.0
_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")


class HubCalls:
    """One repository as one user sees it. Each method may be called from several threads.

    Raises:
        MissingExtra: huggingface_hub is not installed.
        InvalidInput: a name, token or address that the Hub cannot have.
    """

    def __init__(
        self,
        repo_id: str,
        token: str | bool | None,
        endpoint: str | None,
        settings: Settings,
        *,
        patience_seconds: float = PATIENCE_SECONDS,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        try:
            from huggingface_hub import HfApi, constants
        except ImportError as error:
            raise MissingExtra(
                "reading from the Hub and publishing to it needs huggingface_hub: pip install 'streamtap[hub]'."
            ) from error

        self.repo_id = _checked_name(repo_id)
        self.token = checked_token(token)
        self.endpoint = _checked_address(endpoint or settings.hub_endpoint or constants.ENDPOINT)
        self.api: HfApi = HfApi(endpoint=self.endpoint, token=self.token, library_name="streamtap")
        #: For calls whose answer is small; transfers have no limit but silence.
        self.timeout_seconds = float(constants.HF_HUB_DOWNLOAD_TIMEOUT)
        self._patience_seconds = patience_seconds
        self._sleep = sleep
        self._was_answered = False
        #: Whether nobody may be asked, and what the client's cache holds is of this server as far as the client knows.
        self.is_offline_here = bool(constants.HF_HUB_OFFLINE) and self.endpoint == constants.ENDPOINT.rstrip("/")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.repo_id!r}, endpoint={self.endpoint!r})"

    def call(self, doing: str, work: Callable[[], _T]) -> _T:
        """Do ``work``, again as long as the server only asks to wait; ``doing`` says what it is.

        Raises:
            DatasetNotFound: no such repository, revision or file.
            TransferFailed: the server failed for too long, or (``AccessDenied``) refuses us.
            NotEnoughSpace: the disk is full.
        """
        patience = Patience(self._patience_seconds, self._sleep)
        while True:
            # Before each try: a token that could not be sent would come back in the error of the HTTP library.
            token_that_is_sent(self.token)
            started = time.monotonic()
            result, failed = self._try(doing, work)
            if failed is None:
                return result[0]
            # Not in a handler, so that the client's error, which may hold the token, is not its context.
            self._wait(patience, failed, time.monotonic() - started, doing)

    def _try(self, doing: str, work: Callable[[], _T]) -> tuple[list[_T], Failure | None]:
        try:
            result = work()
        except StreamtapError:
            raise
        except client_errors() as error:
            if is_of_this_machine(error):
                ours = local_failure(error, doing) if isinstance(error, OSError) else None
                if ours is None:
                    raise
                return [], Failure(ours, answered=True)
            return [], failure(error, doing, self.repo_id, token_that_is_sent(self.token))
        self._was_answered = True
        return [result], None

    def _wait(self, patience: Patience, failed: Failure, took_seconds: float, doing: str) -> None:
        self._was_answered = self._was_answered or failed.answered
        waited = patience.wait_after(failed, took_seconds, first_contact=not self._was_answered)
        if waited is None:
            raise failed.error
        _LOG.warning("%s failed; tried again after %.1f s.", doing, waited)


def _checked_name(repo_id: str) -> str:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise InvalidInput(
            f"{repo_id!r} is not the name of a dataset on the Hub such as 'user/name': {error}"
        ) from error
    return repo_id


def _checked_address(endpoint: str) -> str:
    address = endpoint.strip().rstrip("/")
    parts = urlsplit(address)
    if "@" in parts.netloc or parts.query:
        raise InvalidInput(
            "the address of the Hub (endpoint= or HF_ENDPOINT) holds a user, password or key, which would end up in "
            "logs (it is not shown here); write it without, and pass the token as token=."
        )
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidInput(f"the address of the Hub must be such as 'https://huggingface.co'; got {endpoint!r}.")
    return address


class _Quiet:
    """Counts who wants the client's own progress bars off, which are one switch for the whole process."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._wanted = 0
        self._were_on = False

    def add(self) -> None:
        from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars

        with self._lock:
            self._wanted += 1
            if self._wanted == 1:
                self._were_on = not are_progress_bars_disabled() and not _bars_are_forced()
                if self._were_on:
                    disable_progress_bars()

    def remove(self) -> None:
        from huggingface_hub.utils import enable_progress_bars

        with self._lock:
            self._wanted -= 1
            if not self._wanted and self._were_on:
                enable_progress_bars()


def _bars_are_forced() -> bool:
    from huggingface_hub import constants

    return constants.HF_HUB_DISABLE_PROGRESS_BARS is False


_QUIET = _Quiet()


@contextmanager
def quiet_bars() -> Iterator[None]:
    """Without the client's own progress bars, which would write over ours."""
    _QUIET.add()
    try:
        yield
    finally:
        _QUIET.remove()
