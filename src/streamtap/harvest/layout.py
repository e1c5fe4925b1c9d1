"""Which tensors a shard's file holds, and which of a prompt's tokens have a row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from streamtap.engines.tokenizing import PromptTokenizer, Tokens
from streamtap.harvest.asked import HarvestAsk
from streamtap.harvest.plan import ShardPlan
from streamtap.pooling import ONE_TOKEN

_DTYPES: dict[str, np.dtype[Any]] = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32)}


@dataclass(frozen=True, eq=False)
class ShardLayout:
    """A shard as a file: ``layers`` ascending, ``width`` of a row; ``positions`` of each prompt's rows, int32.

    ``tokenizer_limits`` is as in ``HarvestManifest``.

    Raises:
        InvalidPositions: a prompt lacks a position that was asked for; its index is named.
    """

    plan: ShardPlan
    ask: HarvestAsk
    layers: tuple[int, ...]
    width: int
    positions: tuple[NDArray[np.int32], ...]
    tokenizer_limits: Mapping[str, Any]

    @classmethod
    def of(
        cls, plan: ShardPlan, ask: HarvestAsk, layers: tuple[int, ...], hidden: int, tokenizer: PromptTokenizer
    ) -> ShardLayout:
        """The layout of ``plan`` for a model of that width."""
        spec = ask.spec(0)
        chosen = (
            tokenizer.choose(Tokens(each.token_ids), spec, index)
            for index, each in zip(plan.indices, plan.prompts, strict=True)
        )
        width = hidden if ask.projection is None else len(ask.projection.directions)
        return cls(plan, ask, layers, width, tuple(_rows_of(each, ask) for each in chosen), _limits(tokenizer))

    @property
    def row_dtype(self) -> np.dtype[Any]:
        """Of the rows."""
        return _DTYPES[self.ask.row_dtype]

    @property
    def has_positions(self) -> bool:
        """Whether the file says which tokens have a row."""
        return self.ask.pooling in ONE_TOKEN or (self.ask.pooling == "none" and self.ask.positions != "all")

    def shapes(self) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]]:
        """Name to dtype and shape of every tensor, in the order of the prompts."""
        found: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {}
        for index, positions in zip(self.plan.indices, self.positions, strict=True):
            found[f"prompt_{index}"] = (self.row_dtype, (len(self.layers), len(positions), self.width))
        for name, values in self.numbers():
            found[name] = (values.dtype, values.shape)
        return found

    def numbers(self) -> Iterator[tuple[str, NDArray[Any]]]:
        """The tensors that are known before anything runs."""
        for index, each, positions in zip(self.plan.indices, self.plan.prompts, self.positions, strict=True):
            yield f"tokens_{index}", each.token_ids
            if self.has_positions:
                yield f"positions_{index}", positions
            if each.segments is not None:
                yield f"documents_{index}", each.segments.documents
                yield f"offsets_{index}", each.segments.offsets
                yield f"starts_{index}", each.segments.starts


def _limits(tokenizer: PromptTokenizer) -> dict[str, Any]:
    """What tokenising depends on beside the tokenizer's files."""
    return {
        "context_length": tokenizer.context_length,
        "vocabulary": tokenizer.vocabulary,
        "special_ids": tokenizer.special_ids.tolist(),
    }


def _rows_of(chosen: NDArray[np.int32], ask: HarvestAsk) -> NDArray[np.int32]:
    if ask.pooling == "none":
        return chosen
    if ask.pooling == "first_token":
        return chosen[:1]
    # Of a mean or a maximum it is the number of rows that counts: one.
    return chosen[-1:]
