"""The parts of a server, put together where the libraries are there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from streamtap.errors import InvalidInput, MissingExtra
from streamtap.testing.hub_server.repositories import Repositories
from streamtap.testing.hub_server.signing import Signer
from streamtap.testing.hub_server.xet_store import XetStore

if TYPE_CHECKING:
    from streamtap.testing.hub_server.shared import Hub


def new_hub(
    folder: Path,
    *,
    tokens: Mapping[str, str],
    user: str,
    xet: bool,
    page_size: int,
    chunk_bytes: int,
    link_seconds: float,
) -> Hub:
    """What the handlers of a server share.

    Raises:
        MissingExtra: starlette or uvicorn is not installed, or hf_xet where Xet is asked for.
        InvalidInput: a size that is not positive.
    """
    try:
        import uvicorn  # noqa: F401

        from streamtap.testing.hub_server.shared import Hub
    except ImportError as error:
        raise MissingExtra("the local Hub needs starlette and uvicorn: pip install 'streamtap[serve]'.") from error
    if page_size < 1 or chunk_bytes < 1:
        raise InvalidInput(f"page_size and chunk_bytes must be 1 or more; got {page_size} and {chunk_bytes}.")
    return Hub(
        Repositories(folder),
        Signer(link_seconds),
        tokens=tokens,
        user=user,
        page_size=page_size,
        chunk_bytes=chunk_bytes,
        xet=XetStore(folder / "xet") if xet else None,
    )
