"""Keys, counters, tickets, gateways and the request log."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

_LIVE = sa.text("state <> 'revoked'")


def _row_number() -> sa.types.TypeEngine[int]:
    return sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Make them."""
    _keys()
    _counters()
    _tickets()
    op.create_table(
        "gateways",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("owner", sa.String(300), nullable=False),
        sa.Column("seen_at", sa.DateTime(), nullable=False),
    )
    _requests_log()


def _keys() -> None:
    op.create_table(
        "api_keys",
        sa.Column("id", _row_number(), primary_key=True, autoincrement=True),
        sa.Column("name", sa.String(100), nullable=False),
        sa.Column("user", sa.String(200), nullable=False),
        sa.Column("prefix", sa.String(16), nullable=False, unique=True),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("scopes", sa.String(200), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("created_at", sa.DateTime(), nullable=False),
        sa.Column("max_active", sa.BigInteger()),
        sa.Column("max_waiting", sa.BigInteger()),
        sa.Column("rate_per_minute", sa.BigInteger()),
        sa.Column("monthly_activations", sa.BigInteger()),
        sa.Column("monthly_input_tokens", sa.BigInteger()),
        sa.Column("monthly_output_tokens", sa.BigInteger()),
        sa.Column("daily_input_tokens", sa.BigInteger()),
        sa.Column("daily_output_tokens", sa.BigInteger()),
    )
    op.create_index(
        "one_live_key_of_a_name", "api_keys", ["name"], unique=True, sqlite_where=_LIVE, postgresql_where=_LIVE
    )


def _counters() -> None:
    op.create_table(
        "counters",
        sa.Column("subject", sa.String(220), primary_key=True),
        sa.Column("period", sa.String(16), primary_key=True),
        sa.Column("metric", sa.String(32), primary_key=True),
        sa.Column("used", sa.BigInteger(), nullable=False),
        sa.Column("ceiling", sa.BigInteger(), nullable=False),
    )
    op.create_table(
        "starts",
        sa.Column("key_id", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("minute", sa.BigInteger(), nullable=False),
        sa.Column("used", sa.BigInteger(), nullable=False),
    )


def _tickets() -> None:
    op.create_table(
        "tickets",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("gateway", sa.String(64), nullable=False),
        sa.Column("key_id", sa.BigInteger(), nullable=False),
        sa.Column("key_prefix", sa.String(16), nullable=False),
        sa.Column("user", sa.String(200), nullable=False),
        sa.Column("request_id", sa.String(64), nullable=False),
        sa.Column("endpoint", sa.String(64), nullable=False),
        sa.Column("model", sa.String(200)),
        sa.Column("at", sa.DateTime(), nullable=False),
        sa.Column("active", sa.Boolean(), nullable=False),
        sa.Column("reserved_at", sa.DateTime()),
        sa.Column("input_tokens", sa.BigInteger(), nullable=False),
        sa.Column("output_tokens", sa.BigInteger(), nullable=False),
        sa.Column("activations", sa.BigInteger(), nullable=False),
    )
    op.create_index("tickets_by_gateway", "tickets", ["gateway"])


def _requests_log() -> None:
    op.create_table(
        "requests_log",
        sa.Column("id", _row_number(), primary_key=True, autoincrement=True),
        sa.Column("at", sa.DateTime(), nullable=False),
        sa.Column("request_id", sa.String(64), nullable=False),
        sa.Column("key_prefix", sa.String(16), nullable=False),
        sa.Column("endpoint", sa.String(64), nullable=False),
        sa.Column("model", sa.String(200)),
        sa.Column("input_tokens", sa.BigInteger()),
        sa.Column("output_tokens", sa.BigInteger()),
        sa.Column("status", sa.Integer(), nullable=False),
        sa.Column("code", sa.String(64)),
        sa.Column("seconds", sa.Float(), nullable=False),
        sa.Column("capture_bytes", sa.BigInteger(), nullable=False),
    )
    op.create_index("ix_requests_log_at", "requests_log", ["at"])
