"""Rows of a stream as they lie in the files: a few units at a time, read ahead of whoever takes them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamtap.errors import HarvestDamaged, InvalidInput
from streamtap.harvest.spans_of_file import read_spans
from streamtap.harvested.folder_place import FolderPlace
from streamtap.harvested.reader import HarvestedRun
from streamtap.harvested.shard_reader import HarvestedShard, file_name
from streamtap.ragged import offsets_of

Array = NDArray[Any]
Ints = NDArray[np.int64]

#: A disk, and a store more so, is read faster by several at once.
_THREADS = 4
#: What may be read before it is wanted; the next unit is, whatever its size.
_AHEAD_BYTES = 1 << 26


class StreamRows:
    """The rows that a stream wants of ``runs``: those of ``layers``, without special tokens where they are dropped.

    Shards are numbered over all runs, and their prompts within the shard.

    Raises:
        InvalidInput: the special tokens are to be dropped, and the run does not say which they are.
    """

    def __init__(self, runs: Sequence[HarvestedRun], layers: Sequence[int], *, drop_special: bool = False) -> None:
        self._shards = [(run, number) for run in runs for number in range(len(run.manifest.shards))]
        self._layers = tuple(layers)
        self.width, self.dtype = runs[0].width, runs[0].dtype
        #: Rows of each prompt, int64 [prompts], one array a shard; and those of them that are wanted.
        self.counts = [_row_counts(shard) for run in runs for shard in run.shards()]
        self.wanted = self.counts
        self._dropped: list[Ints] | None = None
        if drop_special:
            self._dropped = _special_rows(runs)
            pairs = zip(self.counts, self._dropped, strict=True)
            self.wanted = [_without(counts, dropped) for counts, dropped in pairs]

    @property
    def is_packed(self) -> bool:
        """Whether some shard has to be unpacked whole, whatever is wanted of it."""
        return any(run.manifest.compression != "none" for run, _ in self._shards)

    @property
    def is_on_this_machine(self) -> bool:
        """Whether all files are in a folder here."""
        return all(isinstance(run.place, FolderPlace) for run, _ in self._shards)

    def open_again(self) -> None:
        """Read by new readers: in a forked process a thread that is not there may hold a lock of the old ones."""
        fresh = {id(run): HarvestedRun(run.place, run.manifest) for run, _ in self._shards}
        self._shards = [(fresh[id(run)], number) for run, number in self._shards]

    def read(self, shard: int, first: int, stop: int) -> list[Array]:
        """The wanted rows of prompts [first, stop) of a shard, [rows, width] of each layer.

        Raises:
            HarvestDamaged: the file is missing, or does not fit the manifest.
            TransferFailed: the store fails.
        """
        found = self._every_row(shard, first, stop)
        if self._dropped is None:
            return found
        offsets = offsets_of(self.counts[shard])
        dropped = self._dropped[shard]
        here = dropped[slice(*np.searchsorted(dropped, offsets[[first, stop]]))] - offsets[first]
        kept = np.delete(np.arange(len(found[0])), here)
        return [rows.take(kept, axis=0) for rows in found]

    def _every_row(self, shard: int, first: int, stop: int) -> list[Array]:
        run, number = self._shards[shard]
        is_plain = run.manifest.compression == "none"
        # One that has to be unpacked is needed once, and is large.
        held = run.shard(number) if is_plain else HarvestedShard(run.place, run.manifest, number)
        prompts = held.indices[first:stop]
        if not (is_plain and isinstance(run.place, FolderPlace)):
            parts = held.rows(prompts, self._layers)
            return [np.concatenate([part[layer] for part in parts]) for layer in self._layers]
        path = run.place.path(file_name(run.manifest.shards[number]))
        offsets = offsets_of(self.counts[shard][first:stop]) * self.width * self.dtype.itemsize
        raw = [np.empty(int(offsets[-1]), np.uint8) for _ in self._layers]
        views = [each.data for each in raw]
        ends = offsets.tolist()
        into = [view[ends[i] : ends[i + 1]] for i in range(len(prompts)) for view in views]
        try:
            read_spans(path, held.spans(prompts, self._layers), into)
        except (FileNotFoundError, EOFError) as error:
            raise HarvestDamaged(
                f"{path} is missing or ends before its rows do; harvest it again, or fetch it anew."
            ) from error
        return [each.view(self.dtype).reshape(-1, self.width) for each in raw]


def units_ahead(
    read: Callable[[int, int, int], list[Array]], units: Sequence[tuple[int, int, int]], unit_bytes: Sequence[int]
) -> Generator[list[Array], None, None]:
    """What ``read`` gives of each of ``units``, in order; some that follow are read meanwhile."""
    waiting: deque[tuple[Future[list[Array]], int]] = deque()
    held, following = 0, 0
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="streamtap-stream") as pool:
        try:
            while waiting or following < len(units):
                while following < len(units) and (len(waiting) < 2 or held + unit_bytes[following] <= _AHEAD_BYTES):
                    waiting.append((pool.submit(read, *units[following]), unit_bytes[following]))
                    held, following = held + unit_bytes[following], following + 1
                coming, size = waiting.popleft()
                yield coming.result()
                held -= size
        finally:
            pool.shutdown(cancel_futures=True)


def _row_counts(shard: HarvestedShard) -> Ints:
    return np.array([shard.n_rows(i) for i in shard.indices], np.int64)


def _special_rows(runs: Sequence[HarvestedRun]) -> list[Ints]:
    """Which rows of each shard stand on special tokens, ascending; the tokens of all are read for it."""

    def find(run: HarvestedRun, shard: HarvestedShard) -> Ints:
        special = np.asarray(run.manifest.tokenizer_limits["special_ids"], np.int32)
        tokens = [_tokens_of_rows(shard, i) for i in shard.indices]
        return np.flatnonzero(np.isin(np.concatenate(tokens), special))

    for run in runs:
        if "special_ids" not in run.manifest.tokenizer_limits:
            raise InvalidInput(
                f"{run.place.url} does not say which tokens are special; leave drop_special out, or harvest it again."
            )
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="streamtap-tokens") as pool:
        return [each for run in runs for each in _mapped(pool, find, run)]


def _mapped(
    pool: ThreadPoolExecutor, find: Callable[[HarvestedRun, HarvestedShard], Ints], run: HarvestedRun
) -> Iterator[Ints]:
    """``find`` of each shard, in order, with few of them open at a time."""
    waiting: deque[Future[Ints]] = deque()
    for shard in run.shards():
        waiting.append(pool.submit(find, run, shard))
        if len(waiting) >= 2 * _THREADS:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _tokens_of_rows(shard: HarvestedShard, i: int) -> NDArray[np.int32]:
    """The token that each row of a prompt stands on; -1, which is no token, for a mean or a maximum."""
    positions = shard.positions(i)
    return positions if len(positions) and positions[0] < 0 else shard.token_ids(i)[positions]


def _without(counts: Ints, dropped: Ints) -> Ints:
    gone = np.bincount(np.searchsorted(np.cumsum(counts), dropped, side="right"), minlength=len(counts))
    return counts - gone
