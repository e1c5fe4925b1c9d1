"""API keys: made, shown once, kept as a hash, paused and revoked at once.

A key is ``stp_``, eight characters to find it by, and 43 random ones: 256 bits. What is stored is a plain SHA-256 of
it: slow, salted hashes protect words that people choose; nobody guesses 256 random bits, and each request hashes once.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import string
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

from streamtap.errors import (
    InvalidInput,
    InvalidKey,
    KeyDisabled,
    KeyRefused,
    KeyRevoked,
    MissingAuthorization,
    ScopeDenied,
)
from streamtap.server.db import Database, key_rows

if TYPE_CHECKING:
    from sqlalchemy import Connection, Row

State = Literal["active", "paused", "revoked"]
SCOPES = ("completions", "harvest", "admin")
MOST_LIMIT = 10**15

_START = "stp_"
_PREFIX_LENGTH = len(_START) + 8
_LENGTH = _PREFIX_LENGTH + 43
_ALPHABET = string.ascii_letters + string.digits
#: Two keys with one prefix: as good as never, but the second must not fail for it.
_TRIES = 5


@dataclass(frozen=True)
class KeyLimits:
    """Limits of one key in place of the server's; None is the server's, 0 unlimited (but for the two of slots)."""

    max_active: int | None = None
    max_waiting: int | None = None
    rate_per_minute: int | None = None
    monthly_activations: int | None = None
    monthly_input_tokens: int | None = None
    monthly_output_tokens: int | None = None
    daily_input_tokens: int | None = None
    daily_output_tokens: int | None = None
    monthly_harvests: int | None = None


LIMIT_NAMES = tuple(entry.name for entry in fields(KeyLimits))


@dataclass(frozen=True)
class KeyRecord:
    """What is known of a key: everything but the key."""

    id: int
    name: str
    user: str
    prefix: str
    scopes: tuple[str, ...]
    state: State
    created_at: datetime
    limits: KeyLimits = field(default_factory=KeyLimits)


@dataclass(frozen=True)
class NewKey:
    """A key that was just made: the only time that it is there to be read."""

    secret: str = field(repr=False)
    record: KeyRecord


class Keys:
    """The keys of one database. Keys are named by their name, or by the prefix that they start with."""

    def __init__(self, database: Database, *, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._database = database
        self._now = now

    def create(
        self,
        name: str,
        *,
        user: str | None = None,
        scopes: Iterable[str] = ("completions",),
        limits: KeyLimits | None = None,
    ) -> NewKey:
        """Make a key; it belongs to ``user``, by default one of the key's name.

        Raises:
            InvalidInput: a name that another key has, or one, a scope or a limit that cannot be.
        """
        told = {"name": _checked(name, "name", 100), "user": _checked(user or name, "user", 200)}
        told |= {"scopes": _joined(scopes), **_checked_limits(asdict(limits or KeyLimits()))}
        for _ in range(_TRIES):
            secret = _START + "".join(secrets.choice(_ALPHABET) for _ in range(_LENGTH - len(_START)))
            with self._database.writing() as connection:
                if (other := key_rows.by_name(connection, name)) is not None and other.state != "revoked":
                    break
                about = {"prefix": secret[:_PREFIX_LENGTH], "digest": _digest(secret)}
                added = key_rows.add(connection, {**told, **about, "state": "active", "created_at": self._now()})
            if added:
                return NewKey(secret, self.get(about["prefix"]))
        raise InvalidInput(f"a key named {name!r} exists already; revoke it or choose another name.")

    def first_key(self) -> str | None:
        """Make a key for everything where there is none yet, and give it, this once; else None."""
        with self._database.reading() as connection:
            if key_rows.count(connection):
                return None
        try:
            return self.create("first", scopes=SCOPES).secret
        except InvalidInput:
            return None  # another gateway of this database was quicker, and showed its own

    def get(self, which: str) -> KeyRecord:
        """The key of that name or prefix; of two with a name, the one that is not revoked.

        Raises:
            InvalidInput: there is none.
        """
        with self._database.reading() as connection:
            return record_of(_row(connection, which))

    def revoke(self, which: str) -> KeyRecord:
        """End a key for good, from the next request on."""
        return self._change(which, {"state": "revoked"})

    def pause(self, which: str) -> KeyRecord:
        """Refuse a key until it is resumed."""
        return self._change(which, {"state": "paused"})

    def resume(self, which: str) -> KeyRecord:
        """Take a paused key again."""
        return self._change(which, {"state": "active"})

    def set(
        self,
        which: str,
        *,
        user: str | None = None,
        scopes: Iterable[str] | None = None,
        **limits: int | None,
    ) -> KeyRecord:
        """Change what is given of a key; a limit of None is the server's again, and one left out stays.

        Raises:
            InvalidInput: no such key, or a value that cannot be.
        """
        changes: dict[str, Any] = _checked_limits(limits)
        if user is not None:
            changes["user"] = _checked(user, "user", 200)
        if scopes is not None:
            changes["scopes"] = _joined(scopes)
        if not changes:
            raise InvalidInput(f"nothing to change was given; say user, scopes or one of {', '.join(LIMIT_NAMES)}.")
        return self._change(which, changes)

    def list(self) -> Sequence[KeyRecord]:
        """All keys, the oldest first, revoked ones too."""
        with self._database.reading() as connection:
            return [record_of(row) for row in key_rows.all_rows(connection)]

    def _change(self, which: str, values: dict[str, Any]) -> KeyRecord:
        with self._database.writing() as connection:
            row = _row(connection, which)
            if row.state == "revoked" and values.get("state") != "revoked":
                raise InvalidInput(
                    f"the key {row.name!r} ({row.prefix}) was revoked, which is for good; create another."
                )
            key_rows.change(connection, row.id, values)
            changed = key_rows.by_prefix(connection, row.prefix)
        assert changed is not None
        return record_of(changed)


def known_key(connection: Connection, presented: str | None) -> KeyRecord:
    """The record of a key that a client sent, whatever its state.

    Raises:
        MissingAuthorization: nothing was sent.
        InvalidKey: there is no such key.
    """
    if not presented:
        raise MissingAuthorization("this needs an API key: send it as `Authorization: Bearer <key>`.")
    fits = len(presented) == _LENGTH and presented.startswith(_START)
    fits = fits and presented.isascii() and presented.removeprefix(_START).isalnum()
    row = key_rows.by_prefix(connection, presented[:_PREFIX_LENGTH]) if fits else None
    if row is None or not hmac.compare_digest(row.digest, _digest(presented)):
        raise InvalidKey("this API key is not known here; check it, or ask whoever runs the server for another.")
    return record_of(row)


def refusal(key: KeyRecord, scope: str | None) -> KeyRefused | None:
    """Why the key may not do this, or None where it may."""
    if key.state == "revoked":
        return KeyRevoked("this API key was revoked; ask whoever runs the server for another.")
    if key.state == "paused":
        return KeyDisabled("this API key is paused; ask whoever runs the server to resume it.")
    if scope is not None and scope not in key.scopes:
        return ScopeDenied(f"this API key lacks the scope {scope!r}; it has {', '.join(key.scopes)}.")
    return None


def record_of(row: Row[Any]) -> KeyRecord:
    """A row of the table as a value."""
    limits = KeyLimits(**{name: getattr(row, name) for name in LIMIT_NAMES})
    return KeyRecord(
        id=row.id,
        name=row.name,
        user=row.user,
        prefix=row.prefix,
        scopes=tuple(row.scopes.split(",")),
        state=row.state,
        created_at=row.created_at,
        limits=limits,
    )


def _row(connection: Connection, which: str) -> Row[Any]:
    found = key_rows.by_prefix(connection, which) if which.startswith(_START) else key_rows.by_name(connection, which)
    if found is None:
        # Whoever pastes a whole key here must not find it in a log.
        told = (
            repr(which)
            if len(which) <= _PREFIX_LENGTH or not which.startswith(_START)
            else "that (give its name or prefix)"
        )
        raise InvalidInput(f"there is no key {told}; `streamtap keys list` shows them.")
    return found


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def _checked(text: str, what: str, most: int) -> str:
    if not 1 <= len(text) <= most or not text.isprintable() or text != text.strip() or text.startswith(_START):
        raise InvalidInput(f"a key's {what} must be 1 to {most} printable characters and not start with {_START!r}.")
    return text


def _joined(scopes: Iterable[str]) -> str:
    asked = [*scopes]
    if not asked or not set(asked) <= {*SCOPES}:
        raise InvalidInput(f"scopes must be one or more of {', '.join(SCOPES)}; got {', '.join(asked) or 'none'}.")
    return ",".join(scope for scope in SCOPES if scope in asked)


def _checked_limits(limits: dict[str, int | None]) -> dict[str, Any]:
    for name, value in limits.items():
        if name not in LIMIT_NAMES:
            raise InvalidInput(f"a key has no limit {name!r}; it has {', '.join(LIMIT_NAMES)}.")
        least = 1 if name == "max_active" else 0
        if value is not None and not least <= value <= MOST_LIMIT:
            raise InvalidInput(f"{name} must be {least} to {MOST_LIMIT}, or None for the server's; got {value}.")
    return dict(limits)
