"""``ShardMaking``: one shard after the other from an engine to the run's place, by way of a spool on this machine.

A shard in the spool is never run again: an upload that failed is repeated from its file.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from streamtap.engines.base import Engine
from streamtap.errors import HarvestDamaged, HarvestFailed, HarvestMismatch
from streamtap.harvest.asked import HarvestAsk
from streamtap.harvest.background import Background
from streamtap.harvest.layout import ShardLayout
from streamtap.harvest.plan import ShardPlan
from streamtap.harvest.record import ShardRecord, read_record, record_name
from streamtap.harvest.sealing import file_of, seal, this_boot
from streamtap.harvest.shard_capture import capture_shard
from streamtap.harvest.shard_writing import ShardWriting
from streamtap.harvest.standing import check_prompts
from streamtap.harvested.fetching import file_sha256
from streamtap.harvested.places import WritablePlace

STOPPED = "the harvest was stopped; the same call goes on from the shards that are whole."


class ShardMaking:
    """Makes shards in ``spool``, of this run alone and held by ``only_one``, and takes them to ``place``."""

    def __init__(
        self, engine: Engine, place: WritablePlace, ask: HarvestAsk, spool: Path, should_stop: Callable[[], bool]
    ) -> None:
        spool.mkdir(parents=True, exist_ok=True)
        self._engine, self._place, self._ask, self._spool = engine, place, ask, spool
        self._should_stop = should_stop
        self._layers = ask.layer_indices(engine.provenance.n_layers)
        self._left_out = bos_ids(engine)

    def ready(self, plan: ShardPlan, writing: Background) -> ShardRecord:
        """The record of the shard in the spool: found there, or made now; ``upload`` seals it where that is left.

        Raises:
            HarvestFailed: it was told to stop.
            HarvestMismatch: the spool holds it of other prompts.
        """
        return self._spooled(plan) or self._made(plan, writing)

    def upload(self, made: ShardRecord) -> ShardRecord:
        """Seal a shard and take it to the place and out of the spool; its record, which goes last, is returned."""
        record = self._sealed(made)
        path, name = file_of(record, self._spool), record_name(record.number)
        if not self._was_taken(record):
            self._place.put_file(record.entry.key, path, sha256=record.entry.sha256)
        self._place.put(name, record.to_bytes())
        (self._spool / name).unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        return record

    def stop_if_told(self) -> None:
        """Go on.

        Raises:
            HarvestFailed: it was told to stop.
        """
        if self._should_stop():
            raise HarvestFailed(STOPPED)

    def _sealed(self, record: ShardRecord) -> ShardRecord:
        if record.is_sealed:
            return record
        sealed = seal(record, self._spool)
        _put_whole(self._spool / record_name(record.number), sealed.to_bytes())
        if sealed.entry.key != file_of(record, self._spool).name:
            file_of(record, self._spool).unlink()
        return sealed

    def _spooled(self, plan: ShardPlan) -> ShardRecord | None:
        file = self._spool / record_name(plan.number)
        with suppress(FileNotFoundError, HarvestDamaged):
            record = read_record(file.read_bytes(), file.name)
            check_prompts(record, plan, self._place)
            if _is_whole(file_of(record, self._spool), record) or self._was_taken(record):
                return record
        return None

    def _was_taken(self, record: ShardRecord) -> bool:
        """Whether the place took the file, and the process ended before the record followed it."""
        is_here = file_of(record, self._spool).exists()
        return record.is_sealed and not is_here and self._place.size(record.entry.key) == record.entry.bytes

    def _made(self, plan: ShardPlan, writing: Background) -> ShardRecord:
        hidden = self._engine.provenance.hidden
        layout = ShardLayout.of(plan, self._ask, self._layers, hidden, self._engine.tokenizer)
        shard = ShardWriting(layout, self._spool, self._left_out)
        try:
            for part in capture_shard(self._engine, layout, self._engine.provenance.n_layers):
                self.stop_if_told()
                writing.do(shard.add, part)
            # Waited for: a crash from here on costs the next shard alone.
            record = writing.do(shard.finish).result()
            _put_whole(self._spool / record_name(plan.number), record.to_bytes())
            return record
        except BaseException:
            with suppress(Exception):
                writing.drain()
            shard.give_up()
            raise


def bos_ids(engine: Engine) -> NDArray[np.int32]:
    """Token ids whose rows statistics leave out: the tokenizer's BOS, if it has one."""
    bos = getattr(engine.tokenizer.tokenizer, "bos_token_id", None)
    return np.array([] if bos is None else [bos], np.int32)


@contextmanager
def only_one(spool: Path) -> Iterator[None]:
    """Hold the spool for this process, which makes it.

    Raises:
        HarvestMismatch: another process holds it.
    """
    spool.mkdir(parents=True, exist_ok=True)
    lock = os.open(spool / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _take(lock, spool)
        yield
    finally:
        os.close(lock)


def _take(lock: int, spool: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise HarvestMismatch(f"another process harvests with {spool}; wait for it, or name another folder.") from error


def _is_whole(path: Path, record: ShardRecord) -> bool:
    """Whether a file has its bytes, which after a loss of power it may have lost though it has its size."""
    entry = record.entry
    if not path.is_file() or path.stat().st_size != entry.bytes:
        return False
    if record.is_sealed:
        return file_sha256(path) == entry.sha256
    return bool(record.boot) and record.boot == this_boot()


def _put_whole(path: Path, data: bytes) -> None:
    part = path.with_suffix(".part")
    part.write_bytes(data)
    part.replace(path)
