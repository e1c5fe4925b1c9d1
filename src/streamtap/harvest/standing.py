"""``RunStanding``: a run as it lies at its place: which it is, which of its shards are whole, and who is told."""

from __future__ import annotations

import shutil
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from streamtap.activations import Provenance
from streamtap.errors import HarvestDamaged, HarvestMismatch, InvalidInput
from streamtap.harvest.asked import HarvestAsk
from streamtap.harvest.finishing import Totals, finish, remove_records
from streamtap.harvest.identity import NAME as RUN_NAME
from streamtap.harvest.identity import differing_in, identity_of, take
from streamtap.harvest.plan import ShardPlan
from streamtap.harvest.record import ShardRecord, is_record, read_record, record_name, record_number
from streamtap.harvested.manifest import NAME, STATS_NAME, HarvestManifest, read_manifest
from streamtap.harvested.places import WritablePlace

_LOOKS_AHEAD = 8


@dataclass(frozen=True)
class Progress:
    """What is whole at the place by now; ``tokens_found`` are those of shards that were there at the start."""

    shards_done: int = 0
    prompts_done: int = 0
    tokens_done: int = 0
    tokens_found: int = 0


def nobody(_progress: Progress) -> None:
    """Tell nobody."""


def never() -> bool:
    """Go on."""
    return False


class RunStanding:
    """Begins the run at ``place``, or goes on with it.

    Raises:
        HarvestMismatch: another run is there; the message says what differs.
    """

    def __init__(
        self,
        place: WritablePlace,
        ask: HarvestAsk,
        provenance: Provenance,
        run_id: str | None,
        on_progress: Callable[[Progress], None],
        model_id: str | None = None,
    ) -> None:
        self._place, self._ask, self._provenance = place, ask, provenance
        self._model_id = model_id
        self._on_progress = on_progress
        self.identity = take(place, identity_of(provenance, ask), run_id)
        self._progress, self._telling = Progress(), threading.Lock()

    def check_engine(self, provenance: Provenance) -> None:
        """Hold one more engine to the run's model.

        Raises:
            HarvestMismatch: it has another; the message says what differs.
        """
        if differing_in(self.identity.about, identity_of(provenance, self._ask)):
            own, other = asdict(self._provenance), asdict(provenance)
            name = differing_in(own, other)[0]
            raise HarvestMismatch(
                f"one engine of this run has {name} {own[name]!r}, and another {other[name]!r}; see that every machine "
                "has the same model, loaded in the same way."
            )

    def manifest(self) -> HarvestManifest | None:
        """What says that the run is whole, if it is."""
        try:
            return read_manifest(self._place.get(NAME), f"{self._place.url}/{NAME}")
        except FileNotFoundError:
            return None

    def finished(self, manifest: HarvestManifest, plans: Iterable[ShardPlan]) -> HarvestManifest:
        """A run that is whole, if it is of these prompts.

        Raises:
            HarvestMismatch: it is of others.
            HarvestDamaged: a file that it names is gone.
        """
        digests, whole = [plan.digest for plan in plans], [shard.digest for shard in manifest.shards]
        if digests != whole:
            raise _other_prompts(self._place, _first_of_others(digests, manifest))
        if gone := {STATS_NAME, *(shard.key for shard in manifest.shards)} - self._place.names():
            raise HarvestDamaged(
                f"{self._place.url} lacks {min(gone)}, which its {NAME} names; remove {NAME}, and the same command "
                "makes the run anew."
            )
        remove_records(self._place)
        self._on_progress(Progress(len(manifest.shards), manifest.n_prompts))
        return manifest

    def whole(self, plan: ShardPlan, there: set[str]) -> ShardRecord | None:
        """The record of a shard that is among the files ``there``.

        Raises:
            HarvestMismatch: it is of other prompts.
        """
        name = record_name(plan.number)
        if name not in there:
            return None
        record = read_record(self._place.get(name), name)
        check_prompts(record, plan, self._place)
        return record if record.entry.key in there else None

    def looked_up(self, plans: Iterable[ShardPlan], there: set[str]) -> Generator[tuple[ShardPlan, ShardRecord | None]]:
        """Each plan with its record as ``whole`` has it; a few records are read at once, for a store may be far.

        Raises:
            HarvestMismatch: as ``whole``.
        """
        asked: deque[tuple[ShardPlan, Future[ShardRecord | None]]] = deque()
        with ThreadPoolExecutor(_LOOKS_AHEAD, thread_name_prefix="streamtap-looking") as pool:
            for plan in plans:
                # Nobody waits for the plans behind one that is to be made.
                is_new = record_name(plan.number) not in there
                while asked and (is_new or len(asked) == _LOOKS_AHEAD):
                    known, looking = asked.popleft()
                    yield known, looking.result()
                if is_new:
                    yield plan, None
                else:
                    asked.append((plan, pool.submit(self.whole, plan, there)))
            yield from ((known, looking.result()) for known, looking in asked)

    def tell(self, record: ShardRecord, *, found: bool = False) -> None:
        """One more shard is whole; ``found`` says that it was already."""
        with self._telling:
            before = self._progress
            self._progress = Progress(
                before.shards_done + 1,
                before.prompts_done + len(record.entry.prompt_indices),
                before.tokens_done + record.n_tokens,
                before.tokens_found + record.n_tokens * found,
            )
            self._on_progress(self._progress)

    def forget(self, spool: Path) -> None:
        """Leave no trace of a run that this call began and that came to nothing, so that it may be asked otherwise."""
        names = {*self._place.names(), *(each.name for each in spool.glob("*"))}
        if self.identity.is_new and not any(is_record(name) for name in names):
            self._place.delete(RUN_NAME)
            shutil.rmtree(spool, ignore_errors=True)

    def finish(self, totals: Totals) -> HarvestManifest:
        """Write the manifest, once all shards are whole.

        Raises:
            InvalidInput: there is none.
            HarvestMismatch: the place holds more, which were made of more prompts.
        """
        if not totals.shards:
            raise InvalidInput("there is nothing to harvest: no prompt came.")
        if any(is_record(name) and record_number(name) >= len(totals.shards) for name in self._place.names()):
            raise _other_prompts(self._place, sum(len(each.prompt_indices) for each in totals.shards))
        return finish(self._place, self.identity.run_id, self._ask, self._provenance, totals, model_id=self._model_id)


def check_prompts(record: ShardRecord, plan: ShardPlan, place: WritablePlace) -> None:
    """Hold a shard that is there to the prompts it is meant for.

    Raises:
        HarvestMismatch: they are others.
    """
    if record.entry.digest != plan.digest:
        raise _other_prompts(place, plan.first)


def _first_of_others(digests: Sequence[str], manifest: HarvestManifest) -> int:
    """The first prompt of the first shard that is not the run's."""
    for digest, shard in zip(digests, manifest.shards, strict=False):
        if digest != shard.digest:
            return shard.prompt_indices[0]
    return sum(len(shard.prompt_indices) for shard in manifest.shards[: len(digests)])


def _other_prompts(place: WritablePlace, first: int) -> HarvestMismatch:
    return HarvestMismatch(
        f"{place.url} holds a run of other prompts: they differ from prompt {first} on, or in their number; "
        "name another folder, or bring the same prompts in the same order."
    )
