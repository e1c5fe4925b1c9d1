"""A ledger of bulk jobs, with short words for what is asked of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from streamtap.server.config import Limits
from streamtap.server.db import Database, counters
from streamtap.server.harvests.jobs import Job, JobAsked, Lane
from streamtap.server.ledger.harvests import Harvests
from streamtap.server.ledger.keys import KeyRecord, Keys
from streamtap.server.ledger.periods import JUST_NOW
from streamtap.server.ledger.usage import usage_of

MODELS = ["tiny", "huge"]


class JobDesk:
    """Bulk jobs of one database with two keys, and short words for what is asked of it."""

    def __init__(self, database: Database, moment: Any, limits: Limits | None = None) -> None:
        self.database, self.moment, self.limits = database, moment, limits or Limits()
        self.keys = Keys(database)
        self.ada, self.bo = (self.keys.create(name, scopes=["harvest"]).record for name in ("ada", "bo"))
        self.harvests = Harvests(database, self.limits, now=moment, lease_seconds=30)

    def submit(self, key: KeyRecord | None = None, lane: Lane = "small", tokens: int = 100, store: str = "") -> Job:
        model = "tiny" if lane == "small" else "huge"
        asked = JobAsked(model, lane, n_prompts=10, n_tokens=tokens, n_shards=3, layer_indices=(1, 2))
        return self.harvests.submit(key or self.ada, asked, store=store)

    def claim(self, worker: str = "w1", **named: Any) -> Job | None:
        return self.harvests.claim(worker, MODELS, **named)

    def now(self, job: Job) -> Job:
        found = self.harvests.any_job(job.id)
        assert found is not None
        return found

    def used(self, key: KeyRecord | None = None) -> dict[str, int]:
        told = usage_of(self.database, self.limits, key or self.ada, self.moment())["usage"]
        return {name: told[name]["used"] for name in ("monthly_harvests", "monthly_input_tokens", "daily_input_tokens")}

    def slots(self) -> dict[tuple[str, str], int]:
        subjects = {"all": "all", f"key:{self.ada.id}": "ada", f"key:{self.bo.id}": "bo"}
        with self.database.reading() as connection:
            found = counters.read(connection, subjects, [JUST_NOW])
        return {(subjects[each.subject], each.metric): used for each, used in found.items() if used}


@pytest.fixture
def desk(database: Database, moment: Any) -> JobDesk:
    """One with the limits that come with the service."""
    return JobDesk(database, moment)


@pytest.fixture
def desk_of(moment: Any) -> Callable[..., JobDesk]:
    """Makes one of a database with limits of its own."""

    def make(database: Database, **limits: Any) -> JobDesk:
        return JobDesk(database, moment, Limits(**limits))

    return make
