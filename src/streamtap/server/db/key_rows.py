"""Rows of ``api_keys``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Row, bindparam, func, insert, select, update
from sqlalchemy.exc import IntegrityError

from streamtap.server.db.prepared import Prepared
from streamtap.server.db.tables import api_keys

_BY_PREFIX = Prepared(select(api_keys).where(api_keys.c.prefix == bindparam("prefix")), *api_keys.columns)
_BY_NAME = (
    select(api_keys)
    .where(api_keys.c.name == bindparam("name"))
    # At most one is not revoked; else the last that was.
    .order_by(api_keys.c.state == "revoked", api_keys.c.id.desc())
    .limit(1)
)


def by_prefix(connection: Connection, prefix: str) -> Any | None:
    """The key that starts with ``prefix``."""
    return _BY_PREFIX.first(connection, {"prefix": prefix})


def by_name(connection: Connection, name: str) -> Row[Any] | None:
    """The key of that name that is not revoked, or else the last that was."""
    return connection.execute(_BY_NAME, {"name": name}).first()


def all_rows(connection: Connection) -> Sequence[Row[Any]]:
    """All keys, the oldest first."""
    return connection.execute(select(api_keys).order_by(api_keys.c.id)).all()


def count(connection: Connection) -> int:
    """How many keys there are, revoked ones too."""
    return connection.execute(select(func.count()).select_from(api_keys)).scalar_one()


def add(connection: Connection, values: Mapping[str, Any]) -> bool:
    """Write a new key; False where its name or prefix is taken, and then the transaction is of no more use."""
    try:
        connection.execute(insert(api_keys), dict(values))
    except IntegrityError:
        return False
    return True


def change(connection: Connection, key_id: int, values: Mapping[str, Any]) -> None:
    """Write other values into a key's row."""
    connection.execute(update(api_keys).where(api_keys.c.id == key_id).values(dict(values)))
