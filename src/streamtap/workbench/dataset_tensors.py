"""``load_activation_dataset``: a dataset's tensors as they lie, under the names of the format."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamtap.activations import to_torch
from streamtap.dataset.index import Places
from streamtap.dataset.manifest import Shard
from streamtap.dataset.names import HIDDEN, LOGIT_IDS, LOGIT_VALUES, LOGITS, hidden_key
from streamtap.errors import MissingExtra
from streamtap.layers import LayerSpec
from streamtap.workbench.dataset_rows import chosen_layers
from streamtap.workbench.open_dataset import chosen_kinds, fetching, open_dataset

Array = NDArray[Any]


class Rows(np.ndarray[Any, Any]):
    """An array that also answers ``.numpy()``, so that code for tensors runs where torch is not installed."""

    def numpy(self) -> Array:
        """The same values as a plain array; nothing is copied."""
        return self.view(np.ndarray)


def load_activation_dataset(
    repo_id: str | Path,
    tensors: Sequence[str] | None = None,
    layers: LayerSpec | None = None,
    token: str | None = None,
    *,
    show_progress: bool | None = None,
    revision: str | None = None,
    endpoint: str | None = None,
    refresh: bool = False,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tensors of a dataset, ``{"hidden.layer_16": [rows, hidden], …}``, and the metadata of its manifest.

    Rows lie as in the shards, one shard after the other: in the order of the index, and for a full-sequence dataset
    first every prompt's last token, then the other tokens. Activations are float32, whatever they are stored as. Torch
    tensors where torch is installed, else arrays that answer ``.numpy()`` as well.

    Args:
        repo_id: ``user/name`` on the Hub, a folder (``./name``), or an ``s3://``, ``gs://``, ``az://`` address.
        tensors: ``"hidden_layers"`` and ``"logits_topk"``; None takes what is there.
        layers: As for ``load_activations``.
        token: Of the Hub; None takes ``HF_TOKEN`` or the one logged in.
        show_progress: Show a progress bar; None shows it on a terminal only.
        revision: Branch, tag or commit of the dataset on the Hub.
        endpoint: Address of the Hub; by default ``HF_ENDPOINT``, or the public one.
        refresh: Ask for the newest version, instead of the one that is on this machine.

    Raises:
        DatasetNotFound: no such dataset, or none that this token may see.
        NotInDataset: layers or tensors that it does not hold.
        DatasetDamaged: files that do not fit the manifest, fetched twice.
    """
    opened = open_dataset(repo_id, token=token, revision=revision, endpoint=endpoint, refresh=refresh)
    with fetching(opened, show=show_progress) as dataset:
        found: dict[str, Any] = {}
        kinds = chosen_kinds(dataset, tensors)
        if HIDDEN in kinds:
            places = _in_shard_order(dataset.hidden.shards)
            for layer in chosen_layers(dataset, layers):
                found[hidden_key(layer)] = dataset.read_layer(layer, places, np.dtype(np.float32))
        if LOGITS in kinds:
            values, ids = dataset.read_logits(_in_shard_order(dataset.logits.shards))
            found |= {LOGIT_VALUES: values, LOGIT_IDS: ids}
        make = _maker()
        return {name: make(rows) for name, rows in found.items()}, dict(dataset.manifest.described)


def _in_shard_order(shards: Sequence[Shard]) -> Places:
    counts = [shard.rows for shard in shards]
    numbers = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    rows = [np.arange(count, dtype=np.int64) for count in counts]
    return Places(numbers, np.concatenate(rows) if rows else np.zeros(0, np.int64))


def _maker() -> Callable[[Array], Any]:
    try:
        to_torch(np.zeros(0, np.float32))
    except MissingExtra:
        return lambda rows: rows.view(Rows)
    return to_torch
