"""The manifest: what a dataset holds, in which files, and how it was made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from streamtap.dataset.names import hidden_file, logits_file
from streamtap.errors import DatasetDamaged

#: The version of the format that we write.
FORMAT_VERSION = "2.0"


def value_bytes(dtype: str) -> int:
    """Bytes of a value of an activation dtype."""
    return {"float16": 2, "bfloat16": 2, "float64": 8}.get(dtype, 4)


@dataclass(frozen=True)
class Shard:
    """One stretch of the dataset: ``rows`` is the length of its tensors; ``file`` where the format names it."""

    prompts: int
    rows: int
    file: str | None = None


@dataclass(frozen=True)
class Hidden:
    """The activations: ``pooling`` is None where every token has a row.

    Then shards 0 to ``last_token_shards`` - 1 hold one row a prompt, its last token's, and the others the rest.
    """

    layers: tuple[int, ...]
    width: int
    dtype: str
    pooling: str | None
    shards: tuple[Shard, ...]
    last_token_shards: int = 0
    per_layer: bool = True

    def file_bytes(self, shard: int) -> int:
        """About how long a file of ``shard`` is."""
        together = 1 if self.per_layer else len(self.layers)
        return self.shards[shard].rows * self.width * value_bytes(self.dtype) * together

    def file(self, layer: int, shard: int) -> str:
        """Path of the file that holds ``layer`` of ``shard``."""
        if self.per_layer:
            return hidden_file(layer, shard)
        file = self.shards[shard].file
        if file is None:
            raise DatasetDamaged(f"the manifest names no file for shard {shard}, whose layers lie together in one.")
        return file


@dataclass(frozen=True)
class Logits:
    """The k largest logits of each prompt's last position, raw."""

    k: int
    dtype: str
    shards: tuple[Shard, ...]

    @property
    def width(self) -> int:
        """Values a row."""
        return self.k

    def file_bytes(self, shard: int) -> int:
        """About how long the file of ``shard`` is."""
        return self.shards[shard].rows * self.k * 8

    def file(self, shard: int) -> str:
        """Path of the file that holds the logits of ``shard``."""
        return self.shards[shard].file or logits_file(shard)


@dataclass(frozen=True)
class FileSum:
    """Size and SHA-256 (hex) of a file."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a dataset holds.

    ``commit`` is the model's; ``capture`` says how the rows were made, as far as whoever wrote them knew;
    ``content`` is the fingerprint of what was published; ``files`` are the sizes and hashes, none in datasets that
    other programs wrote. ``described`` is the format's own metadata as it stands in the dataset.
    """

    model: str
    commit: str | None
    n_prompts: int
    hidden: Hidden | None
    logits: Logits | None
    ordering: str = "given"
    format_version: str = FORMAT_VERSION
    provenance: Mapping[str, Any] = field(default_factory=dict)
    capture: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, FileSum] = field(default_factory=dict)
    content: str | None = None
    described: Mapping[str, Any] = field(default_factory=dict)

    def tensor_files(self) -> list[str]:
        """Paths of every shard file that the manifest implies."""
        names: dict[str, None] = {}
        if self.hidden is not None:
            for layer in self.hidden.layers:
                names |= dict.fromkeys(self.hidden.file(layer, shard) for shard in range(len(self.hidden.shards)))
        if self.logits is not None:
            names |= dict.fromkeys(self.logits.file(shard) for shard in range(len(self.logits.shards)))
        return list(names)
