"""Which server is asked, and with which key, which is never shown."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, urlsplit

from streamtap.errors import InvalidInput, MissingAuthorization

if TYPE_CHECKING:
    from streamtap.settings import Settings

_NAME_IT = "pass api_base=, or set STREAMTAP_API_BASE (or ACS_API_BASE), to an address such as http://127.0.0.1:8000/v1"
_GIVE_IT = "pass api_key=, or set STREAMTAP_API_KEY (or ACS_API_KEY)"


@dataclass(frozen=True)
class Address:
    """A server's base address, which calls are put behind, and the key that it is given."""

    base: str
    key: str = field(repr=False)


def find_address(api_base: str | None, api_key: str | None, settings: Settings) -> Address:
    """The server and key that were given, else those of the environment.

    Raises:
        InvalidInput: no address, or one that is none or holds a key, or a key that cannot be sent.
        MissingAuthorization: no key.
    """
    if not isinstance(given := api_base or settings.api_base or "", str):
        raise InvalidInput(f"api_base must be text; got {type(given).__name__}. For the server, {_NAME_IT}.")
    if not given:
        raise InvalidInput(f"no server was named: {_NAME_IT}.")
    base = _checked_base(given)
    return Address(base, _checked_key(api_key if api_key is not None else _key_beside(base, settings), base))


def _key_beside(base: str, settings: Settings) -> str:
    # The environment's key belongs to the environment's server and is told to no other.
    if settings.api_key and settings.api_base and _checked_base(settings.api_base) != base:
        raise MissingAuthorization(
            f"no API key for {base}: the key in the environment belongs to the address in the environment and is not "
            "sent to another one; set that address (STREAMTAP_API_BASE or ACS_API_BASE, as the key's) to this one, or "
            "pass api_key= in Python."
        )
    return settings.api_key or ""


def _checked_base(text: str) -> str:
    base = text.strip().rstrip("/")
    parts = _parts(base)
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidInput(f"the server's address must begin with http:// or https:// and name a host; {_NAME_IT}.")
    if "@" in parts.netloc or parts.query or parts.fragment:
        # It is not shown, for what stands there may be a key.
        raise InvalidInput(f"the server's address may hold no key, '@', '?' or '#'; {_GIVE_IT}, and leave it there.")
    return base if parts.path else f"{base}/v1"


def _parts(base: str) -> SplitResult | None:
    try:
        parts = urlsplit(base)
        _ = parts.port  # read only here: it raises where the port is no number
    except ValueError:
        return None
    return parts


def _checked_key(text: str, base: str) -> str:
    key = text.strip()
    if not key:
        raise MissingAuthorization(f"no API key for {base}: {_GIVE_IT}.")
    if not key.isascii() or not key.isprintable() or " " in key:
        raise InvalidInput(
            "the API key holds a character that no key has, such as a space or a line break; copy it again."
        )
    return key
