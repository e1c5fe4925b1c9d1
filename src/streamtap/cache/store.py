"""The local store of activations: what a program sees of it."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from streamtap.cache import entries, space
from streamtap.cache.damage import set_lost_aside
from streamtap.cache.index import Index
from streamtap.cache.layout import Channel
from streamtap.cache.partfile import map_chunks
from streamtap.cache.parts import FOLDER, part_path, sync_folder
from streamtap.cache.prompts import add_texts, check_digests, find_texts, find_tokens
from streamtap.cache.reader import place_channel, read_channel, read_rows
from streamtap.cache.sets import list_sets
from streamtap.cache.values import AllRows, PartView, PromptKey, Rows, SetInfo, VerifyReport
from streamtap.cache.verify import Progress, verify
from streamtap.cache.writer import PartWriter
from streamtap.errors import InvalidInput
from streamtap.fingerprint import fingerprint

PART_BYTES = 8 << 30


class CacheStore:
    """One cache folder; threads may share a store, and processes may open one folder at once.

    Args:
        root: The folder; it is made when it is not there.
        busy_seconds: How long to wait for another process before ``CacheBusy``.
        part_bytes: A part file of this length takes no more rows.

    Raises:
        CacheBusy: others held the index for too long.
        CacheDamaged: the index is no SQLite database.
        Unsupported: a newer Streamtap wrote it.
    """

    def __init__(self, root: Path | str, *, busy_seconds: float = 60.0, part_bytes: int = PART_BYTES) -> None:
        self.root = Path(root)
        self._part_bytes = part_bytes
        (self.root / FOLDER).mkdir(parents=True, exist_ok=True)
        self._index = Index(self.root / space.INDEX_FILE, busy_seconds=busy_seconds)
        sync_folder(self.root)

    def __enter__(self) -> Self:
        """Enter the block at whose end the store is closed."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the store."""
        self.close()

    def close(self) -> None:
        """Close the index; writers of this store must be closed before."""
        self._index.close()

    def remember(self, key: str, value: Mapping[str, Any]) -> None:
        """Keep a small JSON value under ``key``, in place of what was there."""
        with self._index.writing() as db:
            db.execute("INSERT OR REPLACE INTO memo VALUES (?, ?)", (key, json.dumps(dict(value))))

    def recall(self, key: str) -> dict[str, Any] | None:
        """The value last kept under ``key``, or None."""
        with self._index.reading() as db:
            row = db.execute("SELECT value FROM memo WHERE key = ?", (key,)).fetchone()
        return None if row is None else dict(json.loads(row[0]))

    def remember_texts(
        self, context: bytes, texts: Sequence[bytes], keys: Sequence[PromptKey], notes: Sequence[int]
    ) -> None:
        """Keep which prompt each text became.

        Args:
            context: 16-byte digest of the tokenizer and all that changes what it makes of a text.
            texts: 16-byte digests of the texts.
            keys: The prompt that each became.
            notes: The token count before truncation where it was truncated, else 0.

        Raises:
            InvalidInput: lists of different lengths, or digests that are not 16 bytes.
        """
        if not len(texts) == len(keys) == len(notes):
            raise InvalidInput(f"one key and note a text; got {len(texts)}, {len(keys)} and {len(notes)}.")
        check_digests([context, *texts], "context and texts")
        check_digests([key.digest for key in keys], "the keys' digests")
        with self._index.writing() as db:
            add_texts(db, context, texts, keys, notes)

    def recall_texts(self, context: bytes, texts: Sequence[bytes]) -> list[tuple[bytes, int] | None]:
        """Prompt digest and note of each text under ``context``, or None, in the order asked."""
        with self._index.reading() as db:
            return find_texts(db, context, texts)

    def token_ids(self, digests: Sequence[bytes]) -> list[NDArray[np.int32]]:
        """Every token of each prompt, int32 [tokens], in the order asked.

        Raises:
            NotCached: a prompt that this cache does not know.
        """
        with self._index.reading() as db:
            return [token_ids for token_ids, _ in find_tokens(db, digests)]

    def own_positions(self, digests: Sequence[bytes]) -> list[NDArray[np.int32] | None]:
        """The positions that each prompt chose itself, int32 [chosen], or None, in the order asked.

        Raises:
            NotCached: a prompt that this cache does not know.
        """
        with self._index.reading() as db:
            return [positions for _, positions in find_tokens(db, digests)]

    def find_set(self, identity: Mapping[str, Any]) -> int | None:
        """Number of the set with exactly this identity, or None."""
        with self._index.reading() as db:
            row = db.execute("SELECT id FROM sets WHERE key = ?", (fingerprint(identity),)).fetchone()
        return None if row is None else int(row[0])

    def ensure_set(self, identity: Mapping[str, Any], provenance: Mapping[str, Any]) -> int:
        """Number of the set with exactly this identity, made with ``provenance`` when it is not there."""
        found = self.find_set(identity)
        if found is not None:
            return found
        values = (fingerprint(identity), json.dumps(dict(identity)), json.dumps(dict(provenance)), time.time())
        with self._index.writing() as db:
            db.execute("INSERT OR IGNORE INTO sets (key, identity, provenance, created) VALUES (?, ?, ?, ?)", values)
            return int(db.execute("SELECT id FROM sets WHERE key = ?", values[:1]).fetchone()[0])

    def sets(self) -> list[SetInfo]:
        """Every set with what it holds, oldest first."""
        with self._index.reading() as db:
            return list_sets(db, self.root)

    def missing(
        self, set_id: int, digests: Sequence[bytes], channels: Sequence[str]
    ) -> dict[tuple[str, ...], list[int]]:
        """Places in ``digests`` that lack channels, grouped by those they lack; empty when all is there.

        Rows whose part file is gone or cut short are set aside, and so are missing.
        """
        set_lost_aside(self._index, self.root, set_id)
        with self._index.reading() as db:
            return entries.missing(db, set_id, digests, channels)

    def writer(self, set_id: int, channels: Sequence[Channel]) -> PartWriter:
        """A writer that holds a part file of exactly these channels for itself.

        Raises:
            InvalidInput: no such set, or it holds a channel in another dtype or width.
        """
        return PartWriter(self._index, self.root, set_id, channels, self._part_bytes)

    def read(self, set_id: int, digests: Sequence[bytes], channel: str) -> Rows:
        """Rows of prompts at a channel, checked, in the order asked; a prompt may be asked for twice.

        Raises:
            NotCached: prompts without these rows; counted, and named by their indices.
            RowsDamaged: rows that do not match their checksums; they are set aside, and ``places`` names them.
        """
        return read_rows(self._index, self.root, set_id, digests, channel)

    def read_all(self, set_id: int, channel: str) -> AllRows:
        """Every prompt of a set at a channel as one array in storage order, checked.

        Raises:
            NotCached: no prompt has the channel.
            RowsDamaged: as for ``read``; ``places`` count in storage order.
        """
        return read_channel(self._index, self.root, set_id, channel)

    def view(self, set_id: int, channel: str) -> list[PartView]:
        """A channel as memory maps, one a part file that has rows: nothing is copied, nothing is checked.

        Rows whose part file is gone or cut short are set aside first.

        Raises:
            NotCached: no prompt has the channel.
        """
        set_lost_aside(self._index, self.root, set_id)
        views = []
        for each in place_channel(self._index, set_id, channel):
            if not each.n_rows.any():
                continue
            with part_path(self.root, each.part.id).open("rb") as file:
                chunks = map_chunks(file, each.part.layout)
            views.append(PartView(chunks[channel], each.digests, each.first_rows, each.n_rows))
        return views

    def verify(self, progress: Progress | None = None) -> VerifyReport:
        """Read everything, set aside what does not match, and report it.

        ``progress(done_bytes, total_bytes)`` is called as it goes. Memory does not depend on the cache's size.
        """
        return verify(self._index, self.root, progress)

    def clear(self, set_ids: Sequence[int] | None = None) -> int:
        """Remove sets, or everything, and say how many bytes came free. Only files of ours are removed.

        Raises:
            InvalidInput: a set that is not there.
            CacheBusy: a set that is being written to.
        """
        return space.clear(self._index, self.root, set_ids)

    def size_bytes(self) -> int:
        """What the cache occupies on the disk."""
        return space.size_bytes(self.root)

    def require_space(self, estimated_bytes: int) -> None:
        """Refuse a run that would not fit on the disk.

        Raises:
            NotEnoughSpace: with both figures.
        """
        space.require_space(self.root, estimated_bytes)
