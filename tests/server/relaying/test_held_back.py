"""An answer is held back until it is whole, and what is large of it lies on the disk."""

from __future__ import annotations

import asyncio
import os
import time
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import Any

import pytest

from streamtap.errors import CaptureMissed
from streamtap.server.relaying.held_back import held_back

PIECE = bytes(range(256)) * 256


class _Pieces:
    """Some of them, and then an error where one is wanted; ``made`` counts them."""

    def __init__(self, count: int, error: Exception | None = None) -> None:
        self.count, self.error, self.made = count, error, 0

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for _ in range(self.count):
            self.made += 1
            yield PIECE
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize("count", [0, 1, 200])
def test_what_comes_out_is_what_went_in_and_not_before_all_of_it(count: int, tmp_path: Path) -> None:
    async def main() -> None:
        pieces, out = _Pieces(count), bytearray()
        async for piece in held_back(aiter(pieces), tmp_path):
            assert pieces.made == count
            out += piece
        assert out == PIECE * count

    asyncio.run(main())
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("count", [1, 200])
def test_nothing_comes_out_before_an_error(count: int, tmp_path: Path) -> None:
    async def main() -> None:
        pieces = aiter(_Pieces(count, CaptureMissed("no", layer=3)))
        with pytest.raises(CaptureMissed):
            await anext(held_back(pieces, tmp_path))

    asyncio.run(main())


def test_a_large_answer_is_never_held_in_memory_and_leaves_no_file(tmp_path: Path) -> None:
    async def main() -> None:
        tracemalloc.start()
        try:
            size = 0
            async with aclosing(held_back(aiter(_Pieces(1000)), tmp_path)) as held:
                async for piece in held:
                    size += len(piece)
            assert size == 1000 * len(PIECE)
            assert tracemalloc.get_traced_memory()[1] < 16_000_000
        finally:
            tracemalloc.stop()

    asyncio.run(main())
    assert os.listdir(tmp_path) == []


def test_the_file_of_who_leaves_early_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []

    def noted(*asked: Any, **told: Any) -> Any:
        opened.append(SpooledTemporaryFile(*asked, **told))  # noqa: SIM115 - closed by whom this looks at
        return opened[-1]

    monkeypatch.setattr("streamtap.server.relaying.held_back.SpooledTemporaryFile", noted)

    async def main() -> None:
        async with aclosing(held_back(aiter(_Pieces(200)), tmp_path)) as held:
            assert await anext(held)

    asyncio.run(main())
    until = time.monotonic() + 10
    # Its own thread closes it.
    while not opened[0].closed:
        assert time.monotonic() < until
        time.sleep(0.01)
