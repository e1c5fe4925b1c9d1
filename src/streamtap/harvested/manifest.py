"""``HarvestManifest``: what a run holds, with sizes and hashes. It is written last: its presence means a whole run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from io import BytesIO
from typing import Any

from streamtap.errors import HarvestDamaged

NAME = "manifest.json"
STATS_NAME = "stats.safetensors"
LAYOUT_VERSION = 2
#: Above any size or number of prompts that there can be, and safe to calculate with.
_MOST = 1 << 60
CONVENTION = "the output of decoder block k, k from 0, before the final norm"
TENSOR_LAYOUT = "prompt_{i}: [layers, rows, width], layers as in layer_indices, i over the whole list of prompts"
TOKENS_LAYOUT = (
    "tokens_{i}: int32 [tokens], every token of prompt i as it ran; positions_{i}: int32 [rows], there where not every "
    "token has a row; windows of documents also have documents_{i} and offsets_{i} (int64) and starts_{i} (int32), "
    "[segments]: row of the input, first token within it, and where the segment begins in the window"
)


@dataclass(frozen=True, slots=True)
class ShardTensor:
    """A tensor of a shard file."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ShardEntry:
    """A shard file, ``key`` its name in the run's folder; hash and size are those of the file as it lies there.

    ``digest`` is that of its prompts, by which a run that goes on knows them again.
    """

    key: str
    sha256: str
    bytes: int
    prompt_indices: tuple[int, ...]
    tensors: tuple[ShardTensor, ...]
    digest: str = ""


@dataclass(frozen=True)
class HarvestManifest:
    """What a run holds; field names are the keys of ``manifest.json``, CONTRACT section 7.

    ``capture`` is {"positions", "pooling"}; ``statistics`` {"file", "count", "excluded"}; ``mean_token_norm`` one
    number a layer, in the order of ``layer_indices``; ``truncated_prompts`` {"index", "tokens", "kept"} each;
    ``projection`` {"directions", "sha256"} or None; ``dtype`` that of the rows in the files;
    ``tokenizer_limits`` {"context_length", "vocabulary", "special_ids"}, what tokenising depends on beside the files.
    Other servers' runs lack it and ``provenance``.
    """

    run_id: str
    model_id: str
    hf_repo: str
    revision: str | None
    dtype: str
    compression: str
    capture: Mapping[str, Any]
    add_special_tokens: bool
    layer_indices: tuple[int, ...]
    n_prompts: int
    contents: str
    projection: Mapping[str, Any] | None
    statistics: Mapping[str, Any]
    mean_token_norm: tuple[float, ...]
    truncated_prompts: tuple[Mapping[str, int], ...]
    shards: tuple[ShardEntry, ...]
    provenance: Mapping[str, Any] = field(default_factory=dict)
    tokenizer_limits: Mapping[str, Any] = field(default_factory=dict)
    layout_version: int = LAYOUT_VERSION
    residual_stream_convention: str = CONVENTION
    tensor_layout: str = TENSOR_LAYOUT
    tokens_layout: str = TOKENS_LAYOUT

    @property
    def width(self) -> int:
        """Of a row: hidden, or the number of directions; 0 where there are no rows."""
        tensors = (tensor for entry in self.shards for tensor in entry.tensors)
        rows = (tensor.shape for tensor in tensors if tensor.name.startswith("prompt_") and len(tensor.shape) == 3)
        return next(rows, (0, 0, 0))[2]

    def to_json(self) -> bytes:
        """The file's bytes."""
        about = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "shards"}
        written = BytesIO()
        written.write(_json(about)[:-1] + b',"shards":[')
        # One by one: objects of all their tensors at once would take many times the file.
        for number, each in enumerate(self.shards):
            written.write(b"," * bool(number) + _json(shard_object(each)))
        written.write(b"]}")
        return written.getvalue()


def read_manifest(raw: bytes, where: str) -> HarvestManifest:
    """The manifest that ``raw`` holds; keys that a newer minor version adds are passed over.

    Raises:
        HarvestDamaged: it is none, or of another layout.
    """
    try:
        found = json.loads(raw)
        version = found["layout_version"]
        if version != LAYOUT_VERSION:
            raise HarvestDamaged(
                f"{where} has layout_version {version}; this version of Streamtap reads {LAYOUT_VERSION}. Update it."
            )
        known = {each.name: found[each.name] for each in fields(HarvestManifest) if each.name in found}
        shards = tuple(shard_entry(each) for each in found["shards"])
        return HarvestManifest(
            **known
            | {
                "shards": shards,
                "n_prompts": _counts([found["n_prompts"]])[0],
                "layer_indices": _counts(found["layer_indices"]),
                "capture": dict(found["capture"]),
                "statistics": dict(found["statistics"]),
                "provenance": dict(found.get("provenance", {})),
                "mean_token_norm": tuple(found["mean_token_norm"]),
                "truncated_prompts": tuple(found["truncated_prompts"]),
            }
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise HarvestDamaged(f"{where} is not the manifest of a harvest ({type(error).__name__}).") from error


def shard_object(entry: ShardEntry) -> dict[str, Any]:
    """A shard's entry as ``manifest.json`` has it."""
    tensors = [{"name": tensor.name, "shape": tensor.shape} for tensor in entry.tensors]
    return {**{each.name: getattr(entry, each.name) for each in fields(entry)}, "tensors": tensors}


def shard_entry(found: Mapping[str, Any]) -> ShardEntry:
    """A shard's entry from its JSON object.

    Raises:
        KeyError, TypeError, ValueError: it is none.
    """
    tensors = tuple(ShardTensor(str(each["name"]), _counts(each["shape"])) for each in found["tensors"])
    return ShardEntry(
        key=str(found["key"]),
        sha256=str(found["sha256"]),
        bytes=_counts([found["bytes"]])[0],
        prompt_indices=_counts(found["prompt_indices"]),
        tensors=tensors,
        digest=str(found.get("digest", "")),
    )


def _counts(numbers: Any) -> tuple[int, ...]:
    if not all(type(number) is int and 0 <= number < _MOST for number in numbers):
        raise ValueError("no counts")
    return tuple(numbers)


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
