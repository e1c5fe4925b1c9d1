"""What these tests stand on: small contents, and places that count and fail."""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

from streamtap.dataset.columns import PromptColumns, label_column, metadata_columns
from streamtap.dataset.contents import Contents, HiddenRows, LogitRows
from streamtap.dataset.folder import FolderSource
from streamtap.dataset.names import CARD, INDEX
from streamtap.dataset.places import Advance, Found, no_advance
from streamtap.errors import TransferFailed
from streamtap.ragged import offsets_of

_numbers = itertools.count()


DTYPES = {"float16": np.float16, "float32": np.float32, "bfloat16": ml_dtypes.bfloat16}


@dataclass
class Made:
    """Contents to publish and the rows in them: ``rows[layer]`` is [rows, width], ``offsets`` [prompts + 1]."""

    contents: Contents
    rows: dict[int, NDArray[Any]]
    offsets: NDArray[np.int64]
    logits: tuple[NDArray[Any], NDArray[Any]]


def _make(
    n_prompts: int = 5,
    *,
    counts: Sequence[int] | None = None,
    layers: Sequence[int] = (0, 3),
    width: int = 4,
    dtype: str = "float32",
    k: int = 0,
    labels: Sequence[Any] | None = None,
    metadata: Sequence[Mapping[str, Any]] | None = None,
    seed: int = 0,
    **more: Any,
) -> Made:
    """Random contents, one row a prompt, or ``counts`` rows."""
    random = np.random.default_rng(seed)
    n_prompts = n_prompts if counts is None else len(counts)
    offsets = offsets_of(np.ones(n_prompts, np.int64) if counts is None else np.asarray(counts, np.int64))
    shape = (int(offsets[-1]), width)
    rows = {layer: random.standard_normal(shape).astype(DTYPES[dtype]) for layer in layers}
    logits = random.standard_normal((n_prompts, k)).astype(np.float32), random.integers(0, 9, (n_prompts, k), np.int32)
    hidden = HiddenRows(
        tuple(layers),
        width,
        np.dtype(DTYPES[dtype]),
        "last_token" if counts is None else None,
        lambda layer, start, stop: rows[layer][offsets[start] : offsets[stop]],
        None if counts is None else np.asarray(counts, np.int64),
    )
    columns = PromptColumns(
        texts=[f"prompt {number}" for number in range(n_prompts)],
        labels=label_column(labels, n_prompts),
        metadata=metadata_columns(metadata, n_prompts),
        num_tokens=np.diff(offsets),
        pushed_index=np.arange(n_prompts, dtype=np.int64),
        **more,
    )
    contents = Contents(
        model="someone/a-model",
        commit="c0ffee",
        n_prompts=n_prompts,
        hidden=hidden if layers else None,
        logits=LogitRows(k, lambda start, stop: (logits[0][start:stop], logits[1][start:stop])) if k else None,
        columns=columns,
        content=f"content {seed} {n_prompts} {layers} {counts} {dtype} {k}",
    )
    return Made(contents, rows, offsets, logits)


@pytest.fixture(scope="session")
def make() -> Callable[..., Made]:
    """Makes small contents."""
    return _make


class CountedSource:
    """A folder as if it lay behind a network: a file is on this machine once it was fetched, and bytes are counted."""

    version: None = None

    def __init__(self, folder: Path, local: Path) -> None:
        self.name = "user/set"
        self._folder, self._local = FolderSource(folder), local
        self.fetched: list[str] = []
        self.ranges: list[tuple[str, int, int]] = []

    @property
    def range_bytes(self) -> int:
        return sum(stop - start for _, start, stop in self.ranges)

    def on_disk(self, path: str) -> Path | None:
        return self._local / path if (self._local / path).is_file() else None

    def size_bytes(self, path: str) -> int:
        return self._folder.size_bytes(path)

    def fetch(self, path: str, *, again: bool = False, advance: Advance = no_advance) -> Path:
        if again or self.on_disk(path) is None:
            content = self._folder.fetch(path).read_bytes()
            (self._local / path).parent.mkdir(parents=True, exist_ok=True)
            (self._local / path).write_bytes(content)
            self.fetched.append(path)
            advance(len(content))
        return self._local / path

    def read_range(self, path: str, start: int, stop: int) -> bytes:
        data = self._folder.read_range(path, start, stop)
        self.ranges.append((path, start, start + len(data)))
        return data

    def read_tail(self, path: str, n_bytes: int) -> tuple[bytes, int]:
        data, size = self._folder.read_tail(path, n_bytes)
        self.ranges.append((path, size - len(data), size))
        return data, size


@pytest.fixture
def remote(tmp_path: Path) -> Callable[[Path], CountedSource]:
    """Puts a folder behind a network that counts."""
    return lambda folder: CountedSource(folder, tmp_path / f"local-{next(_numbers)}")


@dataclass
class RecordingTarget:
    """A place that one push at a time goes to; call ``fail_at`` of put and publish fails, and what was sent stays."""

    place: Path
    fail_at: int = -1
    seconds: float = 0
    name: str = "user/set"
    is_local: bool = False
    sums: Mapping[str, str] = field(default_factory=dict)
    url: str = "https://hub.example/datasets/user/set"
    calls: list[str] = field(default_factory=list)
    most_files: int = 0
    closed: bool = False

    def __post_init__(self) -> None:
        self.rooms = self.place.with_name(f"rooms-{next(_numbers)}")
        self.sent = self.place.with_name("sent")

    def look(self) -> Found | None:
        if not self.place.exists():
            return None
        files = [file for file in self.place.rglob("*") if file.is_file()]
        sizes = {file.relative_to(self.place).as_posix(): file.stat().st_size for file in files}
        return Found(sizes, sums=self.sums)

    def source(self) -> FolderSource:
        return FolderSource(self.place)

    def room(self, path: str) -> Path:
        file = self.rooms / path
        file.parent.mkdir(parents=True, exist_ok=True)
        self._count()
        return file

    def put(self, path: str, file: Path, *, advance: Advance = no_advance) -> None:
        self._call(f"put {path}")
        self._count()
        time.sleep(self.seconds)
        (self.sent / path).parent.mkdir(parents=True, exist_ok=True)
        advance(file.stat().st_size)
        shutil.move(file, self.sent / path)

    def publish(self, files: Mapping[str, Path], stale: Sequence[str], message: str) -> str:
        self._call("publish")
        for path in stale:
            (self.place / path).unlink()
        shutil.copytree(self.sent, self.place, dirs_exist_ok=True)
        for path, file in files.items():
            (self.place / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, self.place / path)
        return self.url

    def close(self) -> None:
        self.closed = True
        shutil.rmtree(self.rooms, ignore_errors=True)

    def _call(self, what: str) -> None:
        self.calls.append(what)
        if len(self.calls) - 1 == self.fail_at:
            raise TransferFailed(f"{what} failed")

    def _count(self) -> None:
        self.most_files = max(self.most_files, sum(1 for _ in self.rooms.rglob("*.safetensors")))


@pytest.fixture
def recording(tmp_path: Path) -> Callable[..., RecordingTarget]:
    """Makes targets of one place, each for one push."""
    return lambda **how: RecordingTarget(tmp_path / "place", **how)


@pytest.fixture
def no_thread_left() -> Iterator[None]:
    """At the end there are the threads that there were."""
    before = set(threading.enumerate())
    yield
    assert [thread for thread in threading.enumerate() if thread not in before] == []


@pytest.fixture(scope="session")
def samples() -> Path:
    """Datasets that another library wrote, with the values that must be read from them."""
    return Path(__file__).parent / "samples"


@pytest.fixture(scope="session")
def check_files() -> Callable[[Path], dict[str, Any]]:
    """Compares a folder with our part of its manifest, which it gives."""
    return _check_files


def _check_files(folder: Path) -> dict[str, Any]:
    """Sizes and hashes are those of the files, and nothing else is there."""
    ours: dict[str, Any] = json.loads(pq.read_schema(folder / INDEX).metadata[b"streamtap:manifest"])
    found = {file.relative_to(folder).as_posix(): file for file in folder.rglob("*") if file.is_file()}
    assert set(found) == {INDEX, CARD, *ours["files"]}
    for path, (size, sha256) in ours["files"].items():
        content = found[path].read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (size, sha256)
    return ours
