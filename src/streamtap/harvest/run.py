"""``run_harvest``: one loop over any engine, from token ids to a whole run at its place.

::

    plan ─► capture (a batch at a time) ─► writing (one thread: places, sums) ─► spool
         ─► threads: packed, hashed, uploaded ─► place
    Each stage blocks on the next, so memory holds a few batches. A shard in the spool is never run again: an upload
    that failed is repeated from its file.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from pathlib import Path

from streamtap.engines.base import Engine
from streamtap.errors import InvalidInput
from streamtap.harvest.asked import HarvestAsk
from streamtap.harvest.background import Background, nothing
from streamtap.harvest.disk_space import room_in
from streamtap.harvest.finishing import Totals
from streamtap.harvest.identity import provenance_of
from streamtap.harvest.merging import InOrder
from streamtap.harvest.plan import ShardPlan, Tokenised, plan_shards
from streamtap.harvest.record import ShardRecord
from streamtap.harvest.shard_making import ShardMaking, only_one
from streamtap.harvest.standing import Progress as Progress
from streamtap.harvest.standing import RunStanding, never, nobody
from streamtap.harvested.manifest import HarvestManifest
from streamtap.harvested.places import Patient, WritablePlace

_UPLOADS = 2


def run_harvest(
    engine: Engine,
    prompts: Iterable[Tokenised],
    place: WritablePlace,
    ask: HarvestAsk,
    *,
    spool: Path,
    run_id: str | None = None,
    on_progress: Callable[[Progress], None] = nobody,
    should_stop: Callable[[], bool] = never,
    model_id: str | None = None,
) -> HarvestManifest:
    """Harvest ``prompts`` into ``place`` and return its manifest; what is whole there already is not run again.

    Args:
        engine: Runs the model.
        prompts: Token ids, as ``plan.read_prompts`` and ``windows`` make them; the same at every try.
        place: The run's own folder.
        ask: What to keep.
        spool: A folder on this machine where shards are put together; after a crash it holds what was not uploaded.
        run_id: The run's name; None takes that of the run that is there, or a new one.
        on_progress: Told of each shard that is whole at the place, from another thread.
        should_stop: Asked between batches, and while a place that fails is waited for.
        model_id: A service's short name of the model, for the manifest.

    Raises:
        HarvestMismatch: another run is there, or another process works on this one.
        HarvestFailed: ``should_stop`` said so; what is whole stays.
        InvalidInput: a prompt or position that cannot be, or nothing to harvest.
        CaptureMissed: the engine gave something that is not whole.
        NotEnoughSpace: a disk is full; the same call goes on once there is room.
        TransferFailed: the store failed for longer than it was given; the same call goes on from the spool.
    """
    with room_in(spool), only_one(spool):
        standing = RunStanding(place, ask, provenance_of(engine), run_id, on_progress, model_id)
        # Of this run alone: what another left behind may be of the same prompts, but other layers.
        own = spool / standing.identity.run_id
        try:
            manifest = _manifest(engine, plan_shards(prompts, ask.shard_size), place, ask, standing, own, should_stop)
        except InvalidInput:
            standing.forget(own)
            raise
        shutil.rmtree(own, ignore_errors=True)
        return manifest


def _manifest(
    engine: Engine,
    plans: Iterator[ShardPlan],
    place: WritablePlace,
    ask: HarvestAsk,
    standing: RunStanding,
    spool: Path,
    should_stop: Callable[[], bool],
) -> HarvestManifest:
    if manifest := standing.manifest():
        return standing.finished(manifest, plans)
    making = ShardMaking(engine, place, ask, spool, should_stop)
    return standing.finish(_totals(plans, place, standing, making, place.names()))


def _totals(
    plans: Iterator[ShardPlan], place: WritablePlace, standing: RunStanding, making: ShardMaking, there: set[str]
) -> Totals:
    """What all shards come to, once each is at the place."""
    in_order, taking = InOrder(place), threading.Lock()

    def whole(record: ShardRecord, *, found: bool = False) -> None:
        with taking:
            in_order.take(record)
        standing.tell(record, found=found)

    def upload(made: ShardRecord) -> None:
        whole(making.upload(made))

    with (
        Background(
            "streamtap-upload",
            threads=_UPLOADS,
            most=_UPLOADS,
            look=making.stop_if_told,
            give_up=place.interrupt if isinstance(place, Patient) else nothing,
        ) as uploads,
        Background("streamtap-writing") as writing,
        closing(standing.looked_up(plans, there)) as found,
    ):
        for plan, record in found:
            if record is not None:
                whole(record, found=True)
            else:
                uploads.do(upload, making.ready(plan, writing))
    return in_order.totals
