"""``Ledger``: what the gateway asks before, during and after each request."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from streamtap.server.config import Limits
from streamtap.server.db import Database
from streamtap.server.ledger.admission import Admission
from streamtap.server.ledger.harvests import Harvests
from streamtap.server.ledger.keys import KeyRecord
from streamtap.server.ledger.recovery import Recovery
from streamtap.server.ledger.reservation import Reservation
from streamtap.server.ledger.settling import settle
from streamtap.server.ledger.tickets import Asked, Grant, Outcome, Ticket
from streamtap.server.ledger.usage import usage_of


class Ledger:
    """Admission, quotas and settlement on one database, exact among any number of threads, processes and gateways.

    A request is three transactions: ``admit``, ``reserve``, ``settle``. Each is whole or leaves nothing behind. Every
    call blocks for as long as the database takes, so an event loop calls it in a thread.
    """

    def __init__(
        self,
        database: Database,
        limits: Limits,
        *,
        gateway: str,
        owner: str = "",
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """Announce this gateway, and give back what its predecessors held.

        ``gateway`` is unlike that of any other process. ``owner`` is the same for this gateway's successor after a
        crash, and for nobody that runs at the same time (``only_gateway_of`` keeps it); empty, and a crash shows by
        silence.
        """
        self._database = database
        self._limits = limits
        self._now = now
        self._admission = Admission(database, limits, gateway, now)
        self._reservation = Reservation(database, limits, now)
        self._recovery = Recovery(database, gateway, owner, now)
        #: Bulk jobs, which outlive the gateway that took them on.
        self.harvests = Harvests(database, limits, now=now)
        self.sweep()

    def admit(self, presented: str | None, *, scope: str, endpoint: str, request_id: str) -> Ticket:
        """Let a request in, with a slot or a place among those that wait for one; ``settle`` has to follow.

        Raises:
            MissingAuthorization: no key was sent.
            InvalidKey: an unknown one.
            RateLimited: too many starts in this minute; asked before the key's state.
            KeyRevoked: the key was revoked.
            KeyDisabled: the key is paused.
            ScopeDenied: the key may not do this.
            QueueFull: the key has all the requests running and waiting that it may.
        """
        return self._admission.admit(presented, scope=scope, endpoint=endpoint, request_id=request_id)

    def authenticate(self, presented: str | None, scope: str | None) -> KeyRecord:
        """The key's record, for what takes no slot and counts as no start; a scope of None asks for none.

        Raises:
            KeyRefused: as ``admit``.
        """
        return self._admission.authenticate(presented, scope)

    def activate(self, ticket: Ticket) -> bool:
        """Whether a ticket that waited has its slot now; cheap to ask again while it has none.

        Of those that wait, whoever asks first gets a slot that is free; newcomers go behind them.

        Raises:
            ServerRestarting: the ticket was given up, since this gateway was silent for too long.
        """
        return self._admission.activate(ticket)

    def check_activation_quota(self, ticket: Ticket, activations: int = 1) -> None:
        """Refuse early what ``reserve`` would refuse; nothing is counted.

        Raises:
            ActivationQuotaExceeded: the captures of the month are used up; the message says used/limit.
        """
        self._reservation.check_activation_quota(ticket, activations)

    def unreserved(
        self, ticket: Ticket, *, model: str, input_tokens: int, output_tokens: int, activations: int, sequences: int = 1
    ) -> Ticket | None:
        """The ticket for ``settle`` to charge in full, where ``reserve`` would grant this in any case; else None.

        It asks nothing of the database and does not block. To reserve all the same does no harm.
        """
        return self._reservation.unreserved(ticket, model, Asked(input_tokens, output_tokens, activations, sequences))

    def reserve(
        self, ticket: Ticket, *, model: str, input_tokens: int, output_tokens: int, activations: int, sequences: int = 1
    ) -> Grant:
        """Hold what a request may use at most; at most once a ticket.

        ``output_tokens`` are of all ``sequences`` (prompts × n) together. Where fewer are left, those are granted, as
        many for each sequence, at least one.

        Raises:
            ActivationQuotaExceeded: the captures of the month are used up.
            BudgetExceeded: the input does not fit, or not one output token a sequence does.
            ServerRestarting: as ``activate``.
        """
        return self._reservation.reserve(ticket, model, Asked(input_tokens, output_tokens, activations, sequences))

    def settle(self, ticket: Ticket, outcome: Outcome) -> bool:
        """Free the slot, correct the counters to what was used, log the request; False where it was done before."""
        return settle(self._database, ticket.id, outcome, ticket.unreserved)

    def usage(self, key: KeyRecord) -> dict[str, Any]:
        """What ``GET /v1/usage`` says of a key."""
        return usage_of(self._database, self._limits, key, self._now())

    def heartbeat(self) -> None:
        """Say that this gateway lives; to be called every ten seconds or so."""
        self._recovery.heartbeat()

    def sweep(self) -> int:
        """Settle, with a refund, the requests of gateways that were silent for a minute; how many there were."""
        return self._recovery.sweep()

    def close(self) -> None:
        """Give back what this gateway still holds, and say that it is gone."""
        self._recovery.close()
