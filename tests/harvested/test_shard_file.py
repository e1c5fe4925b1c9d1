"""Tensors are written in any order, in any number of parts, and the file is then a safetensors file."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors import safe_open

from streamtap.errors import InvalidInput, NotEnoughSpace
from streamtap.harvested.shard_file import ShardFile

BF16, F32, I32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32), np.dtype(np.int32)
SHAPES: dict[str, Any] = {"prompt_0": (BF16, (3, 700, 5)), "prompt_1": (BF16, (3, 1, 5)), "tokens_0": (I32, (700,))}


def values() -> dict[str, NDArray[Any]]:
    random = np.random.default_rng(0)
    return {name: np.asarray(random.integers(-9, 9, shape)).astype(dtype) for name, (dtype, shape) in SHAPES.items()}


@pytest.mark.parametrize("order", [["prompt_0", "prompt_1", "tokens_0"], ["tokens_0", "prompt_1", "prompt_0"]])
def test_any_order_gives_the_same_file(tmp_path: Path, order: list[str]) -> None:
    held, path = values(), tmp_path / "x"
    file = ShardFile(path, SHAPES)
    for name in order:
        # A layer at a time, as it comes from an engine; and not dense.
        file.put(name, list(np.asfortranarray(held[name])))
    file.finish()

    assert path.stat().st_size == file.size_bytes
    with safe_open(path, framework="np") as opened:
        for name, expected in held.items():
            assert opened.get_tensor(name).tobytes() == expected.tobytes()


def test_more_parts_than_one_call_takes(tmp_path: Path) -> None:
    held = values()["tokens_0"]
    file = ShardFile(tmp_path / "x", {"tokens_0": SHAPES["tokens_0"], "none": (F32, (0, 4))})
    file.put("tokens_0", [held[i : i + 1] for i in range(700)])
    file.put("none", [])
    file.finish()

    assert (tmp_path / "x").read_bytes().endswith(held.tobytes())


@pytest.mark.parametrize(
    "parts",
    [
        [np.zeros((3, 2, 5), BF16)],
        [np.zeros((2, 1, 5), BF16)],
        [np.zeros((3, 1, 5), np.float16)],
        [np.zeros((1, 1, 5), F32), np.zeros((1, 1, 5), BF16)],
        [],
    ],
    ids=["rows", "layers", "dtype", "mixed", "nothing"],
)
def test_what_was_not_announced_is_refused(tmp_path: Path, parts: list[Any]) -> None:
    file = ShardFile(tmp_path / "x", SHAPES)
    with pytest.raises(InvalidInput, match=r"prompt_1 was announced as bfloat16 \[3, 1, 5\], once"):
        file.put("prompt_1", parts)
    file.put("prompt_1", [values()["prompt_1"]])
    with pytest.raises(InvalidInput, match="once"):
        file.put("prompt_1", [values()["prompt_1"]])
    with pytest.raises(InvalidInput, match="2 tensors of the shard did not come, prompt_0 first"):
        file.finish()


def test_a_disk_without_room_shows_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(os.listdir("/dev/fd"))

    def full(_fd: int, _start: int, _size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    with pytest.raises(NotEnoughSpace, match="cannot take a shard of .* free some space"):
        ShardFile(tmp_path / "x", SHAPES)
    assert len(os.listdir("/dev/fd")) == before


def test_a_disk_that_sets_no_room_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot(_fd: int, _start: int, _size: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "posix_fallocate", cannot, raising=False)
    file = ShardFile(tmp_path / "x", SHAPES)
    for name, held in values().items():
        file.put(name, [held])
    file.finish()

    assert (tmp_path / "x").stat().st_size == file.size_bytes


def test_a_file_that_is_closed_twice(tmp_path: Path) -> None:
    file = ShardFile(tmp_path / "x", {})
    file.finish()
    file.close()

    assert (tmp_path / "x").read_bytes() == b"\x08" + b"\0" * 7 + b"{}      "
