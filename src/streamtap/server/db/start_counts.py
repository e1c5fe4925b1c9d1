"""Request starts of a key in the running minute, counted and limited in one statement."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import Connection, text

from streamtap.server.db.prepared import Prepared

# Gateways' clocks may differ: a count of the next minute is joined, not begun anew.
_SAME = "starts.minute - excluded.minute IN (0, 1)"
_START = Prepared(
    text(
        "INSERT INTO starts (key_id, minute, used) VALUES (:key_id, :minute, 1) ON CONFLICT (key_id) DO UPDATE SET "
        f"used = CASE WHEN {_SAME} THEN starts.used + 1 ELSE 1 END, "
        f"minute = CASE WHEN {_SAME} THEN starts.minute ELSE excluded.minute END "
        f"WHERE NOT ({_SAME}) OR starts.used < :most RETURNING used"
    )
)


def count_start(connection: Connection, key_id: int, at: datetime, most: int) -> bool:
    """Count one more start, unless the key had ``most`` in this minute; 1 or more."""
    values = {"key_id": key_id, "minute": int(at.timestamp()) // 60, "most": most}
    return bool(_START.rows(connection, values))
