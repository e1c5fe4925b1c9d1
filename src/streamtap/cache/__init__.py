"""The local store: append-only part files, layer after layer in pieces, and an SQLite index that is the truth.

It knows rows, channels and prompts' digests, and nothing of models or of what a layer means.
"""

from __future__ import annotations

from streamtap.cache.background import BackgroundWriter
from streamtap.cache.layout import Channel
from streamtap.cache.store import CacheStore
from streamtap.cache.values import (
    AllRows,
    PartView,
    PromptKey,
    Rows,
    SetAside,
    SetInfo,
    VerifyReport,
)
from streamtap.cache.writer import PartWriter

__all__ = [
    "AllRows",
    "BackgroundWriter",
    "CacheStore",
    "Channel",
    "PartView",
    "PartWriter",
    "PromptKey",
    "Rows",
    "SetAside",
    "SetInfo",
    "VerifyReport",
]
