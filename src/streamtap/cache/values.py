"""What goes into the cache and what comes out of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamtap.cache.layout import Channel

Array = NDArray[Any]


@dataclass(frozen=True)
class PromptKey:
    """A prompt as the cache knows it.

    Args:
        digest: 16 bytes, made by ``streamtap.fingerprint.tokens_digest``.
        token_ids: int32 [tokens], every token of the prompt.
        positions: int32 [chosen], the positions that have rows where they are the prompt's own
            choice (a mask, one role's turns), else None.
    """

    digest: bytes
    token_ids: NDArray[np.int32]
    positions: NDArray[np.int32] | None = None


@dataclass(frozen=True)
class Rows:
    """Rows of several prompts at one channel, ragged.

    ``values`` is [rows, width] in the stored dtype. Prompt i owns rows
    ``offsets[i]:offsets[i + 1]``; ``offsets`` is int64 [prompts + 1]. ``token_ids`` and
    ``positions`` are int32 [rows].
    """

    values: Array
    offsets: NDArray[np.int64]
    token_ids: NDArray[np.int32]
    positions: NDArray[np.int32]


@dataclass(frozen=True)
class AllRows(Rows):
    """Every prompt of a set at one channel, in storage order; ``digests[i]`` names prompt i."""

    digests: tuple[bytes, ...]


@dataclass(frozen=True)
class PartView:
    """One channel of one part file, mapped and not copied or verified.

    ``values`` is read-only [chunks, rows_per_chunk, width]: row r lies at
    ``values[r // rows_per_chunk, r % rows_per_chunk]``. Prompt i (``digests[i]``) owns rows
    ``first_rows[i]`` to ``first_rows[i] + n_rows[i]``, both int64 [prompts]; what lies outside
    these is not part of the cache.
    """

    values: Array
    digests: tuple[bytes, ...]
    first_rows: NDArray[np.int64]
    n_rows: NDArray[np.int64]


@dataclass(frozen=True)
class SetInfo:
    """One set: rows that share an identity. ``created_seconds`` is Unix time, ``bytes`` what its files occupy."""

    id: int
    identity: Mapping[str, Any]
    provenance: Mapping[str, Any]
    created_seconds: float
    prompts: int
    rows: int
    channels: tuple[Channel, ...]
    bytes: int


@dataclass(frozen=True)
class SetAside:
    """One entry that was taken out of use, and why."""

    set_id: int
    digest: bytes
    part_id: int
    why: str


@dataclass(frozen=True)
class VerifyReport:
    """What a verification read (``read_bytes``) and what it set aside."""

    prompts: int
    rows: int
    read_bytes: int
    damaged: tuple[SetAside, ...]

    @property
    def sound(self) -> bool:
        """Whether every row matched its checksums."""
        return not self.damaged
