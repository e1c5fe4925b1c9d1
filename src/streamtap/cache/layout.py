"""How rows lie in a part file: equal chunks, each a numpy structured record.

A chunk holds C rows of every channel, one channel after the other, then the rows' token ids,
positions and checksums. Row r of the part is place r % C of chunk r // C. One file so takes
every layer of a batch (one sync makes it durable), while one layer of all prompts lies in
pieces of about 256 KB.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np

from streamtap.errors import InvalidInput

PIECE_BYTES = 1 << 18
# With C a multiple of 8 every piece of a chunk starts at a multiple of 8 bytes, whatever dtype and width.
ROWS_STEP = 8
TOKEN_IDS, POSITIONS, SUMS = "token_ids", "positions", "sums"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]*")
_KINDS = "fiu"
_BFLOAT16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True)
class Channel:
    """One named column of rows: ``dtype`` is a numpy name or ``"bfloat16"``, ``width`` values a row.

    Raises:
        InvalidInput: a name, dtype or width that cannot be stored.
    """

    name: str
    dtype: str
    width: int

    def __post_init__(self) -> None:
        """Check each value once, and write the dtype one way."""
        if not _NAME.fullmatch(self.name) or self.name in (TOKEN_IDS, POSITIONS, SUMS):
            raise InvalidInput(
                f"a channel's name is letters, digits, '_', '.', ':' or '-', and none of {TOKEN_IDS!r}, "
                f"{POSITIONS!r}, {SUMS!r}; got {self.name!r}."
            )
        if self.width < 1:
            raise InvalidInput(f"channel {self.name!r} needs a width of at least 1; got {self.width}.")
        object.__setattr__(self, "dtype", stored_dtype(self.dtype).name)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.width * int(stored_dtype(self.dtype).itemsize)


def stored_dtype(name: str) -> np.dtype[Any]:
    """The little-endian numpy dtype of a channel's dtype name.

    Raises:
        InvalidInput: no dtype, or one that rows cannot have.
    """
    if name == "bfloat16":
        return _BFLOAT16
    try:
        dtype = np.dtype(name)
    except TypeError:
        dtype = np.dtype(object)
    if dtype.kind not in _KINDS or dtype.itemsize > 8:
        raise InvalidInput(f"a channel's dtype is a float or integer of at most 8 bytes or 'bfloat16'; got {name!r}.")
    return np.dtype(dtype.str.replace(">", "<"))


@dataclass(frozen=True)
class Segment:
    """Rows ``start:stop`` of a run, which lie together in one chunk from ``place`` on."""

    chunk: int
    place: int
    start: int
    stop: int


@dataclass(frozen=True)
class ChunkLayout:
    """The channels of a part and how many rows a chunk holds."""

    channels: tuple[Channel, ...]
    rows_per_chunk: int

    @classmethod
    def of(cls, channels: Sequence[Channel]) -> ChunkLayout:
        """The layout that gives the widest channel pieces of about 256 KB.

        Raises:
            InvalidInput: no channel, or one name twice.
        """
        names = [channel.name for channel in channels]
        if not names or len(set(names)) < len(names):
            raise InvalidInput(f"a part needs at least one channel and each name once; got {names}.")
        rows = PIECE_BYTES // max(channel.row_bytes for channel in channels)
        return cls(tuple(channels), max(ROWS_STEP, rows // ROWS_STEP * ROWS_STEP))

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """One chunk as a numpy structured dtype."""
        c = self.rows_per_chunk
        fields: list[Any] = [(each.name, stored_dtype(each.dtype), (c, each.width)) for each in self.channels]
        fields += [(TOKEN_IDS, "<i4", (c,)), (POSITIONS, "<i4", (c,)), (SUMS, "<u8", (len(self.channels) + 1, c))]
        return np.dtype(fields)

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Where each field starts in a chunk, in bytes."""
        return {name: int(field[1]) for name, field in (self.dtype.fields or {}).items()}

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one chunk."""
        return self.dtype.itemsize

    def names(self) -> frozenset[str]:
        """The channels' names."""
        return frozenset(channel.name for channel in self.channels)

    def channel(self, name: str) -> Channel:
        """The channel of that name."""
        return self.channels[self._number(name)]

    def sums_row(self, name: str) -> int:
        """Which row of ``sums`` is a channel's; that of token ids and positions, ``"token_ids"``, is the first."""
        return 0 if name == TOKEN_IDS else 1 + self._number(name)

    def sums_offset(self, name: str) -> int:
        """Where the checksums of a channel, or of ``"token_ids"`` and positions, start in a chunk."""
        return self.offsets[SUMS] + self.sums_row(name) * self.rows_per_chunk * 8

    def size_bytes(self, rows: int) -> int:
        """Length of a file that holds ``rows`` rows: whole chunks."""
        return -(-rows // self.rows_per_chunk) * self.chunk_bytes

    def segments(self, first_row: int, n_rows: int) -> Iterator[Segment]:
        """The run of ``n_rows`` from ``first_row`` on, cut where chunks end."""
        done = 0
        while done < n_rows:
            chunk, place = divmod(first_row + done, self.rows_per_chunk)
            stop = min(n_rows, done + self.rows_per_chunk - place)
            yield Segment(chunk, place, done, stop)
            done = stop

    def to_json(self) -> str:
        """The layout as text; ``numpy`` is the dtype for plain numpy, with bfloat16 as ``<u2``."""
        plain = [[name, *_plain(self.dtype[name])] for name in self.dtype.names or ()]
        channels = [[each.name, each.dtype, each.width] for each in self.channels]
        return json.dumps({"rows_per_chunk": self.rows_per_chunk, "channels": channels, "numpy": plain})

    @classmethod
    def from_json(cls, text: str) -> ChunkLayout:
        """Read what ``to_json`` wrote."""
        value = json.loads(text)
        return cls(tuple(Channel(*each) for each in value["channels"]), int(value["rows_per_chunk"]))

    def _number(self, name: str) -> int:
        return next(i for i, channel in enumerate(self.channels) if channel.name == name)


def _plain(field: np.dtype[Any]) -> tuple[str, list[int]]:
    base = "<u2" if field.base.name == "bfloat16" else field.base.str
    return base, list(field.shape)
