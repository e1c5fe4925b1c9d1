"""``run_on_cluster``: a harvest by many engines on the machines of a Ray cluster, a shard at a time.

::

    plan ─► a shard to the engine with a hand free ─► made, uploaded there ─► its record comes back
    records, in shard order ─► statistics, manifest

The unit is the shard: one on a machine that died runs again elsewhere, one that lies whole at the place does not. A
batch never crosses a shard and statistics are merged in shard order, so on machines of one kind, with as many threads
for each engine, the files are those of ``run_harvest``, bit for bit.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, suppress
from itertools import chain, islice
from pathlib import Path

from streamtap.activations import Provenance
from streamtap.engines.tokenizing import PromptTokenizer
from streamtap.errors import HarvestFailed, HarvestUnavailable, InvalidInput, StreamtapError, TransferFailed
from streamtap.harvest.asked import HarvestAsk
from streamtap.harvest.cluster_pool import Answer, EngineGone, EnginePool, Needs, connected, has_gpus, room_for
from streamtap.harvest.engine_source import EngineSource
from streamtap.harvest.handing_out import HandingOut
from streamtap.harvest.merging import InOrder
from streamtap.harvest.node_engine import spool_beside, spool_name
from streamtap.harvest.plan import ShardPlan, Tokenised, plan_shards
from streamtap.harvest.record import ShardRecord, record_name
from streamtap.harvest.sealing import shard_key
from streamtap.harvest.shard_making import STOPPED, only_one
from streamtap.harvest.standing import Progress, RunStanding, never, nobody
from streamtap.harvested.folder_place import FolderPlace
from streamtap.harvested.manifest import HarvestManifest
from streamtap.harvested.opening import open_place
from streamtap.harvested.places import WritablePlace

#: Token ids, or how they are made with the model's tokenizer, so that no model has to be on the machine that asks.
Prompts = Iterable[Tokenised] | Callable[[PromptTokenizer], Iterable[Tokenised]]

_POLL_SECONDS = 0.2
#: How often it is looked up what machines there are.
_LOOK_SECONDS = 2.0
#: Times that a shard is tried where it ended its engine, or failed for a reason that may pass.
_MOST_TRIES = 4
#: Engines in a row that may end before they are ready.
_MOST_BAD_STARTS = 4


def run_on_cluster(
    prompts: Prompts,
    place_url: str | Path,
    ask: HarvestAsk,
    *,
    engine: EngineSource,
    address: str = "auto",
    cpus_per_engine: float = 1,
    gpus_per_engine: float | None = None,
    engines: int | None = None,
    spool: str | None = None,
    run_id: str | None = None,
    patience_seconds: float = 600,
    on_progress: Callable[[Progress], None] = nobody,
    should_stop: Callable[[], bool] = never,
) -> HarvestManifest:
    """Harvest ``prompts`` on a cluster and return the manifest; what is whole at the place is not run again.

    Args:
        prompts: As ``run_harvest`` has them, or a function that makes them with the model's tokenizer.
        place_url: The run's own folder, which all machines share, or an object store, which all have credentials for.
        ask: What to keep.
        engine: Opens the engine on each machine.
        address: Of the Ray cluster; ``"auto"`` is the one of this machine, ``"local"`` starts one for this run.
        cpus_per_engine: CPUs that each engine takes, and its threads.
        gpus_per_engine: GPUs that each engine takes; None is one where a machine of the cluster has any, else none.
        engines: Engines at most, and asked for at once, so that a cluster which grows by itself grows for them; None is
            as many as the machines that are there have room for, by and by.
        spool: A folder of each machine for unfinished shards; None is as ``NodeEngine`` has it.
        run_id: The run's name; None takes that of the run that is there, or a new one.
        patience_seconds: How long to wait for a machine while no engine has one.
        on_progress: Told of each shard that is whole at the place.
        should_stop: Asked every now and then.

    Raises:
        HarvestUnavailable: no cluster answers, or no machine came in time.
        HarvestMismatch: another run is there, another process works on this one, or engines have different models.
        HarvestFailed: ``should_stop`` said so, or engines end again and again; what is whole stays.
        InvalidInput: a prompt or position that cannot be, a folder that is not shared, or nothing to harvest.
        MissingExtra: Ray is not installed.
        StreamtapError: what an engine raises, as ``run_harvest``.
    """
    if engines is not None and engines < 1:
        raise InvalidInput(f"engines must be at least 1, or None for all there is room for; got {engines!r}.")
    place = open_place(place_url)
    with ExitStack() as held:
        if isinstance(place, FolderPlace):
            held.enter_context(only_one(spool_beside(place)))
        held.enter_context(connected(address))
        needs = Needs(cpus_per_engine, float(has_gpus()) if gpus_per_engine is None else gpus_per_engine)
        pool = held.enter_context(closing(EnginePool(needs, engine, place.url, ask, spool)))
        staff = _Staff(pool, needs, engines, patience_seconds)
        manifest = _ClusterRun(prompts, place, ask, staff, run_id, on_progress).result(should_stop)
    if isinstance(place, FolderPlace):
        _clear(place, manifest.run_id)
    return manifest


class _Staff:
    """Engines on their way to being ready, as many as there is room and work for."""

    def __init__(self, pool: EnginePool, needs: Needs, engines: int | None, patience_seconds: float) -> None:
        self.pool = pool
        self._needs, self._engines, self._patience_seconds = needs, engines, patience_seconds
        self._bad_starts = 0
        self._looked_at = self._placed_at = time.monotonic()
        self.most = engines or room_for(needs)
        if not self.most:
            raise InvalidInput(
                f"no machine of the Ray cluster has {needs}, which one engine is to take; ask for less, or, where the "
                "cluster grows by itself, say how many engines it is to grow for."
            )

    def up_to(self, wanted: int) -> None:
        """Ask for engines where there are fewer.

        Raises:
            HarvestUnavailable: none has had a machine for too long.
        """
        now = time.monotonic()
        if self._engines is None and now - self._looked_at > _LOOK_SECONDS:
            self.most, self._looked_at = max(1, room_for(self._needs)), now
        for _ in range(wanted - len(self.pool)):
            self.pool.ask_for_one()
        if self.pool.n_placed:
            self._placed_at = now
        elif now - self._placed_at > self._patience_seconds:
            raise HarvestUnavailable(
                f"no machine of the Ray cluster had {self._needs} free for {self._patience_seconds:g} s; what is whole "
                "stays, and the same call goes on."
            )

    def ready(self) -> None:
        """An engine works."""
        self._bad_starts = 0

    def gone(self, engine: int, gone: EngineGone, *, was_ready: bool) -> None:
        """An engine is no more.

        Raises:
            HarvestFailed: one after the other ends before it is ready.
        """
        self.pool.let_go(engine)
        self._bad_starts += not was_ready
        if self._bad_starts >= _MOST_BAD_STARTS:
            raise HarvestFailed(f"{self._bad_starts} engines in a row ended before they were ready ({gone.why}).")


class _ClusterRun:
    def __init__(
        self,
        prompts: Prompts,
        place: WritablePlace,
        ask: HarvestAsk,
        staff: _Staff,
        run_id: str | None,
        on_progress: Callable[[Progress], None],
    ) -> None:
        self._prompts, self._place, self._ask, self._staff = prompts, place, ask, staff
        self._pool = staff.pool
        self._run_id, self._on_progress = run_id, on_progress
        self._plans: Iterator[ShardPlan] = iter(()) if callable(prompts) else plan_shards(prompts, ask.shard_size)
        self._n_seen: int | None = None
        self._standing: RunStanding | None = None
        self._manifest: HarvestManifest | None = None
        self._merging = InOrder(place)
        self._handing = HandingOut(iter(()))
        self._ready: set[int] = set()

    def result(self, should_stop: Callable[[], bool]) -> HarvestManifest:
        """The manifest, once it is there."""
        while self._manifest is None:
            if should_stop():
                raise HarvestFailed(STOPPED)
            self._staff.up_to(self._wanted())
            for answer in self._pool.answers(_POLL_SECONDS):
                self._take(answer)
            while (each := self._handing.next()) is not None:
                self._pool.make(*each)
            if self._manifest is None and self._standing is not None and not self._handing.wanted(1):
                self._manifest = self._standing.finish(self._merging.totals)
        return self._manifest

    def _wanted(self) -> int:
        if self._standing is not None:
            return self._handing.wanted(self._staff.most)
        if callable(self._prompts):
            return self._staff.most
        if self._n_seen is None:
            # Not as many engines for three shards as for a thousand.
            head = list(islice(self._plans, self._staff.most))
            self._n_seen, self._plans = len(head), chain(head, self._plans)
        return max(1, self._n_seen)

    def _take(self, answer: Answer) -> None:
        if isinstance(answer.value, EngineGone):
            self._gone(answer.engine, answer.value)
        elif isinstance(answer.call, ShardPlan):
            self._shard(answer.engine, answer.call, answer.value)
        elif isinstance(answer.value, StreamtapError):
            raise answer.value
        elif answer.call == "there":
            self._pool.call(answer.engine, "load")
        elif answer.call == "load":
            self._loaded(answer.engine, answer.value)
        elif answer.call == "join":
            self._ready.add(answer.engine)
            self._staff.ready()
            self._handing.join(answer.engine, answer.value)

    def _loaded(self, engine: int, provenance: Provenance) -> None:
        if self._standing is None:
            self._begin(engine, provenance)
        else:
            self._standing.check_engine(provenance)
        if self._standing is not None:
            self._pool.call(engine, "join", self._standing.identity.run_id)

    def _begin(self, engine: int, provenance: Provenance) -> None:
        """The first engine has told what its model is; it may go before it gives the tokenizer."""
        if callable(self._prompts):
            tokenizer = self._pool.ask(engine, "tokenizer")
            if isinstance(tokenizer, EngineGone):
                self._gone(engine, tokenizer)
                return
            self._plans = plan_shards(self._prompts(tokenizer), self._ask.shard_size)
        standing = RunStanding(self._place, self._ask, provenance, self._run_id, self._on_progress)
        if (manifest := standing.manifest()) is not None:
            self._manifest = standing.finished(manifest, self._plans)
        self._handing = HandingOut(self._lacking(standing, self._place.names()))
        self._standing = standing

    def _lacking(self, standing: RunStanding, there: set[str]) -> Iterator[ShardPlan]:
        """Plans of the shards that are not whole at the place."""
        for plan, record in standing.looked_up(self._plans, there):
            if record is None:
                yield plan
            else:
                self._whole(record, found=True)

    def _shard(self, engine: int, plan: ShardPlan, value: ShardRecord | StreamtapError) -> None:
        if isinstance(value, ShardRecord):
            self._handing.made(engine, plan)
            self._whole(value)
            return
        if not value.retryable:
            raise value
        tries = self._handing.failed(engine, plan, spooled=isinstance(value, TransferFailed))
        if tries >= _MOST_TRIES:
            raise value

    def _gone(self, engine: int, gone: EngineGone) -> None:
        lost = self._handing.leave(engine)
        self._staff.gone(engine, gone, was_ready=engine in self._ready)
        self._ready.discard(engine)
        for plan in reversed(lost):
            # It may have come to its end, and the answer not to us.
            if (record := self._found(plan)) is not None:
                self._whole(record)
            elif self._handing.again(plan) >= _MOST_TRIES:
                raise HarvestFailed(
                    f"shard {plan.number} (prompts {plan.first} to {plan.indices[-1]}) was at work on {_MOST_TRIES} "
                    f"engines that ended, the last with: {gone.why}."
                )

    def _found(self, plan: ShardPlan) -> ShardRecord | None:
        names = (record_name(plan.number), shard_key(plan.number, self._ask.compression))
        there = {name for name in names if self._place.size(name) is not None}
        return self._begun.whole(plan, there)

    def _whole(self, record: ShardRecord, *, found: bool = False) -> None:
        self._merging.take(record)
        self._begun.tell(record, found=found)

    @property
    def _begun(self) -> RunStanding:
        assert self._standing is not None, "no shard before the run has begun"
        return self._standing


def _clear(place: FolderPlace, run_id: str) -> None:
    """Remove what engines left that ended without a word; a run that is whole needs none of it."""
    spool = spool_beside(place)
    shutil.rmtree(spool / spool_name(run_id), ignore_errors=True)
    # Others may have begun to use it; then it is theirs.
    with suppress(OSError):
        (spool / "lock").unlink()
        spool.rmdir()
