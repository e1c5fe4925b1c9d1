"""Rows of ``requests_log``: what was asked and how it ended, and nothing of what was in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Row, insert, select

from streamtap.server.db.prepared import Prepared
from streamtap.server.db.tables import requests_log

_ADD = Prepared(insert(requests_log).inline(), keys=[each.name for each in requests_log.columns if each.name != "id"])


def add(connection: Connection, values: Mapping[str, Any]) -> None:
    """Write one request."""
    _ADD.run(connection, values)


def newest(connection: Connection, limit: int) -> Sequence[Row[Any]]:
    """The last ``limit`` requests, the newest first."""
    return connection.execute(select(requests_log).order_by(requests_log.c.id.desc()).limit(limit)).all()
