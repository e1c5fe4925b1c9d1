"""Prompts to shards, as token ids: pure, in the caller's order, and never more than a shard of them at a time.

::

    prompts ─► read_prompts (token ids, cut to the context) ─► plan_shards (numbers, sizes, digests) ─► run
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from streamtap.engines.tokenizing import PromptTokenizer
from streamtap.fingerprint import tokens_digest
from streamtap.harvested.segments import Segments as Segments
from streamtap.spec import CaptureSpec, Prompt, PromptLike

TokenIds = NDArray[np.int32]
#: Prompts that are tokenised in one go.
_AT_ONCE = 512


@dataclass(frozen=True, eq=False)
class Tokenised:
    """One prompt as it will run; ``cut_from`` is its length before it was cut to the context, 0 if it was not."""

    token_ids: TokenIds
    cut_from: int = 0
    segments: Segments | None = None


@dataclass(frozen=True, eq=False)
class ShardPlan:
    """Prompts [first, first + len(prompts)) of the whole list, which go into one file."""

    number: int
    first: int
    prompts: tuple[Tokenised, ...]

    @property
    def indices(self) -> range:
        """The prompts' places in the whole list."""
        return range(self.first, self.first + len(self.prompts))

    @property
    def n_tokens(self) -> int:
        """Tokens of all its prompts."""
        return sum(len(each.token_ids) for each in self.prompts)

    @cached_property
    def digest(self) -> str:
        """What its prompts are, as hex: a finished shard is taken for this one where both are equal."""
        state = hashlib.blake2b(digest_size=16)
        for each in self.prompts:
            state.update(tokens_digest(each.token_ids))
            state.update(each.cut_from.to_bytes(8, "little"))
            if each.segments is not None:
                parts = (each.segments.documents, each.segments.offsets, each.segments.starts)
                state.update(b"".join(part.tobytes() for part in parts))
        return state.hexdigest()


def read_prompts(
    prompts: Iterable[PromptLike], tokenizer: PromptTokenizer, *, add_special_tokens: bool = True
) -> Iterator[Tokenised]:
    """Token ids of each prompt, in order; what is longer than the context loses its end.

    Raises:
        InvalidPrompt: one cannot be run; its index is named.
    """
    stream = enumerate(prompts)
    spec = CaptureSpec(truncate="right")
    while batch := list(islice(stream, _AT_ONCE)):
        read = [Prompt.of(value, index) for index, value in batch]
        for each in tokenizer.encode(read, spec, batch[0][0], special_tokens=add_special_tokens):
            yield Tokenised(each.token_ids, each.cut_from)


def plan_shards(prompts: Iterable[Tokenised], shard_size: int) -> Iterator[ShardPlan]:
    """Shards of ``shard_size`` prompts, the last with what is left."""
    stream = iter(prompts)
    first = number = 0
    while members := tuple(islice(stream, shard_size)):
        yield ShardPlan(number, first, members)
        first, number = first + len(members), number + 1
