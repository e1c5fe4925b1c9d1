"""Bulk jobs without HTTP: a database, a folder, a key, and workers of a fake model in threads of the test."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from streamtap.harvested.reader import HarvestedRun
from streamtap.server.config import HarvestConfig, Limits, ModelConfig, ServerConfig, Timing
from streamtap.server.db import Database
from streamtap.server.harvests.engines import LoadedEngine
from streamtap.server.harvests.jobs import Job, JobAsked, Lane
from streamtap.server.harvests.orders import HarvestModel, WorkerOrders
from streamtap.server.harvests.storage import HarvestStore
from streamtap.server.harvests.working import Working
from streamtap.server.ledger.harvests import Harvests
from streamtap.server.ledger.keys import Keys
from streamtap.testing.fake_engine import FakeEngine

CONTEXT = 64


class Shop:
    """All that a job needs in one folder."""

    def __init__(self, folder: Path, url: str, database: Database, *, limits: Limits | None = None) -> None:
        self.folder, self.database = folder, database
        self.config = ServerConfig(
            models=(ModelConfig("tiny", "org/tiny"), ModelConfig("huge", "org/huge", size="large")),
            data_dir=folder,
            database=url,
            harvest=HarvestConfig(idle_seconds=20, lease_seconds=5),
            timing=Timing(restart_backoff_seconds=0.05, stop_seconds=5),
            limits=limits or Limits(small_harvests_per_key=100),
        )
        self.key = Keys(database).create("ada", scopes=["harvest"]).record
        self.store = HarvestStore(self.config.harvest_root)
        self.harvests = Harvests(database, self.config.limits, lease_seconds=5)
        models = (self._model("tiny", "small"), self._model("huge", "large"))
        spools = str(folder / "harvest-spool")
        self.orders = WorkerOrders(url, self.config.harvest_root, spools, models, idle_seconds=20, lease_seconds=5)

    @staticmethod
    def _model(name: str, lane: Lane) -> HarvestModel:
        return HarvestModel(name, f"org/{name}", f"/secret/{name}", lane, CONTEXT)

    def submit(self, prompts: Any = ("one", "two", "three"), *, model: str = "tiny", **body: Any) -> Job:
        """As the route does, but for its checks."""
        lane: Lane = "small" if model == "tiny" else "large"
        told = {"model": model, "prompts": list(prompts), "shard_size": 2, "layers": [1, 2], **body}
        n_shards = -(-len(told["prompts"]) // told["shard_size"])
        tokens = sum(len(prompt) for prompt in told["prompts"])
        asked = JobAsked(model, lane, len(told["prompts"]), tokens, n_shards, (1, 2))
        self.store.put_input(asked.id, json.dumps(told).encode())
        return self.harvests.submit(self.key, asked, store=self.store.identity)

    def now(self, job: Job) -> Job:
        return self.harvests.job(self.key, job.id)

    def run_of(self, job: Job) -> HarvestedRun:
        return HarvestedRun.open(self.store.run(job.run_id))

    def working(
        self, name: str = "w1", *, lane: Lane = "small", told: threading.Event | None = None, **named: Any
    ) -> Any:
        load = named.pop("load", lambda model: FakeEngine(**named))
        orders = replace(self.orders, idle_seconds=0)
        return Working(
            orders,
            self.harvests,
            LoadedEngine(load),
            name=name,
            lane=lane,
            told_to_stop=told or threading.Event(),
        )


@pytest.fixture
def shop(tmp_path: Path, open_database: Callable[[str], Database], migrated_file: Path) -> Shop:
    """A shop on SQLite."""
    file = tmp_path / "streamtap.db"
    file.write_bytes(migrated_file.read_bytes())
    url = f"sqlite:///{file}"
    return Shop(tmp_path, url, open_database(url))


@pytest.fixture
def any_shop(tmp_path: Path, migrated_url: str, database: Database) -> Shop:
    """A shop on each kind of database."""
    return Shop(tmp_path, migrated_url, database)
