"""What is published, and the plan of where it will lie."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamtap.dataset.columns import PromptColumns
from streamtap.dataset.manifest import Hidden, Logits, Manifest
from streamtap.dataset.plan import Layout, check_files, plan_full, plan_pooled
from streamtap.errors import InvalidInput

Array = NDArray[Any]
Ints = NDArray[np.int64]

GIB = 1 << 30


@dataclass(frozen=True)
class HiddenRows:
    """Activations to publish.

    ``read(layer, start, stop)`` gives the rows of prompts [start, stop) as [rows, width], one a prompt, or where
    ``counts`` (int64 [prompts]) says how many each has, all of theirs; then ``pooling`` is None.
    """

    layers: tuple[int, ...]
    width: int
    dtype: np.dtype[Any]
    pooling: str | None
    read: Callable[[int, int, int], Array]
    counts: Ints | None = None


@dataclass(frozen=True)
class LogitRows:
    """Logits to publish: ``read(start, stop)`` gives values float32 and ids int32, [prompts, k] each."""

    k: int
    read: Callable[[int, int], tuple[Array, Array]]

    @property
    def row_bytes(self) -> int:
        """Bytes of a prompt's values and ids."""
        return self.k * 8


@dataclass(frozen=True)
class Contents:
    """All that is published, prompts in the dataset's order; ``content`` is the fingerprint that knows it again."""

    model: str
    commit: str | None
    n_prompts: int
    hidden: HiddenRows | None
    logits: LogitRows | None
    columns: PromptColumns
    content: str
    ordering: str = "given"
    provenance: Mapping[str, Any] = field(default_factory=dict)
    capture: Mapping[str, Any] = field(default_factory=dict)
    description: str | None = None
    license: str = "cc-by-4.0"


@dataclass(frozen=True)
class Plan:
    """Where everything will lie."""

    hidden: Layout | None
    logits: Layout | None


def make_plan(contents: Contents, shard_max_bytes: int = GIB) -> Plan:
    """Work out the shards.

    Raises:
        InvalidInput: nothing to publish, or shards of a size that cannot be.
    """
    rows = contents.hidden
    if contents.n_prompts == 0 or (rows is None and contents.logits is None):
        raise InvalidInput("there is nothing to publish: no prompt has rows of what was asked for.")
    if (
        rows is not None
        and rows.counts is not None
        and (len(rows.counts) != contents.n_prompts or rows.counts.min() < 1)
    ):
        raise InvalidInput("every prompt must have at least one row where each of its tokens has one.")
    plan = _plan(contents, shard_max_bytes)
    check_files(
        lambda size: _n_files(contents, plan if size == shard_max_bytes else _plan(contents, size)), shard_max_bytes
    )
    return plan


def describe(contents: Contents, plan: Plan) -> Manifest:
    """The manifest, without sizes and hashes."""
    rows, hidden = contents.hidden, None
    if rows is not None and plan.hidden is not None:
        hidden = Hidden(
            rows.layers, rows.width, rows.dtype.name, rows.pooling, plan.hidden.shards, plan.hidden.last_token_shards
        )
    logits = None
    if contents.logits is not None and plan.logits is not None:
        logits = Logits(contents.logits.k, "float32", plan.logits.shards)
    return Manifest(
        model=contents.model,
        commit=contents.commit,
        n_prompts=contents.n_prompts,
        hidden=hidden,
        logits=logits,
        ordering=contents.ordering,
        provenance=contents.provenance,
        capture=contents.capture,
        content=contents.content,
    )


def packed_bytes(contents: Contents, plan: Plan) -> int:
    """Bytes of all tensors, which is what ``advance`` will have been told in the end."""
    total = 0
    if contents.hidden is not None and plan.hidden is not None:
        rows = sum(shard.rows for shard in plan.hidden.shards)
        total += rows * contents.hidden.width * contents.hidden.dtype.itemsize * len(contents.hidden.layers)
    return total + (contents.n_prompts * contents.logits.row_bytes if contents.logits else 0)


def _plan(contents: Contents, shard_max_bytes: int) -> Plan:
    hidden, rows, logits = None, contents.hidden, None
    if rows is not None:
        row_bytes = rows.width * rows.dtype.itemsize
        if rows.counts is None:
            hidden = plan_pooled(contents.n_prompts, row_bytes, shard_max_bytes)
        else:
            hidden = plan_full(rows.counts, row_bytes, shard_max_bytes)
    if contents.logits is not None:
        logits = plan_pooled(contents.n_prompts, contents.logits.row_bytes, shard_max_bytes)
    return Plan(hidden, logits)


def _n_files(contents: Contents, plan: Plan) -> int:
    hidden = len(plan.hidden.shards) * len(contents.hidden.layers) if plan.hidden and contents.hidden else 0
    return hidden + (len(plan.logits.shards) if plan.logits else 0)
