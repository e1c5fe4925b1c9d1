"""Which HTTP status an engine process gives each error; the code in the body says the rest."""

from __future__ import annotations

from streamtap.errors import (
    InvalidInput,
    KeyRefused,
    MethodNotAllowed,
    NotFound,
    NotServing,
    RequestTooLarge,
    StreamtapError,
    Unsupported,
)

_STATUSES: tuple[tuple[type[StreamtapError], int], ...] = (
    (InvalidInput, 400),
    (Unsupported, 400),
    (KeyRefused, 401),
    (NotFound, 404),
    (MethodNotAllowed, 405),
    (RequestTooLarge, 413),
    (NotServing, 503),
)


def status_of(error: StreamtapError) -> int:
    """The status of ``error``; 500 where it is the engine's fault."""
    return next((status for kind, status in _STATUSES if isinstance(error, kind)), 500)
