"""What ``lmprobe`` publishes, loaded by us: its older datasets, and those that it writes and upgrades today."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

from streamtap import (
    UnifiedCache,
    fetch_dataset_metadata,
    load_activation_dataset,
    load_activations,
    load_rows,
    pull_dataset,
    upgrade_dataset_format,
)
from streamtap.testing import HubServer

Array = NDArray[Any]
Job = Callable[..., Mapping[str, Any]]

SAMPLES = Path(__file__).parents[1] / "tests" / "dataset" / "samples"
FOLDERS = sorted(folder.name for folder in SAMPLES.iterdir() if folder.is_dir())
OLD = [name for name in FOLDERS if name.startswith("v1")]
FULL = ["v2-extraction-bf16", "v2-full-sequence"]
SAMPLE_MODEL = "example/SmolLM2-135M-Instruct-dequant"
INDEX, SIDECAR = "index/train-00000-of-00001.parquet", "lmprobe_info.json"

PROMPTS = [f"prompt {i}{' and more' * (i % 4)}" for i in range(12)]
LABELS = [i % 3 for i in range(12)]
LAYERS, HIDDEN, TOP_K = (2, 5), 8, 4
FIVE_ROWS = HIDDEN * 4 * 5

# What is old says so, and what is not recorded is said once; neither is what is tested here.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*has the older format version"),
    pytest.mark.filterwarnings("ignore:.*does not record"),
]


@cache
def expected(folder: str) -> dict[str, Array]:
    """What the library itself read from a sample."""
    with np.load(SAMPLES / "expected.npz") as arrays:
        return {key.removeprefix(f"{folder}/"): arrays[key] for key in arrays.files if key.startswith(f"{folder}/")}


@pytest.fixture(scope="module")
def sample(hub: HubServer) -> Callable[[str, str], str]:
    """Puts a sample on the Hub, under a name that says what it is for."""

    def add(folder: str, use: str = "read") -> str:
        repo = f"samples/{folder}-{use}"
        hub.add(repo, SAMPLES / folder)
        return repo

    return add


def assert_sample(repo: str, folder: str) -> None:
    """All that is expected of a sample, in the order of its index, which is that of its shards."""
    values = expected(folder)
    acts, labels = load_activations(repo, return_labels=True)
    tensors, _ = load_activation_dataset(repo)

    assert acts.keys() == {int(name.removeprefix("layer_")) for name in values if name.startswith("layer_")}
    for layer, rows in acts.items():
        np.testing.assert_array_equal(rows, values[f"layer_{layer}"])
        np.testing.assert_array_equal(tensors[f"hidden.layer_{layer}"].numpy()[: len(rows)], rows)
    if "labels" in values:
        np.testing.assert_array_equal(labels, values["labels"])
    for name in {"logits_topk.values", "logits_topk.indices"} & (values.keys() | tensors.keys()):
        np.testing.assert_array_equal(tensors[name].numpy(), values[name])


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_sample_has_the_values_that_the_library_read(sample: Callable[..., str], folder: str) -> None:
    assert_sample(sample(folder), folder)


@pytest.mark.parametrize("folder", FULL)
def test_every_token_of_a_sample_has_its_row(sample: Callable[..., str], folder: str) -> None:
    values = expected(folder)

    rows = load_rows(sample(folder))

    np.testing.assert_array_equal(np.diff(rows.offsets), values["tokens/lengths"])
    for layer, found in rows.acts.items():
        np.testing.assert_array_equal(found.astype(np.float32), values[f"tokens/layer_{layer}"])


@pytest.mark.parametrize("folder", FOLDERS)
def test_chosen_prompts_of_a_sample_come_in_the_order_asked_for(sample: Callable[..., str], folder: str) -> None:
    repo, values = sample(folder), expected(folder)
    info = fetch_dataset_metadata(repo)
    places = [4, 0, 5]

    layer = info.available_layers[-1]
    acts = load_activations(repo, prompts=[info.prompts[place] for place in places], layers=[layer])

    assert info.model_name == SAMPLE_MODEL
    np.testing.assert_array_equal(acts[layer], values[f"layer_{layer}"][places])


def test_a_label_that_is_missing_leaves_the_others(sample: Callable[..., str], hub: HubServer) -> None:
    repo = sample("v2-string-labels")
    index = pq.read_table(io.BytesIO(hub.read(repo, INDEX)))

    _, labels = load_activations(repo, return_labels=True)

    assert list(labels) == index["label"].to_pylist()
    assert list(labels).count(None) == 1


@dataclass(frozen=True)
class Given:
    """Rows that the library is given, and the folder of its job."""

    hidden: dict[int, list[Array]]
    scores: list[dict[str, Array]]
    file: Path

    def last(self, layer: int) -> Array:
        return np.stack([rows[-1] for rows in self.hidden[layer]])

    def all(self, score: str) -> Array:
        return np.stack([scores[score] for scores in self.scores])


def make_rows(folder: Path, *, every_token: bool, scores: bool) -> Given:
    """Random rows [tokens or 1, hidden] of each prompt and layer, in the file that the job reads."""
    random = np.random.default_rng(7)
    counts = [3 + i % 5 if every_token else 1 for i in range(len(PROMPTS))]
    hidden = {
        layer: [random.standard_normal((count, HIDDEN)).astype(np.float32) for count in counts] for layer in LAYERS
    }
    found = [_scores(random) if scores else {} for _ in PROMPTS]
    arrays: dict[str, Any] = {"layers": np.array(LAYERS)}
    for i, each in enumerate(found):
        arrays[f"{i}/hidden"] = np.stack([hidden[layer][i] for layer in LAYERS])
        arrays |= {f"{i}/{name}": value for name, value in each.items()}
    np.savez(folder / "rows.npz", **arrays)
    return Given(hidden, found, folder / "rows.npz")


def _scores(random: np.random.Generator) -> dict[str, Array]:
    logits = np.sort(random.standard_normal(TOP_K).astype(np.float32))[::-1].copy()
    return {
        "logits": logits,
        "ids": random.permutation(100)[:TOP_K].astype(np.int32),
        "perplexity": np.sort(random.random(3).astype(np.float32) + 1)[[1, 0, 2]],
        "token_perplexity": random.random(4).astype(np.float32) + 1,
        "token_ids": random.integers(0, 100, 5),
    }


#: Whether every token has a row, which pooling else, and how it is pushed.
PUSHES: dict[str, tuple[str | None, dict[str, Any]]] = {
    "pooled": ("last_token", {}),
    "pooled-not-streamed": ("last_token", {"stream": False}),
    "pooled-in-order": ("last_token", {"shuffle": False}),
    "pooled-shards": ("last_token", {"shard_max_bytes": FIVE_ROWS}),
    "pooled-mean": ("mean", {}),
    "full": (None, {}),
    "full-shards": (None, {"shard_max_bytes": 3 * FIVE_ROWS}),
}


@pytest.mark.parametrize("kind", PUSHES)
def test_what_it_pushes_now_has_the_rows_that_it_was_given(lmprobe: Job, tmp_path: Path, kind: str) -> None:
    pooling, push = PUSHES[kind]
    given, repo = make_rows(tmp_path, every_token=pooling is None, scores=False), f"theirs/{kind}"
    options = {"repo_id": repo, "labels": LABELS, "metadata": [{"n": i} for i in range(len(PROMPTS))], "stream": True}

    lmprobe(
        "push_rows", rows=str(given.file), model="tester/given", prompts=PROMPTS, pooling=pooling, push=options | push
    )

    acts, labels = load_activations(repo, prompts=PROMPTS, return_labels=True)
    rows = load_rows(repo, prompts=PROMPTS)
    assert labels.tolist() == LABELS
    assert fetch_dataset_metadata(repo).pooling == (pooling or "none")
    for layer in LAYERS:
        np.testing.assert_array_equal(acts[layer], given.last(layer))
        np.testing.assert_array_equal(rows.acts[layer], np.concatenate(given.hidden[layer]))


def test_what_it_pushes_now_has_its_scores(lmprobe: Job, tokenizer_alone: str, tmp_path: Path) -> None:
    given, repo = make_rows(tmp_path, every_token=False, scores=True), "theirs/scores"
    labels = ["yes" if i % 2 else "no" for i in range(len(PROMPTS))]
    push = {"repo_id": repo, "labels": labels, "stream": True, "shuffle": False}
    asked = {"model": tokenizer_alone, "prompts": PROMPTS, "pooling": "last_token", "push": push}

    lmprobe("push_rows", rows=str(given.file), **asked)

    tensors, _ = load_activation_dataset(repo)
    _, found = load_activations(repo, return_labels=True)
    assert found.tolist() == labels
    np.testing.assert_array_equal(tensors["logits_topk.values"].numpy(), given.all("logits"))
    np.testing.assert_array_equal(tensors["logits_topk.indices"].numpy(), given.all("ids"))
    pull_dataset(repo, cache_dir=tmp_path / "cache")
    with UnifiedCache(tokenizer_alone, layers=[5], cache_dir=tmp_path / "cache", token_perplexity=True) as unified:
        np.testing.assert_array_equal(unified.get_activations(PROMPTS)[0], given.last(5))
        np.testing.assert_array_equal(unified.get_perplexity(PROMPTS), given.all("perplexity"))
        tokens = unified.get_token_perplexity(PROMPTS)
    np.testing.assert_allclose(np.stack(tokens), given.all("token_perplexity"), rtol=1e-6)


@pytest.fixture(scope="module")
def tokenizer_alone(hub: HubServer, demo: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model on the Hub without weights, so that no value can be made anew: the library wants the tokens' texts."""
    folder = tmp_path_factory.mktemp("tokenizer")
    for file in Path(demo).glob("*.json"):
        (folder / file.name).write_bytes(file.read_bytes())
    hub.add("tester/tokenizer", folder, repo_type="model")
    return "tester/tokenizer"


REAL: dict[str, Any] = {"layers": [15, 29], "cache_logits": True, "logit_top_k": 10}


@dataclass(frozen=True)
class Theirs:
    """What the library made of a real model and published; the model can be taken away."""

    model: Path
    repo: str
    made: Mapping[str, Any]

    @contextmanager
    def without_model(self) -> Iterator[None]:
        """As on a machine that has the dataset alone."""
        folder = self.model.readlink()
        self.model.unlink()
        try:
            yield
        finally:
            self.model.symlink_to(folder)


@pytest.fixture(scope="module")
def theirs(new_lmprobe: Callable[[], Job], demo: str, tmp_path_factory: pytest.TempPathFactory) -> Theirs:
    model, repo = tmp_path_factory.mktemp("real") / "model", "theirs/real"
    model.symlink_to(demo)
    push = {"repo_id": repo, "labels": LABELS, "stream": True}
    made = new_lmprobe()("extract_and_push", model=str(model), prompts=PROMPTS, options=REAL, push=push)
    return Theirs(model, repo, made)


def test_what_it_makes_of_a_real_model_is_near_what_we_make(theirs: Theirs, demo: str, tmp_path: Path) -> None:
    """Its rows to the bit, beside a pass of ours: batched and padded, the two round otherwise."""
    acts, labels = load_activations(theirs.repo, prompts=PROMPTS, return_labels=True)
    with UnifiedCache(demo, cache_dir=tmp_path / "own", **REAL) as unified:
        own, scores = unified.get_activations(PROMPTS)[0], unified.get_perplexity(PROMPTS)

    assert labels.tolist() == LABELS
    np.testing.assert_array_equal(np.hstack([acts[15], acts[29]]), theirs.made["acts"])
    np.testing.assert_allclose(own, theirs.made["acts"], rtol=1e-3, atol=1e-2)
    np.testing.assert_allclose(scores, theirs.made["perplexity"], rtol=1e-3)


def test_our_cache_serves_what_it_made_without_the_model(theirs: Theirs, tmp_path: Path) -> None:
    pull_dataset(theirs.repo, cache_dir=tmp_path / "pulled")

    with theirs.without_model(), UnifiedCache(str(theirs.model), cache_dir=tmp_path / "pulled", **REAL) as unified:
        acts, scores = unified.get_activations(PROMPTS)[0], unified.get_perplexity(PROMPTS)
        logits = unified.get_logits(PROMPTS)

    np.testing.assert_array_equal(acts, theirs.made["acts"])
    np.testing.assert_array_equal(scores, theirs.made["perplexity"])
    np.testing.assert_array_equal(logits.values, theirs.made["logits"].reshape(len(PROMPTS), 10))
    np.testing.assert_array_equal(logits.ids, theirs.made["ids"].reshape(len(PROMPTS), 10))


def test_our_cache_serves_rows_that_it_made_beside_the_model(theirs: Theirs, tmp_path: Path) -> None:
    pull_dataset(theirs.repo, cache_dir=tmp_path / "pulled")

    with UnifiedCache(str(theirs.model), cache_dir=tmp_path / "pulled", **REAL) as unified:
        np.testing.assert_array_equal(unified.get_activations(PROMPTS)[0], theirs.made["acts"])


def tensor_files(hub: HubServer, repo: str) -> dict[str, bytes]:
    return {path: hub.read(repo, path) for path in hub.files(repo) if path.startswith("tensors/")}


@pytest.mark.parametrize("folder", OLD)
def test_both_read_what_we_upgraded(sample: Callable[..., str], lmprobe: Job, hub: HubServer, folder: str) -> None:
    repo, values = sample(folder, "ours"), expected(folder)
    before = tensor_files(hub, repo)

    upgrade_dataset_format(repo)

    assert tensor_files(hub, repo) == before
    assert SIDECAR not in hub.files(repo)
    assert fetch_dataset_metadata(repo).format_version == "2.0"
    assert_sample(repo, folder)
    found, tensors = lmprobe("load", dataset=repo), lmprobe("load_tensors", repo_id=repo)
    for name in values:
        np.testing.assert_array_equal(found[name] if name.startswith("layer_") else tensors[name], values[name])


@pytest.mark.parametrize("folder", OLD)
def test_what_we_upgraded_is_upgraded_once(sample: Callable[..., str], hub: HubServer, folder: str) -> None:
    repo = sample(folder, "once")
    upgrade_dataset_format(repo)
    before = hub.commits(repo)

    upgrade_dataset_format(repo)

    assert hub.commits(repo) == before


@pytest.mark.parametrize("folder", OLD)
def test_we_read_what_it_upgraded(sample: Callable[..., str], lmprobe: Job, folder: str) -> None:
    repo = sample(folder, "theirs")

    lmprobe("upgrade", repo_id=repo)

    assert fetch_dataset_metadata(repo).format_version.startswith("2.")
    assert_sample(repo, folder)


@pytest.mark.parametrize("folder", [name for name in FOLDERS if name not in OLD])
def test_what_is_of_version_2_is_left_as_it_is(sample: Callable[..., str], hub: HubServer, folder: str) -> None:
    repo = sample(folder, "left")
    before = [commit.id for commit in hub.commits(repo)]

    upgrade_dataset_format(repo)

    assert [commit.id for commit in hub.commits(repo)] == before
