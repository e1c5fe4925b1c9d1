"""What is in a dataset, without its rows."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from streamtap.dataset.manifest import Hidden, Manifest
from streamtap.dataset.reader import Dataset, is_read_in_part


class DatasetInfo:
    """What the end of a dataset's index says; ``prompts`` alone reads more, when it is asked for."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._footer = dataset.footer

    def __repr__(self) -> str:
        """One line for a person."""
        layers = self.available_layers
        return (
            f"DatasetInfo(model_name={self.model_name!r}, num_prompts={self.num_prompts}, "
            f"available_layers={layers}, pooling={self.pooling!r}, dtype={self.dtype!r})"
        )

    @property
    def manifest(self) -> Manifest:
        """The manifest."""
        return self._footer.manifest

    @property
    def name(self) -> str:
        """What the dataset is called."""
        return self._dataset.source.name

    @property
    def version(self) -> str | None:
        """The Hub commit of the dataset; None where it lies elsewhere."""
        return self._dataset.source.version

    @property
    def model_name(self) -> str:
        """The model whose activations these are."""
        return self.manifest.model

    @property
    def model_commit(self) -> str | None:
        """The commit of the model, if it was recorded."""
        return self.manifest.commit

    @property
    def available_layers(self) -> list[int]:
        """Numbers of the layers, ascending; none where there are logits only."""
        return sorted(self.manifest.hidden.layers) if self.manifest.hidden is not None else []

    @property
    def num_prompts(self) -> int:
        """Number of rows of the index."""
        return self._footer.n_rows

    @property
    def pooling(self) -> str | None:
        """How a prompt's rows became one; ``"none"`` where every token has a row, None without activations."""
        hidden = self.manifest.hidden
        return None if hidden is None else hidden.pooling or "none"

    @property
    def dtype(self) -> str | None:
        """The dtype of the stored rows."""
        return self.manifest.hidden.dtype if self.manifest.hidden is not None else None

    @property
    def hidden(self) -> int | None:
        """The width of a row."""
        return self.manifest.hidden.width if self.manifest.hidden is not None else None

    @property
    def format_version(self) -> str:
        """The version of the dataset format."""
        return self.manifest.format_version

    @property
    def tensor_descriptors(self) -> dict[str, Any]:
        """The format's own description of the tensors."""
        described = self.manifest.described
        return dict(described.get("tensors") or described.get("tensor_types") or {})

    @property
    def columns(self) -> Mapping[str, str]:
        """Names and Arrow types of the index's columns."""
        return self._footer.columns

    @property
    def index_bytes(self) -> int:
        """Size of the index."""
        return self._footer.size_bytes

    @cached_property
    def prompts(self) -> list[str]:
        """The prompts, in the dataset's order; fetches the index."""
        return self._dataset.index.texts()

    def layer_bytes(self, layer: int) -> int:
        """What has to be downloaded for one layer, beside the index; estimated where sizes are not recorded."""
        hidden = self.manifest.hidden
        if hidden is None or layer not in hidden.layers:
            return 0
        return sum(self._part_bytes(hidden, layer, shard) for shard in range(len(hidden.shards)))

    def _part_bytes(self, hidden: Hidden, layer: int, shard: int) -> int:
        known = self.manifest.files.get(hidden.file(layer, shard))
        if known is not None:
            return known.size_bytes
        whole = hidden.file_bytes(shard)
        part = whole if hidden.per_layer else whole // len(hidden.layers)
        return part if is_read_in_part(part, whole) else whole

    @property
    def total_bytes(self) -> int:
        """Size of all tensors; estimated where sizes are not recorded."""
        if self.manifest.files:
            return sum(each.size_bytes for each in self.manifest.files.values())
        hidden, logits = self.manifest.hidden, self.manifest.logits
        total = 0
        if hidden is not None:
            files = len(hidden.layers) if hidden.per_layer else 1
            total += files * sum(hidden.file_bytes(shard) for shard in range(len(hidden.shards)))
        return total + (sum(logits.file_bytes(i) for i in range(len(logits.shards))) if logits is not None else 0)
