"""``ShardRecord``: what is known of a whole shard; it lies beside the shards until the manifest takes its place."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from streamtap.errors import HarvestDamaged, InvalidInput
from streamtap.harvested.manifest import ShardEntry, shard_entry, shard_object
from streamtap.harvested.statistics import RowSums
from streamtap.tensor_file import read_tensors, tensor_bytes

_PREFIX, _SUFFIX = "whole_", ".safetensors"


def record_name(number: int) -> str:
    """The file that says that shard ``number`` is whole."""
    return f"{_PREFIX}{number:05d}{_SUFFIX}"


def is_record(name: str) -> bool:
    """Whether a file of a run is such a record."""
    return name.startswith(_PREFIX) and name.endswith(_SUFFIX)


def record_number(name: str) -> int:
    """The shard that the record ``name`` is of."""
    return int(name.removeprefix(_PREFIX).removesuffix(_SUFFIX))


@dataclass(frozen=True, eq=False)
class ShardRecord:
    """A shard's entry in the manifest, sums over its rows, the prompts that were cut, and how many tokens ran.

    One whose file is not sealed yet has no hash in its entry; ``boot`` is the machine's boot that it was written in.
    """

    number: int
    entry: ShardEntry
    sums: RowSums
    truncated: tuple[Mapping[str, int], ...]
    n_tokens: int
    tokenizer_limits: Mapping[str, Any]
    boot: str = ""

    @property
    def is_sealed(self) -> bool:
        """Whether its file is as it will lie at the place, and hashed."""
        return bool(self.entry.sha256)

    def to_bytes(self) -> bytes:
        """As a safetensors file."""
        sums = self.sums
        said: dict[str, Any] = {
            "number": self.number,
            "entry": shard_object(self.entry),
            "truncated": [dict(each) for each in self.truncated],
            "n_tokens": self.n_tokens,
            "tokenizer_limits": dict(self.tokenizer_limits),
        }
        if self.boot:
            said["boot"] = self.boot
        tensors = {"count": np.array([sums.count], np.int64), "mean": sums.mean, "squares": sums.squares}
        return tensor_bytes({**tensors, "norms": sums.norms}, {"record": json.dumps(said, separators=(",", ":"))})


def read_record(raw: bytes, name: str) -> ShardRecord:
    """The record that ``raw`` holds.

    Raises:
        HarvestDamaged: it holds none.
    """
    try:
        tensors, metadata = read_tensors(raw, name)
        said: dict[str, Any] = json.loads(metadata["record"])
        sums = RowSums(int(tensors["count"][0]), tensors["mean"], tensors["squares"], tensors["norms"])
        entry = shard_entry(said["entry"])
        return ShardRecord(
            int(said["number"]),
            entry,
            sums,
            tuple(said["truncated"]),
            int(said["n_tokens"]),
            dict(said["tokenizer_limits"]),
            str(said.get("boot", "")),
        )
    except (InvalidInput, KeyError, TypeError, ValueError) as error:
        raise HarvestDamaged(
            f"{name} does not say what it should of a shard; remove it, and the shard is run again."
        ) from error
