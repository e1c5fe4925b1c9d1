"""What the Hub's client raises, in our words; none of its own text is kept that may hold a token."""

from __future__ import annotations

import errno
from typing import Any

from streamtap.dataset.hub_secrets import Token, quoted
from streamtap.dataset.hub_waiting import Failure, asked_seconds
from streamtap.errors import AccessDenied, DatasetNotFound, NotEnoughSpace, StreamtapError, TransferFailed

_BUSY = {408, 425, 429, 500, 502, 503, 504}
_UNKNOWN_TRIES = 3
#: Errors of the HTTP library that another try cannot mend. It is httpx or its successor, by the client's version.
_FOR_GOOD = {"LocalProtocolError", "UnsupportedProtocol", "TooManyRedirects"}
_WITH_A_TOKEN = "pass token=, set HF_TOKEN or run `hf auth login`"


def client_errors() -> tuple[type[Exception], ...]:
    """All that the client's calls raise when something goes wrong on the way."""
    from huggingface_hub.errors import EntryNotFoundError, HTTPError

    return (HTTPError, EntryNotFoundError, OSError, ValueError, RuntimeError)


def is_of_this_machine(error: Exception) -> bool:
    """Whether it is about a local file and not about a server."""
    return (
        isinstance(error, OSError)
        and error.errno is not None
        and not isinstance(error, ConnectionError | TimeoutError)
        and _status(_met(error)) is None
    )


def local_failure(error: OSError, doing: str) -> StreamtapError | None:
    """Our error for a local one; None where it says all by itself."""
    if error.errno == errno.ENOSPC:
        return NotEnoughSpace(f"{doing} filled the disk; free some space and run it again, nothing that came is lost.")
    return None


def failure(error: Exception, doing: str, repo_id: str, token: Token | None) -> Failure:
    """What a try that raised ``error`` means; ``doing`` is such as ``reading README.md of user/name``."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    met = _met(error)
    status = _status(met)
    if isinstance(met, OfflineModeIsEnabled):
        return Failure(TransferFailed(f"{doing} needs the network, and HF_HUB_OFFLINE is set: unset it and try again."))
    if status in _BUSY:
        return _busy(met, doing, int(status))
    if status is not None:
        return Failure(_refusal(met, status, doing, repo_id, token), answered=True)
    return _unanswered(met, doing, token)


def _met(error: Exception) -> BaseException:
    """What the client met, under what it made of it."""
    from huggingface_hub.errors import HTTPError, OfflineModeIsEnabled

    link: BaseException | None = error
    while link is not None:
        if isinstance(link, HTTPError | OfflineModeIsEnabled):
            return link
        link = link.__cause__
    return error


def _status(error: BaseException) -> int | None:
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def _busy(met: BaseException, doing: str, status: int) -> Failure:
    headers: Any = getattr(met, "response").headers  # noqa: B009 - no class of the HTTP library is named here
    asked = asked_seconds(headers)
    wish = "" if asked is None else f" and asked for {asked:.0f} s more"
    error = TransferFailed(
        f"{doing} failed for longer than we wait: the server answers HTTP {status}{wish}; run it again later, "
        "it goes on where it stopped."
    )
    return Failure(error, again=True, answered=True, counts=True, asked_seconds=asked)


def _refusal(met: BaseException, status: int | None, doing: str, repo_id: str, token: Token | None) -> StreamtapError:
    from huggingface_hub import errors

    if isinstance(met, errors.GatedRepoError):
        return AccessDenied(f"{repo_id} is gated: ask for access on its page, then {_WITH_A_TOKEN} of that account.")
    if isinstance(met, errors.DisabledRepoError):
        return AccessDenied(f"{repo_id} is disabled on the Hub, so nobody can use it; its page says why.")
    if isinstance(met, errors.RepositoryNotFoundError):
        return DatasetNotFound(_absent(repo_id, token))
    if isinstance(met, errors.RevisionNotFoundError):
        return DatasetNotFound(f"{doing}: {repo_id} has no such branch, tag or commit; check revision=.")
    if isinstance(met, errors.EntryNotFoundError):
        return DatasetNotFound(f"{doing}: there is no such file; check the name, or whether this is a dataset of ours.")
    if status in (401, 403):
        return AccessDenied(_denied(doing, status, token))
    words = quoted(str(getattr(met, "server_message", None) or ""), token)
    return TransferFailed(f"{doing}: the server refuses it with HTTP {status}{words and ': ' + words}.")


def _absent(repo_id: str, token: Token | None) -> str:
    if token:
        return (
            f"the Hub shows no dataset {repo_id} to this token: either there is none of that name (check the "
            f"spelling), or it is private and this token may not read it; {_WITH_A_TOKEN} of an account that may."
        )
    return (
        f"the Hub shows no dataset {repo_id}: either there is none of that name (check the spelling), "
        f"or it is private; to read a private one {_WITH_A_TOKEN}."
    )


def _denied(doing: str, status: int, token: Token | None) -> str:
    if not token:
        return f"{doing}: the server wants a token (HTTP {status}) and none was sent; {_WITH_A_TOKEN}."
    why = "does not accept this token" if status == 401 else "accepts this token, but not for this"
    return f"{doing}: the server {why} (HTTP {status}); check it at https://huggingface.co/settings/tokens."


def _unanswered(met: BaseException, doing: str, token: Token | None) -> Failure:
    from huggingface_hub.errors import HTTPError

    kinds = {kind.__name__ for kind in type(met).__mro__}
    if isinstance(met, PermissionError):
        # The Xet client's word for a token that it may not use.
        return Failure(AccessDenied(_denied(doing, 403, token)), answered=True)
    words = quoted(str(met), token) or type(met).__name__
    error = TransferFailed(f"{doing} failed: {words.rstrip('.')}. Check the network and the address, and run it again.")
    if isinstance(met, HTTPError):
        return Failure(error, again=not kinds & _FOR_GOOD)
    if isinstance(met, ConnectionError | TimeoutError):
        return Failure(error, again=True)
    # Bad answers, and what the Xet client raises, which has no classes for them.
    refused = isinstance(met, ValueError)
    return Failure(error, again=not refused, answered=True, most_tries=_UNKNOWN_TRIES)
