"""Giving back what gateways held that are no more."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from streamtap.server.db import Database, gateway_rows, ticket_rows
from streamtap.server.ledger.settling import settle
from streamtap.server.ledger.tickets import Outcome

#: A gateway that was not heard of for so long is no more.
DEAD_AFTER_SECONDS = 60.0
_LOST = Outcome(status=503, code="server_restarting", input_tokens=0, output_tokens=0, refund=True)


class Recovery:
    """Says that this gateway lives, and settles the requests of those that do not."""

    def __init__(self, database: Database, gateway: str, owner: str, now: Callable[[], datetime]) -> None:
        self._database = database
        self._gateway = gateway
        self._owner = owner
        self._now = now

    def heartbeat(self) -> None:
        """See ``Ledger.heartbeat``."""
        with self._database.writing() as connection:
            gateway_rows.seen(connection, self._gateway, self._owner, self._now())

    def sweep(self) -> int:
        """See ``Ledger.sweep``."""
        self.heartbeat()
        before = self._now() - timedelta(seconds=DEAD_AFTER_SECONDS)
        with self._database.reading() as connection:
            dead = gateway_rows.dead(connection, before=before, gateway=self._gateway, owner=self._owner)
            left = ticket_rows.left_behind(connection, dead, before)
        settled = sum(settle(self._database, ticket_id, _LOST) for ticket_id in left)
        self._forget(*dead)
        return settled

    def close(self) -> None:
        """See ``Ledger.close``."""
        with self._database.reading() as connection:
            left = ticket_rows.left_behind(connection, [self._gateway], datetime.fromtimestamp(0, UTC))
        for ticket_id in left:
            settle(self._database, ticket_id, _LOST)
        self._forget(self._gateway)

    def _forget(self, *gateways: str) -> None:
        for gateway in gateways:
            with self._database.writing() as connection:
                gateway_rows.remove(connection, gateway)
