"""What reading a dataset costs, in bytes and requests that the local Hub counted."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from streamtap import UnifiedCache, fetch_dataset_metadata, load_activations, pull_dataset, push_dataset
from streamtap.dataset.columns import PromptColumns, label_column
from streamtap.dataset.contents import Contents, HiddenRows, describe, make_plan
from streamtap.dataset.folder import FolderTarget
from streamtap.dataset.names import INDEX, hidden_file
from streamtap.dataset.plan import MOST_FILES
from streamtap.dataset.writer import publish
from streamtap.errors import InvalidInput
from streamtap.testing import FakeEngine, HubServer, online_client

LAYERS, PROMPTS = 30, [f"prompt number {number}" for number in range(100)]
SMALL, LARGE, WORDY = "tester/thirty-layers", "tester/large-shard", "tester/large-index"
_ROOM = 16_000  # what the Hub says about a repository, and headers
_READ = """
import json, sys
from streamtap import UnifiedCache, load_activations
name, layer, prompts, cached = json.load(sys.stdin)
rows = load_activations(name, layers=[layer], prompts=prompts)[layer]
if cached:
    assert (UnifiedCache("fake", compute_perplexity=False).activations(prompts, layer=layer) == rows).all()
print(float(rows.astype("f8").sum()))
"""


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    with HubServer(tmp_path_factory.mktemp("hub")) as server:
        yield server


@pytest.fixture
def machine(tmp_path: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine that has read nothing yet, and a Hub that has counted nothing yet."""
    monkeypatch.setenv("STREAMTAP_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_TOKEN", hub.token)
    with online_client(hub.start()):
        hub.reset_counts()
        yield


@pytest.fixture(scope="module")
def small(hub: HubServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache behind a dataset of thirty layers."""
    folder = tmp_path_factory.mktemp("small")
    with UnifiedCache(FakeEngine(LAYERS, hidden=64), compute_perplexity=False, cache_dir=folder / "cache") as cache:
        cache.warmup(PROMPTS)
    push_dataset(folder / "set", "fake", PROMPTS, labels=[*range(100)], cache_dir=folder / "cache")
    hub.add(SMALL, folder / "set")
    return folder / "cache"


def contents_of(texts: list[str], rows: HiddenRows) -> Contents:
    columns = PromptColumns(
        texts=texts,
        labels=label_column(None, len(texts)),
        metadata={},
        num_tokens=np.ones(len(texts), np.int64),
        pushed_index=np.arange(len(texts)),
    )
    return Contents("someone/a-model", None, len(texts), rows, None, columns, content="some")


def add(hub: HubServer, repo_id: str, contents: Contents, folder: Path) -> None:
    publish(contents, FolderTarget(folder))
    hub.add(repo_id, folder)


def test_one_layer_of_thirty(hub: HubServer, small: Path, machine: None) -> None:
    files = hub.files(SMALL)
    tensors = sum(size for path, size in files.items() if path.startswith("tensors/"))
    rows = load_activations(SMALL, layers=[7], prompts=PROMPTS)[7]

    with UnifiedCache(FakeEngine(LAYERS, hidden=64), compute_perplexity=False, cache_dir=small) as cache:
        assert np.array_equal(rows, cache.activations(PROMPTS, layer=7))
    assert hub.bytes_out("/cdn/") <= tensors / LAYERS + files[INDEX]
    assert hub.bytes_out() <= tensors / LAYERS + files[INDEX] + _ROOM


def test_a_second_load_asks_nothing(hub: HubServer, small: Path, machine: None) -> None:
    first, labels = load_activations(SMALL, layers=[7], prompts=PROMPTS, return_labels=True)
    some = load_activations(SMALL, layers=[7, 9], prompts=PROMPTS[50:60])
    hub.reset_counts()
    hub.stop()

    again, labels_again = load_activations(SMALL, layers=[7], prompts=PROMPTS, return_labels=True)
    some_again = load_activations(SMALL, layers=[7, 9], prompts=PROMPTS[50:60])
    assert np.array_equal(first[7], again[7])
    assert labels_again.tolist() == labels.tolist() == [*range(100)]
    assert all(np.array_equal(some[layer], some_again[layer]) for layer in (7, 9))
    assert elsewhere(hub, SMALL, 7, PROMPTS) == pytest.approx(first[7].astype("f8").sum())
    assert hub.requests == []


def test_a_second_pull_asks_nothing(hub: HubServer, small: Path, machine: None) -> None:
    assert pull_dataset(SMALL, layers=[7]) == len(PROMPTS)
    assert hub.bytes_out("tensors/") == hub.files(SMALL)[hidden_file(7, 0)]
    hub.reset_counts()
    hub.stop()

    assert pull_dataset(SMALL, layers=[7]) == len(PROMPTS)
    rows = load_activations(SMALL, layers=[7], prompts=PROMPTS)[7]
    assert elsewhere(hub, SMALL, 7, PROMPTS, cached=True) == pytest.approx(rows.astype("f8").sum())
    assert hub.requests == []


def elsewhere(hub: HubServer, name: str, layer: int, prompts: list[str], *, cached: bool = False) -> float:
    """The sum of a layer in another process, which finds all on this machine; ``cached``: in the cache also."""
    given = json.dumps([name, layer, prompts, cached])
    # Not told to be offline: it is by itself that it asks for nothing.
    environment = {**os.environ, **hub.environment}
    command = [sys.executable, "-c", _READ]
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return float(done.stdout)


def test_ten_rows_of_a_large_shard(hub: HubServer, machine: None, tmp_path: Path) -> None:
    n_rows, hidden = 6400, 4096
    texts = [f"prompt {number}" for number in range(n_rows)]
    block = np.random.default_rng(0).standard_normal((64, hidden), np.float32)

    def read(layer: int, start: int, stop: int) -> np.ndarray:
        rows = block[np.arange(start, stop) % 64]
        rows[:, 0] = np.arange(start, stop)
        return rows

    add(hub, LARGE, contents_of(texts, HiddenRows((3,), hidden, np.dtype("f4"), "mean", read)), tmp_path / "set")
    wanted = [4001, 7, 6399, 12, 8, 900, 3500, 0, 5999, 2048]
    found = load_activations(LARGE, layers=[3], prompts=[texts[row] for row in wanted])[3]

    assert hub.files(LARGE)[hidden_file(3, 0)] > 100_000_000
    assert np.array_equal(found, np.concatenate([read(3, row, row + 1) for row in wanted]))
    assert hub.bytes_out() < 1_000_000
    hub.reset_counts()
    hub.stop()
    assert elsewhere(hub, LARGE, 3, [texts[row] for row in wanted]) == pytest.approx(found.astype("f8").sum())
    assert hub.requests == []


def test_metadata_of_a_large_index(hub: HubServer, machine: None, tmp_path: Path) -> None:
    n_prompts, text_bytes = 36_000, 3_900
    noise = base64.b64encode(np.random.default_rng(0).bytes(n_prompts * text_bytes * 3 // 4)).decode()
    texts = [noise[start : start + text_bytes] for start in range(0, len(noise), text_bytes)]
    rows = HiddenRows((0,), 2, np.dtype("f4"), "mean", lambda layer, start, stop: np.zeros((stop - start, 2), "f4"))
    add(hub, WORDY, contents_of(texts, rows), tmp_path / "set")

    found = fetch_dataset_metadata(WORDY)
    assert (found.num_prompts, found.available_layers) == (n_prompts, [0])
    assert hub.files(WORDY)[INDEX] > 100_000_000
    assert hub.bytes_out() < 256 * 1024


@dataclass(frozen=True)
class Model:
    """What a plan needs to know of a model."""

    layers: int
    hidden: int
    tokens: int | None = None


@pytest.mark.parametrize(
    ("model", "most_files"),
    [(Model(32, 4096), 100), (Model(80, 8192), 100), (Model(32, 4096, tokens=50), MOST_FILES)],
)
def test_many_prompts_are_few_files(model: Model, most_files: int) -> None:
    n_prompts, layers = 25_000, tuple(range(model.layers))
    counts = None if model.tokens is None else np.full(n_prompts, model.tokens)
    pooling = "mean" if counts is None else None
    rows = HiddenRows(layers, model.hidden, np.dtype("f4"), pooling, lambda *_: np.zeros(0), counts)
    contents = contents_of([""] * n_prompts, rows)
    files = describe(contents, make_plan(contents)).tensor_files()

    assert len(files) == len(set(files)) < most_files
    too_small = (2000 if model.tokens else 1) * model.hidden * 4
    with pytest.raises(InvalidInput, match=r"a folder on the Hub holds 9900; shard_max_bytes=\d+ would do") as caught:
        make_plan(contents, too_small)
    advised = int(str(caught.value).rsplit("shard_max_bytes=", 1)[1].split()[0])
    assert len(describe(contents, make_plan(contents, advised)).tensor_files()) <= MOST_FILES
