"""``WorkerOrders``: what a worker process has to know of the gateway's configuration, handed over in a private file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from streamtap.errors import SettingsError
from streamtap.server.config import ServerConfig
from streamtap.server.harvests.checks import is_harvested
from streamtap.server.harvests.jobs import Lane
from streamtap.server.models.catalog import Served

_FILE = "harvest-worker.json"
_SPOOLS = "harvest-spool"


@dataclass(frozen=True)
class HarvestModel:
    """A model as a worker loads it; ``name`` is what manifests call it, ``context`` its longest prompt in tokens."""

    id: str
    name: str
    checkpoint: str
    lane: Lane
    context: int
    revision: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    max_batch_tokens: int | None = None


@dataclass(frozen=True)
class WorkerOrders:
    """All that workers of one gateway share; ``database`` may hold a password."""

    database: str
    root: str
    spools: str
    models: tuple[HarvestModel, ...]
    idle_seconds: float = 300.0
    lease_seconds: float = 30.0

    def of_lane(self, lane: str) -> dict[str, HarvestModel]:
        """The models of a lane by their ids."""
        return {model.id: model for model in self.models if model.lane == lane}

    def write(self, data_dir: Path) -> Path:
        """The file, readable for this user alone.

        Raises:
            SettingsError: it cannot be written.
        """
        file = data_dir / _FILE
        part = file.with_suffix(".part")
        try:
            part.unlink(missing_ok=True)
            with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
                json.dump(asdict(self), stream)
            part.replace(file)
        except OSError as error:
            raise SettingsError(f"data_dir {data_dir} cannot be written: {error.strerror}; name another.") from error
        return file


def orders_of(config: ServerConfig, models: Iterable[Served]) -> WorkerOrders:
    """What the gateway's workers are to know."""
    return WorkerOrders(
        database=config.database_url,
        root=config.harvest_root,
        spools=str((config.data_dir / _SPOOLS).absolute()),
        models=tuple(_model(each) for each in models if is_harvested(each.config)),
        idle_seconds=config.harvest.idle_seconds,
        lease_seconds=config.harvest.lease_seconds,
    )


def read_orders(file: Path) -> WorkerOrders:
    """What a gateway wrote.

    Raises:
        SettingsError: the file is not there, or is not what a gateway of this release writes.
    """
    try:
        told: dict[str, Any] = json.loads(file.read_bytes())
        return WorkerOrders(**{**told, "models": tuple(HarvestModel(**each) for each in told["models"])})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SettingsError(f"{file} does not say what a worker has to know; start the gateway anew.") from error


def _model(served: Served) -> HarvestModel:
    config, facts = served.config, served.facts
    return HarvestModel(
        id=config.id,
        name=config.served_name,
        checkpoint=config.checkpoint,
        lane=config.size,
        context=facts.max_model_len,
        revision=config.revision,
        dtype=config.dtype,
        device=config.device,
        max_batch_tokens=config.max_batch_tokens,
    )
