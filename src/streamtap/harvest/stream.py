"""``ActivationStream``: the rows of a harvest, shuffled across prompts, as batches for training.

::

    files ─► units, read ahead ─► one buffer of shuffle_rows ─► batches, normalised ─► sparse autoencoder
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from functools import cache
from itertools import chain
from pathlib import Path
from types import new_class
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from streamtap.activations import to_torch
from streamtap.errors import HarvestMismatch, InvalidInput, MissingExtra, Unsupported
from streamtap.harvest.shuffling import first_row, shuffled
from streamtap.harvest.stream_order import Order, Units, plan_units, shares
from streamtap.harvest.stream_reading import StreamRows, units_ahead
from streamtap.harvested.folder_place import FolderPlace
from streamtap.harvested.joined import JoinedRuns
from streamtap.harvested.reader import HarvestedRun
from streamtap.harvested.store_place import StorePlace
from streamtap.layers import LayerSpec

if TYPE_CHECKING:
    import torch

#: Read in one go: what a disk or store gives at full speed, and far less than a buffer.
_UNIT_BYTES = 1 << 22
#: So many units are in the buffer at least, unless a prompt alone has more rows.
_UNITS_MIXED = 32


class ActivationStream:
    """A torch ``IterableDataset`` over the rows of a harvest; give it to a ``DataLoader`` with ``batch_size=None``.

    A batch is a tensor [batch_rows, width] where one layer is asked for, and ``{layer: [batch_rows, width]}`` where
    several are; the last of a pass, or of each worker, may be shorter. A pass gives each row once, in blocks of
    ``shuffle_rows``, each in an order drawn from all that there are; which prompts meet in a block is drawn, too. The
    order depends on ``seed``, the epoch and the number of workers alone: call ``set_epoch`` before each pass, or it is
    the same again.

    The workers of a ``DataLoader`` share prompts and buffer among them. In memory are the buffer, 64 MiB that are read
    ahead, and, where the run is compressed, some shards.

    ::

        stream = ActivationStream("./run", layers=[8], shuffle_rows=1 << 18)
        for epoch in range(3):
            stream.set_epoch(epoch)
            for rows in DataLoader(stream, batch_size=None):
                ...

    Args:
        run: A run, several joined, or where one lies: a folder, or an ``s3://``, ``gs://`` or ``az://`` address.
        batch_rows: Rows of a batch.
        shuffle_rows: Rows of the buffer, of all workers together; at least a batch for each.
        layers: Which of the run's layers; None takes all.
        normalise: Give (row - mean) / std in float32, with the run's statistics; a value that never differs gives 0.
        drop_special: Leave out rows that stand on BOS and other special tokens. The tokens of the whole run are read
            once for it.
        seed: A whole number of 0 or more.

    Raises:
        MissingExtra: torch is not installed.
        InvalidInput: a number that cannot be, nothing to give, or special tokens that the run does not name.
        InvalidLayers: the run does not hold a layer.
        HarvestDamaged: no whole run is there.
    """

    #: The class without torch's, by which another process knows it.
    _kind: type[ActivationStream]

    def __new__(cls, *_args: Any, **_named: Any) -> Any:
        """Of the class that torch knows as its own, made when the first stream is: torch is not loaded before."""
        return object.__new__(_of_torch(cls))  # type: ignore[arg-type] # mypy takes a class for not hashable

    def __init__(
        self,
        run: HarvestedRun | JoinedRuns | str | Path,
        batch_rows: int = 4096,
        shuffle_rows: int = 1 << 17,
        layers: LayerSpec | None = None,
        *,
        normalise: bool = False,
        drop_special: bool = False,
        seed: int = 0,
    ) -> None:
        for name, value, least in (("batch_rows", batch_rows, 1), ("shuffle_rows", shuffle_rows, 1), ("seed", seed, 0)):
            _check_whole(name, value, least)
        opened = HarvestedRun.open(run) if isinstance(run, str | Path) else run
        runs = opened.runs if isinstance(opened, JoinedRuns) else (opened,)
        self.batch_rows, self.shuffle_rows, self.seed = int(batch_rows), int(shuffle_rows), int(seed)
        self.layers = runs[0].held_layers(layers)
        self._places = [each.place for each in runs]
        self._asked: dict[str, Any] = {"normalise": normalise, "drop_special": drop_special}
        self._run_ids = [each.manifest.run_id for each in runs]
        self._rows = StreamRows(runs, self.layers, drop_special=drop_special)
        self._units = self._planned()
        if not self.n_rows:
            raise InvalidInput(f"{self._places[0].url} has no row to give; every one stands on a special token.")
        self._moments = _moments(opened, self.layers) if normalise else None
        self._process = os.getpid()
        self._epoch = _shared_number()
        self._role, self._taken, self._loaded = 0, 0, dict[str, Any]()

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process opens the files for itself.

        Raises:
            Unsupported: they lie behind links, which this process alone can sign anew.
        """
        if not all(isinstance(place, FolderPlace | StorePlace) for place in self._places):
            raise Unsupported(
                f"{self._places[0].url} cannot be handed to another process; download it first, or read it with "
                "num_workers=0: a stream reads ahead by threads as it is."
            )
        named = {"batch_rows": self.batch_rows, "shuffle_rows": self.shuffle_rows, "layers": list(self.layers)}
        named |= {**self._asked, "seed": self.seed}
        urls = [place.url for place in self._places]
        return _opened_again, (self._kind, urls, named, self._epoch, self._loaded)

    @property
    def n_rows(self) -> int:
        """Rows of a pass."""
        return int(self._units.rows.sum())

    @property
    def width(self) -> int:
        """Of a row."""
        return self._rows.width

    @property
    def epoch(self) -> int:
        """The pass whose order is given next."""
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass; workers that live on learn of it, too.

        Raises:
            InvalidInput: less than 0.
        """
        _check_whole("epoch", epoch, 0)
        if epoch != self.epoch:
            self._epoch.fill_(epoch)
            self._taken, self._loaded = 0, {}

    def state_dict(self, batches: int | None = None, workers: int = 0) -> dict[str, Any]:
        """What ``load_state_dict`` goes on from, in this process or another.

        A ``DataLoader`` with workers gives batches that the stream in this process does not see: say how many were
        taken in this pass, and how many ``workers`` there are.
        """
        info = _worker_info()
        told: dict[str, Any] = {"epoch": self.epoch, "batches": self._taken, "workers": max(1, workers)}
        if batches is not None:
            _check_whole("batches", batches, 0)
            told["batches"] = batches
        elif info is not None:
            # Of this worker alone, for loaders that ask each of theirs.
            told |= {"workers": info.num_workers, "worker": self._role}
        return told | self._order_of()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next pass begin after the batches that were taken before; ``set_epoch`` of another epoch undoes it.

        Raises:
            HarvestMismatch: the state is of a stream of another order; what differs is named.
        """
        for name, value in self._order_of().items():
            if state.get(name) != value:
                raise HarvestMismatch(
                    f"the state is of a stream with {name} {state.get(name)!r}, and this one has {value!r}; make it "
                    "with the same arguments."
                )
        if "worker" in state and _worker_info() is None:
            raise HarvestMismatch(
                f"the state is of one worker of {state['workers']}; load it in that worker, or the one that "
                "state_dict(batches, workers) gives here."
            )
        self._epoch.fill_(int(state["epoch"]))
        self._loaded, self._taken = dict(state), int(state["batches"])

    def __iter__(self) -> Iterator[Any]:
        """The batches of one pass, or what is left of it."""
        self._check_process()
        info = _worker_info()
        workers = 1 if info is None else info.num_workers
        role, first = self._place(0 if info is None else info.id, workers)
        self._role, self._loaded, self._taken = role, {}, first
        order = self._order(role, workers)
        if first >= order.n_batches:
            return
        row = first_row(order, first)
        unit = int(np.searchsorted(order.offsets, row, side="right")) - 1
        with closing(self._ahead(order.units[unit:])) as pieces:
            opening = [rows[row - int(order.offsets[unit]) :] for rows in next(pieces)]
            like = [each[:0] for each in opening]
            for rows in shuffled(order, chain([opening], pieces), like, first):
                self._taken += 1
                yield self._batch(rows)

    def _planned(self) -> Units:
        row_bytes = self._rows.width * self._rows.dtype.itemsize * len(self.layers)
        most = max(1, min(_UNIT_BYTES // row_bytes, self.shuffle_rows // _UNITS_MIXED))
        return plan_units(self._rows.counts, self._rows.wanted, None if self._rows.is_packed else most)

    def _order(self, worker: int, workers: int) -> Order:
        return Order.of(
            self._units,
            batch_rows=self.batch_rows,
            shuffle_rows=self.shuffle_rows,
            seed=self.seed,
            epoch=self.epoch,
            worker=worker,
            workers=workers,
        )

    def _place(self, worker: int, workers: int) -> tuple[int, int]:
        """Whose part of the pass a worker gives, and how many batches of it were taken before.

        A pass that is gone on with begins with the worker whose turn it would have been.
        """
        state = self._loaded
        if not state or state["epoch"] != self.epoch:
            return worker, 0
        if state["workers"] != workers:
            raise HarvestMismatch(
                f"the state is of a pass with {state['workers']} workers, and this one has {workers}; give the "
                "DataLoader as many as before."
            )
        if "worker" in state:
            return int(state["worker"]), int(state["batches"])
        given, turn = shares([self._order(role, workers).n_batches for role in range(workers)], int(state["batches"]))
        role = (turn + worker) % workers
        return role, given[role]

    def _ahead(self, units: NDArray[np.int64]) -> Generator[list[NDArray[Any]], None, None]:
        planned = self._units
        columns = (planned.shards[units], planned.first[units], planned.stop[units])
        stretches = list(zip(*(column.tolist() for column in columns), strict=True))
        row_bytes = self._rows.width * self._rows.dtype.itemsize * len(self.layers)
        return units_ahead(self._rows.read, stretches, (planned.rows[units] * row_bytes).tolist())

    def _batch(self, rows: list[NDArray[Any]]) -> Any:
        tensors = [to_torch(each) for each in rows]
        if self._moments is not None:
            pairs = zip(tensors, self._moments, strict=True)
            tensors = [each.float().sub_(mean).div_(std) for each, (mean, std) in pairs]
        return tensors[0] if len(tensors) == 1 else dict(zip(self.layers, tensors, strict=True))

    def _order_of(self) -> dict[str, Any]:
        """All that the order depends on beside epoch and workers."""
        return {
            "runs": list(self._run_ids),
            "seed": self.seed,
            "batch_rows": self.batch_rows,
            "shuffle_rows": self.shuffle_rows,
            "layers": list(self.layers),
            "drop_special": bool(self._asked["drop_special"]),
        }

    def _check_process(self) -> None:
        if os.getpid() == self._process:
            return
        if not self._rows.is_on_this_machine:
            raise Unsupported(
                f"{self._places[0].url} cannot be read in a forked process, for its connections are the other's; give "
                "the DataLoader multiprocessing_context='spawn', or num_workers=0: a stream reads ahead by threads."
            )
        self._rows.open_again()
        self._process = os.getpid()


def _check_whole(name: str, value: Any, least: int) -> None:
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < least:
        raise InvalidInput(f"{name} must be a whole number of {least} or more; got {value!r}.")


def _moments(run: HarvestedRun | JoinedRuns, layers: tuple[int, ...]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Mean and standard deviation of each layer, float32 [width]."""
    found = run.statistics()
    at = [run.layers.index(layer) for layer in layers]
    std = np.where(found["std"] > 0, found["std"], 1).astype(np.float32)
    return [(to_torch(found["mean"][i].astype(np.float32)), to_torch(std[i])) for i in at]


def _opened_again(
    kind: type[ActivationStream], urls: list[str], named: dict[str, Any], epoch: torch.Tensor, loaded: dict[str, Any]
) -> ActivationStream:
    runs = [HarvestedRun.open(url) for url in urls]
    stream: ActivationStream = kind(JoinedRuns(runs) if len(runs) > 1 else runs[0], **named)
    stream._epoch, stream._loaded = epoch, loaded
    stream._taken = int(loaded.get("batches", 0))
    return stream


@cache
def _of_torch(kind: type[ActivationStream]) -> type[ActivationStream]:
    """``kind`` as a subclass of torch's own, without which a DataLoader would not iterate over it."""
    try:
        from torch.utils.data import IterableDataset
    except ImportError as error:
        raise MissingExtra("a stream for training needs torch: pip install 'streamtap[local]'.") from error
    if issubclass(kind, IterableDataset):
        return kind
    told = {"__module__": kind.__module__, "__doc__": kind.__doc__, "_kind": kind}
    bases: tuple[type, ...] = (kind, IterableDataset)
    made: type[ActivationStream] = new_class(kind.__name__, bases, exec_body=lambda body: body.update(told))
    return made


def _shared_number() -> torch.Tensor:
    """An int64 that all processes of a DataLoader see."""
    import torch

    number = torch.zeros((), dtype=torch.int64)
    number.share_memory_()  # type: ignore[no-untyped-call]
    return number


def _worker_info() -> Any:
    from torch.utils.data import get_worker_info

    return get_worker_info()
