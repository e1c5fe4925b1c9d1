"""Read a whole dataset and compare it with what its manifest and index say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from streamtap.dataset.checked import is_content
from streamtap.dataset.index import Places
from streamtap.dataset.manifest import Manifest, Shard
from streamtap.dataset.names import LOGIT_IDS, LOGIT_VALUES, hidden_key
from streamtap.dataset.reader import Dataset
from streamtap.dataset.shards import read_header
from streamtap.errors import DatasetDamaged, DatasetNotFound


@dataclass(frozen=True)
class VerifiedDataset:
    """What a verification read: ``hashed`` of the ``files`` had a recorded hash; ``faults`` are sentences."""

    name: str
    prompts: int
    files: int
    hashed: int
    read_bytes: int
    faults: tuple[str, ...]

    @property
    def sound(self) -> bool:
        """Whether everything is as the manifest and the index say."""
        return not self.faults


def verify(dataset: Dataset) -> VerifiedDataset:
    """Fetch and read every file; what does not fit is told, and nothing is changed.

    Raises:
        DatasetNotFound: no dataset there.
        DatasetDamaged: an index or manifest that means nothing.
        TransferFailed: the server failed for too long.
    """
    manifest, index = dataset.manifest, dataset.index
    faults = (
        []
        if len(index) == manifest.n_prompts
        else [f"the index has {len(index)} rows, and the manifest says {manifest.n_prompts} prompts."]
    )
    read_bytes, paths, shapes = 0, manifest.tensor_files(), _shapes(manifest)
    for path in paths:
        fault, size = _check_file(dataset, path, shapes[path])
        faults += fault
        read_bytes += size
    if not faults:
        faults += _check_places(dataset)
    hashed = sum(path in manifest.files for path in paths)
    return VerifiedDataset(dataset.source.name, len(index), len(paths), hashed, read_bytes, tuple(faults))


def _shapes(manifest: Manifest) -> dict[str, dict[str, tuple[int, int]]]:
    """The tensors that each file should hold, and their shapes [rows, width]."""
    shapes: dict[str, dict[str, tuple[int, int]]] = {}
    if (hidden := manifest.hidden) is not None:
        for layer in hidden.layers:
            for number, shard in enumerate(hidden.shards):
                here = shapes.setdefault(hidden.file(layer, number), {})
                here[hidden_key(layer)] = (shard.rows, hidden.width)
    if (logits := manifest.logits) is not None:
        for number, shard in enumerate(logits.shards):
            here = shapes.setdefault(logits.file(number), {})
            here |= dict.fromkeys((LOGIT_VALUES, LOGIT_IDS), (shard.rows, logits.k))
    return shapes


def _check_file(dataset: Dataset, path: str, shapes: Mapping[str, tuple[int, int]]) -> tuple[list[str], int]:
    try:
        file = dataset.source.fetch(path, advance=dataset.advance)
        tensors = read_header(file, path)
    except (DatasetDamaged, DatasetNotFound) as error:
        return [str(error)], 0
    expected = dataset.manifest.files.get(path)
    # Read again even where it was compared before: that is what a verification is asked for.
    wrong = expected is not None and not is_content(file, expected)
    faults = [f"{path} is not the file that the manifest describes."] if wrong else []
    for key, (rows, width) in shapes.items():
        tensor = tensors.get(key)
        if tensor is None or (tensor.rows, tensor.width) != (rows, width):
            faults.append(f"{path} does not hold {key} with the {rows} rows of width {width} that it should.")
    return faults, file.stat().st_size


def _check_places(dataset: Dataset) -> list[str]:
    """Whether each place that the index names is a row that is there."""
    manifest, index, faults = dataset.manifest, dataset.index, []
    if manifest.hidden is not None:
        faults += _outside(index.places(), manifest.hidden.shards, "rows")
        if manifest.hidden.pooling is None:
            faults += _outside(index.token_places()[0], manifest.hidden.shards, "token rows")
    if manifest.logits is not None and manifest.logits.shards:
        faults += _outside(index.logit_places(), manifest.logits.shards, "logits")
    return faults


def _outside(places: Places, shards: tuple[Shard, ...], what: str) -> list[str]:
    counts = np.array([shard.rows for shard in shards], np.int64)
    known = (places.shards >= 0) & (places.shards < len(shards))
    here = np.where(known, places.shards, 0)
    good = known & (places.rows >= 0) & (places.rows < counts[here])
    return [f"{int((~good).sum())} places of {what} in the index lie outside the shards."] if not good.all() else []
