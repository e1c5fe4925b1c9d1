"""``NodeEngine``: one engine on one machine of a cluster, and the shards that it makes.

It knows nothing of the cluster's library: ``cluster_pool`` runs it as a process somewhere and calls its methods.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path

from streamtap.activations import Provenance
from streamtap.engines.base import Engine
from streamtap.engines.tokenizing import PromptTokenizer
from streamtap.errors import HarvestMismatch, InvalidInput
from streamtap.harvest.asked import HarvestAsk
from streamtap.harvest.background import Background
from streamtap.harvest.disk_space import room_in
from streamtap.harvest.engine_source import EngineSource
from streamtap.harvest.identity import provenance_of, run_id_at
from streamtap.harvest.plan import ShardPlan
from streamtap.harvest.record import ShardRecord, is_record, record_number
from streamtap.harvest.shard_making import ShardMaking, only_one
from streamtap.harvested.folder_place import FolderPlace
from streamtap.harvested.opening import open_place
from streamtap.harvested.places import WritablePlace


class NodeEngine:
    """Makes shards of one run; a shard's upload goes on beside the next one's forward passes.

    ``load``, then ``join``, then ``shard`` as often as there are shards, two at a time; ``close`` at any time.

    Args:
        source: Opens the engine.
        place_url: The run's own folder, as this machine reaches it.
        ask: What to keep.
        spool: A folder of this machine where shards are put together; None is one beside the run where that lies in a
            folder, else the system's for temporary files.
    """

    def __init__(self, source: EngineSource, place_url: str, ask: HarvestAsk, spool: str | None = None) -> None:
        self._source, self._ask, self._spool_root = source, ask, spool
        self._place: WritablePlace = open_place(place_url)
        self._engine: Engine | None = None
        self._making: ShardMaking | None = None
        self._spool: Path | None = None
        self._held = ExitStack()
        self._capturing, self._stop = threading.Lock(), threading.Event()

    def there(self) -> None:
        """Return, which says that a machine was found for it."""

    def load(self) -> Provenance:
        """Open the engine, which may take minutes; what its model is."""
        with self._capturing:
            self._engine = self._source.open()
        return provenance_of(self._engine)

    def tokenizer(self) -> PromptTokenizer:
        """The model's, once it is loaded."""
        assert self._engine is not None, "load comes before tokenizer"
        return self._engine.tokenizer

    def join(self, run_id: str) -> frozenset[int]:
        """Work for a run from here on; the numbers of shards that its spool here holds already.

        Raises:
            InvalidInput: this machine does not see the run's folder.
        """
        if run_id_at(self._place) != run_id:
            raise InvalidInput(
                f"an engine on another machine does not find run {run_id} at {self._place.url}; name a folder that all "
                "machines of the cluster share, or an object store."
            )
        assert self._engine is not None, "load comes before join"
        self._spool = self._held.enter_context(_own_spool(self._root(run_id)))
        self._making = ShardMaking(self._engine, self._place, self._ask, self._spool, self._stop.is_set)
        return frozenset(record_number(each.name) for each in self._spool.iterdir() if is_record(each.name))

    def shard(self, plan: ShardPlan) -> ShardRecord:
        """Make a shard, or find it in the spool, and take it to the place.

        Raises:
            StreamtapError: as ``run_harvest``; where the place failed, the shard waits in the spool.
        """
        assert self._making is not None, "join comes before shard"
        assert self._spool is not None
        with room_in(self._spool):
            with self._capturing, Background("streamtap-writing") as writing:
                made = self._making.ready(plan, writing)
            return self._making.upload(made)

    def close(self) -> None:
        """Stop within a batch and let go of the model; a spool is left only where it holds what no other place has."""
        self._stop.set()
        with self._capturing:
            if self._spool is not None and not any(is_record(each.name) for each in self._spool.iterdir()):
                shutil.rmtree(self._spool)
                with suppress(OSError):  # others are in it, still
                    self._spool.parent.rmdir()
            self._held.close()
            if self._engine is not None:
                self._engine.close()

    def _root(self, run_id: str) -> Path:
        if self._spool_root is None and isinstance(self._place, FolderPlace):
            return spool_beside(self._place) / spool_name(run_id)
        return Path(self._spool_root or tempfile.gettempdir()) / spool_name(run_id)


def spool_beside(place: FolderPlace) -> Path:
    """The folder for unfinished shards of a run that lies in a folder: on one disk, a shard is moved, not copied."""
    return place.folder / ".spool"


def spool_name(run_id: str) -> str:
    """The folder in it that is the cluster's, of one run."""
    return f"streamtap-harvest-{run_id}"


@contextmanager
def _own_spool(root: Path) -> Iterator[Path]:
    """A folder in ``root`` that no other process holds: the first that is free, which may hold what a dead one left."""
    for number in count():
        with ExitStack() as held:
            try:
                held.enter_context(only_one(root / str(number)))
            except HarvestMismatch:
                continue
            yield root / str(number)
            return
