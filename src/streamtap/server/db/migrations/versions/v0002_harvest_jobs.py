"""Bulk jobs, and how many of them a key may begin in a month."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Make them."""
    op.add_column("api_keys", sa.Column("monthly_harvests", sa.BigInteger()))
    op.create_table("harvest_jobs", *_what_is_asked(), *_how_it_stands())
    op.create_index("harvest_jobs_by_key", "harvest_jobs", ["key_id", "created_at"])
    op.create_index("harvest_jobs_by_state", "harvest_jobs", ["state", "created_at"])


def _what_is_asked() -> tuple[sa.Column[object], ...]:
    return (
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("key_id", sa.BigInteger(), nullable=False),
        sa.Column("user", sa.String(200), nullable=False),
        sa.Column("model", sa.String(200), nullable=False),
        sa.Column("lane", sa.String(16), nullable=False),
        sa.Column("store", sa.String(300), nullable=False),
        sa.Column("run_id", sa.String(64), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("n_prompts", sa.BigInteger(), nullable=False),
        sa.Column("n_tokens", sa.BigInteger(), nullable=False),
        sa.Column("n_shards", sa.BigInteger(), nullable=False),
        sa.Column("layer_indices", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(), nullable=False),
    )


def _how_it_stands() -> tuple[sa.Column[object], ...]:
    return (
        sa.Column("started_at", sa.DateTime()),
        sa.Column("completed_at", sa.DateTime()),
        sa.Column("ready_at", sa.DateTime(), nullable=False),
        sa.Column("worker", sa.String(64)),
        sa.Column("lease_until", sa.DateTime()),
        sa.Column("attempts", sa.BigInteger(), nullable=False),
        sa.Column("prompts_done", sa.BigInteger(), nullable=False),
        sa.Column("shards_done", sa.BigInteger(), nullable=False),
        sa.Column("worked_seconds", sa.Float(), nullable=False),
        sa.Column("timings", sa.Text(), nullable=False),
        sa.Column("error_code", sa.String(64)),
        sa.Column("error_message", sa.Text()),
        sa.Column("cleared_at", sa.DateTime()),
    )
