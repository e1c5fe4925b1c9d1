"""What keys may use: slots, starts, quotas and budgets, reserved before a request and settled after it."""

from streamtap.server.ledger.ledger import Ledger
from streamtap.server.ledger.tickets import Grant, Outcome, Ticket

__all__ = ["Grant", "Ledger", "Outcome", "Ticket"]
