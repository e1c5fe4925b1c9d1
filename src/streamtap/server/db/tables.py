"""The tables, as the newest migration leaves them.

::

    api_keys      who may do what; the hash of the key, never the key
    counters      how much of something a key or user has used in a month or day, or holds just now
    starts        requests that a key started in its last minute
    tickets       requests that are under way, and what each of them holds of the counters
    gateways      processes that serve, and when each was last heard of
    requests_log  what was asked, as metadata only
    harvest_jobs  bulk jobs, and which worker has each of them until when; their prompts are not in the database
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    DateTime,
    Float,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    TypeDecorator,
    text,
)

#: A ceiling that nothing reaches; it fits a BIGINT with room for one more amount.
UNLIMITED = 1 << 61


class UtcTime(TypeDecorator[datetime]):
    """A time in UTC, with its zone in Python and without one in the database, which has no use for it."""

    impl = DateTime
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Any) -> datetime | None:
        """To the database."""
        return None if value is None else value.astimezone(UTC).replace(tzinfo=None)

    def process_result_value(self, value: datetime | None, dialect: Any) -> datetime | None:
        """From the database."""
        return None if value is None else value.replace(tzinfo=UTC)


#: SQLite numbers its rows by itself for INTEGER only.
_RowNumber = BigInteger().with_variant(Integer(), "sqlite")

metadata = MetaData()

api_keys = Table(
    "api_keys",
    metadata,
    Column("id", _RowNumber, primary_key=True, autoincrement=True),
    Column("name", String(100), nullable=False),
    Column("user", String(200), nullable=False),
    Column("prefix", String(16), nullable=False, unique=True),
    Column("digest", String(64), nullable=False),
    Column("scopes", String(200), nullable=False),
    Column("state", String(16), nullable=False),
    Column("created_at", UtcTime, nullable=False),
    # Limits of this key; null is the server's, 0 unlimited.
    Column("max_active", BigInteger),
    Column("max_waiting", BigInteger),
    Column("rate_per_minute", BigInteger),
    Column("monthly_activations", BigInteger),
    Column("monthly_input_tokens", BigInteger),
    Column("monthly_output_tokens", BigInteger),
    Column("daily_input_tokens", BigInteger),
    Column("daily_output_tokens", BigInteger),
    Column("monthly_harvests", BigInteger),
    # A name is free again once its key is revoked.
    Index(
        "one_live_key_of_a_name",
        "name",
        unique=True,
        sqlite_where=text("state <> 'revoked'"),
        postgresql_where=text("state <> 'revoked'"),
    ),
)

counters = Table(
    "counters",
    metadata,
    Column("subject", String(220), primary_key=True),  # key:12, user:ada@lab
    Column("period", String(16), primary_key=True),  # 2026-11, 2026-11-30, or empty: just now
    Column("metric", String(32), primary_key=True),
    Column("used", BigInteger, nullable=False),
    # The limit of the last reservation: a conditional upsert can compare with nothing but columns.
    Column("ceiling", BigInteger, nullable=False),
)

starts = Table(
    "starts",
    metadata,
    # One row a key, used again for each minute, so that nothing has to be cleared away.
    Column("key_id", BigInteger, primary_key=True, autoincrement=False),
    Column("minute", BigInteger, nullable=False),  # since 1970
    Column("used", BigInteger, nullable=False),
)

tickets = Table(
    "tickets",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("gateway", String(64), nullable=False),
    Column("key_id", BigInteger, nullable=False),
    Column("key_prefix", String(16), nullable=False),
    Column("user", String(200), nullable=False),
    Column("request_id", String(64), nullable=False),
    Column("endpoint", String(64), nullable=False),
    Column("model", String(200)),
    Column("at", UtcTime, nullable=False),
    Column("active", Boolean, nullable=False),
    # When it reserved, and how much; null before that.
    Column("reserved_at", UtcTime),
    Column("input_tokens", BigInteger, nullable=False),
    Column("output_tokens", BigInteger, nullable=False),
    Column("activations", BigInteger, nullable=False),
    Index("tickets_by_gateway", "gateway"),
)

gateways = Table(
    "gateways",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("owner", String(300), nullable=False),
    Column("seen_at", UtcTime, nullable=False),
)

requests_log = Table(
    "requests_log",
    metadata,
    Column("id", _RowNumber, primary_key=True, autoincrement=True),
    Column("at", UtcTime, nullable=False, index=True),
    Column("request_id", String(64), nullable=False),
    Column("key_prefix", String(16), nullable=False),
    Column("endpoint", String(64), nullable=False),
    Column("model", String(200)),
    Column("input_tokens", BigInteger),
    Column("output_tokens", BigInteger),
    Column("status", Integer, nullable=False),
    Column("code", String(64)),
    Column("seconds", Float, nullable=False),
    Column("capture_bytes", BigInteger, nullable=False),
)

harvest_jobs = Table(
    "harvest_jobs",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("key_id", BigInteger, nullable=False),
    Column("user", String(200), nullable=False),
    Column("model", String(200), nullable=False),
    Column("lane", String(16), nullable=False),
    # Where prompts and files lie: only workers that reach it take the job.
    Column("store", String(300), nullable=False),
    Column("run_id", String(64), nullable=False),
    Column("state", String(16), nullable=False),
    Column("n_prompts", BigInteger, nullable=False),
    Column("n_tokens", BigInteger, nullable=False),
    Column("n_shards", BigInteger, nullable=False),
    Column("layer_indices", Text, nullable=False),  # numbers, with commas
    Column("created_at", UtcTime, nullable=False),
    Column("started_at", UtcTime),
    Column("completed_at", UtcTime),
    # Not taken before; later than now after a failure that may pass.
    Column("ready_at", UtcTime, nullable=False),
    Column("worker", String(64)),
    Column("lease_until", UtcTime),
    Column("attempts", BigInteger, nullable=False),
    Column("prompts_done", BigInteger, nullable=False),
    Column("shards_done", BigInteger, nullable=False),
    Column("worked_seconds", Float, nullable=False),
    Column("timings", Text, nullable=False),  # JSON
    Column("error_code", String(64)),
    Column("error_message", Text),
    # When its files were removed; null while they are kept.
    Column("cleared_at", UtcTime),
    Index("harvest_jobs_by_key", "key_id", "created_at"),
    Index("harvest_jobs_by_state", "state", "created_at"),
)
