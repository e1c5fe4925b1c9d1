"""Every code sample of the page that datasets were asked for with, on the real model, over the local Hub.

The samples lie in ``seed_datasets`` as they stand there, with the package's name in place of the other library's. What
one leaves free (``all_prompts``, ``test_acts``, …) is handed to it, and the model's name is replaced by the demo
model's. Four samples publish to one name, each something else: the repository is deleted between them. The sample
that extracts on other machines (``backend="nnsight"``) is left out; it belongs to the work on engines.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets  # before a client is told where to go
import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from huggingface_hub import HfApi, constants

import streamtap
from streamtap import UnifiedCache, load_activations, load_statements
from streamtap.engines.tokenizing import PromptTokenizer
from streamtap.engines.transformers import TransformersEngine
from streamtap.settings import Settings
from streamtap.testing import HubServer, online_client

pytestmark = pytest.mark.xdist_group("demo-model")

SAMPLES = Path(__file__).parent / "seed_datasets"
OLDER = Path(__file__).parents[1] / "dataset" / "samples" / "v1-2-pooled-logits"
MODEL, LAYERS, HIDDEN = "demo", 30, 576
SAFETY, MINE = "username/llama-8b-safety-activations", "username/my-activations"
TEXTS = list(load_statements().texts[:24])
LABELS = load_statements().labels[:24].tolist()
TRAIN, TEST = np.arange(16), np.arange(16, 24)
INDEX = "index/train-00000-of-00001.parquet"


@dataclass
class Place:
    """The Hub, and the folder that samples run in."""

    hub: HubServer
    folder: Path

    def run(self, sample: str, *, others: dict[str, str] | None = None, **free: Any) -> tuple[dict[str, Any], str]:
        """The names that a sample leaves behind, and what it printed."""
        code = (SAMPLES / f"{sample}.txt").read_text(encoding="utf-8")
        for old, new in {"meta-llama/Llama-3.1-8B-Instruct": MODEL, **(others or {})}.items():
            code = code.replace(old, new)
        names = {name: getattr(streamtap, name) for name in streamtap.__all__} | free
        printed = io.StringIO()
        with contextlib.chdir(self.folder), contextlib.redirect_stdout(printed):
            exec(compile(code, sample, "exec"), names)
        return names, printed.getvalue()

    def forget(self, repo_id: str) -> None:
        """Delete a repository, and what this machine knows of it: every sample begins on a bare one."""
        HfApi(endpoint=self.hub.endpoint, token=self.hub.token).delete_repo(
            repo_id, repo_type="dataset", missing_ok=True
        )

    def index(self, repo_id: str) -> pd.DataFrame:
        return pq.read_table(io.BytesIO(self.hub.read(repo_id, INDEX))).to_pandas()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A cache of its own, beside the demo model that all tests share."""
    folder, shared = tmp_path_factory.mktemp("seed"), Settings.from_environment().models_dir
    shared.mkdir(parents=True, exist_ok=True)
    (folder / "cache").mkdir()
    (folder / "cache" / "models").symlink_to(shared)
    with pytest.MonkeyPatch.context() as patch, HubServer(folder / "hub") as hub, online_client(hub):
        patch.setenv("STREAMTAP_CACHE_DIR", str(folder / "cache"))
        patch.setenv("HF_HUB_CACHE", str(folder / "hf"))
        patch.setenv("HF_TOKEN", hub.token)
        yield Place(hub, folder)


@pytest.fixture(scope="module")
def extracted(place: Place) -> str:
    """Rows and perplexity of the statements are in the cache; what the sample printed."""
    return place.run("extract", all_prompts=TEXTS)[1]


@pytest.fixture(scope="module")
def with_logits(place: Place, extracted: str) -> UnifiedCache:
    return place.run("logits")[0]["cache"]


@pytest.fixture(scope="module")
def published(place: Place, with_logits: UnifiedCache) -> str:
    with_logits.warmup(TEXTS)
    return place.run("push", all_prompts=TEXTS, all_labels=LABELS)[1]


@pytest.fixture
def rows(extracted: str) -> Iterator[UnifiedCache]:
    """What the model itself gave."""
    with UnifiedCache(MODEL, compute_perplexity=False) as cache:
        yield cache


@pytest.fixture
def pushed_texts(published: str) -> list[str]:
    """The statements in the order of the dataset."""
    return streamtap.fetch_dataset_metadata(SAFETY).prompts


def table_of(repo_id: str, cache_dir: Path, **options: Any) -> datasets.Dataset:
    """What ``datasets`` sees of a repository on a machine that never saw it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_CACHE", str(cache_dir))
        return datasets.load_dataset(repo_id, split="train", cache_dir=str(cache_dir / "tables"), **options)


def labels_of(texts: list[str]) -> list[int]:
    return [LABELS[TEXTS.index(text)] for text in texts]


def test_extract(extracted: str, rows: UnifiedCache) -> None:
    pattern = r"WarmupStats\(total=24, activations=0 cached \+ 24 extracted, perplexity=0 cached \+ 24 extracted, time="

    assert re.match(pattern, extracted)
    assert rows.warmup(TEXTS).activations_cached == 24
    assert rows.layer_indices == tuple(range(LAYERS))


def test_logits(with_logits: UnifiedCache) -> None:
    with_logits.warmup(TEXTS)
    stats, found = with_logits.warmup(TEXTS), with_logits.get_logits(TEXTS)

    assert (stats.activations_cached, stats.logits_cached) == (24, 24)
    assert found.ids is not None
    assert found.values.shape == found.ids.shape == (24, 50)
    assert (np.diff(found.values, axis=1) <= 0).all()


def test_push(place: Place, published: str) -> None:
    index, card = place.index(SAFETY), place.hub.read(SAFETY, "README.md").decode()

    assert published == f"{place.hub.endpoint}/datasets/{SAFETY}\n"
    assert [commit.title for commit in place.hub.commits(SAFETY)][:-1] == ["Publish activations of demo"]
    assert len([path for path in place.hub.files(SAFETY) if path.startswith("tensors/hidden_layer")]) == LAYERS
    assert "tensors/logits_topk_000.safetensors" in place.hub.files(SAFETY)
    assert dict(zip(index["text"], index["label"], strict=True)) == dict(zip(TEXTS, LABELS, strict=True))
    assert index["text"].tolist() != TEXTS
    assert (index["perplexity_min"] <= index["perplexity_mean"]).all()
    assert "Activations for safety probe training on Llama-3.1-8B" in card


def test_push_with_metadata(place: Place, published: str, tmp_path: Path) -> None:
    place.forget(MINE)
    place.run("push_metadata", all_prompts=TEXTS[:2], all_labels=LABELS[:2])
    table = table_of(MINE, tmp_path)

    wanted = ["text", "label", "source", "category", "split"]
    found = sorted(zip(*(table[name] for name in wanted), strict=True))
    assert found == [
        (TEXTS[1], 0, "twitter", "benign", "train"),
        (TEXTS[0], 1, "reddit", "safety", "train"),
    ]
    assert {table.features[name].dtype for name in wanted} == {"string", "int32"}


def test_push_of_what_was_chosen(place: Place, published: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place.forget(MINE)
    place.run("push_chosen", all_prompts=[TEXTS[0], "Nobody ever extracted this.", TEXTS[1]])

    assert sorted(place.index(MINE)["text"]) == sorted(TEXTS[:2])
    assert {path.partition("/")[0] for path in place.hub.files(MINE)} == {
        ".gitattributes",
        "README.md",
        "index",
        "tensors",
    }
    assert not [path for path in place.hub.files(MINE) if "logits" in path]
    assert sorted(table_of(MINE, tmp_path / "owner")["text"]) == sorted(TEXTS[:2])
    monkeypatch.delenv("HF_TOKEN")
    assert sorted(table_of(MINE, tmp_path / "friend", token="hf_read")["text"]) == sorted(TEXTS[:2])
    with pytest.raises(datasets.exceptions.DatasetNotFoundError):
        table_of(MINE, tmp_path / "stranger")


@pytest.fixture
def frame(place: Place, published: str) -> pd.DataFrame:
    """Three domains, mixed: the frame as the sample sorts it."""
    place.forget(MINE)
    columns = {"statement": TEXTS, "label": LABELS, "domain": ["law", "art", "war"] * 8, "pair_id": [*range(12)] * 2}
    frame = pd.DataFrame(columns)
    frame.to_parquet(place.folder / "my_dataset.parquet")
    return frame.sort_values(["domain", "pair_id"]).reset_index(drop=True)


def test_push_of_a_sorted_frame(place: Place, frame: pd.DataFrame) -> None:
    place.run("push_sorted")
    index = place.index(MINE)

    assert index["text"].tolist() == frame["statement"].tolist()
    assert index["domain"].tolist() == ["art"] * 8 + ["law"] * 8 + ["war"] * 8
    assert index["label"].tolist() == frame["label"].tolist()
    assert index["row_offset"].tolist() == [*range(24)]


@pytest.mark.parametrize(("size", "shards"), [("100 * 1024 * 1024", [0] * 24), (f"8 * {HIDDEN} * 4", [0, 1, 2])])
def test_push_with_shards_of_a_domain(place: Place, frame: pd.DataFrame, size: str, shards: list[int]) -> None:
    """The dots of the sample are the arguments of the one before it; 100 MB are then those of one domain here."""
    arguments = "repo_id='username/my-activations', model_name='demo', prompts=df['statement'].tolist(),"
    place.run("push_shard_size", others={"...,": arguments, "100 * 1024 * 1024": size}, df=frame)
    index = place.index(MINE)

    assert index["text"].tolist() == frame["statement"].tolist()
    assert index["shard_index"].tolist() == [shard for shard in shards for _ in range(24 // len(shards))]


def test_train(place: Place, pushed_texts: list[str], rows: UnifiedCache) -> None:
    test_acts = {16: rows.activations(TEXTS, layer=16)}
    names, _ = place.run("train", labels=labels_of(pushed_texts), test_acts=test_acts)

    assert list(names["acts"]) == [16]
    assert np.array_equal(names["acts"][16], rows.activations(pushed_texts, layer=16))
    assert names["predictions"].tolist() == LABELS  # 24 rows of 576 numbers are told apart by any plane


def test_labels(place: Place, pushed_texts: list[str], rows: UnifiedCache) -> None:
    names, _ = place.run("labels")

    assert names["labels"].dtype == np.int64
    assert names["labels"].tolist() == labels_of(pushed_texts)
    assert np.array_equal(names["acts"][16], rows.activations(pushed_texts, layer=16))


def test_classifiers(place: Place, pushed_texts: list[str]) -> None:
    test_acts = load_activations(SAFETY, layers=[16], prompts=TEXTS)
    _, printed = place.run("classifiers", train_labels=labels_of(pushed_texts), test_acts=test_acts, test_labels=LABELS)

    scores = dict(re.findall(r"^(\w+): ([01]\.\d{3})$", printed, re.MULTILINE))
    assert list(scores) == ["logistic_regression", "ridge", "lda", "mass_mean"]
    assert scores["logistic_regression"] == "1.000"


def test_layer_sweep(place: Place, pushed_texts: list[str], rows: UnifiedCache) -> None:
    labels = np.array(labels_of(pushed_texts))
    splits = {"train_idx": TRAIN, "test_idx": TEST, "train_labels": labels[TRAIN], "test_labels": labels[TEST]}
    names, printed = place.run("layer_sweep", **splits)

    assert list(names["scores"]) == list(range(LAYERS))
    assert re.fullmatch(r"Best layer: \d+, accuracy: [01]\.\d{3}\n", printed)
    for layer in (0, 29):
        assert np.array_equal(names["acts"][layer], rows.activations(pushed_texts, layer=layer))


def test_inspect(place: Place, published: str) -> None:
    _, printed = place.run("inspect")

    assert printed.splitlines() == [MODEL, str([*range(LAYERS)]), "24"]


def test_pull(place: Place, published: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = load_activations(SAFETY, layers=[16], prompts=TEXTS)[16]
    monkeypatch.setenv("STREAMTAP_CACHE_DIR", str(tmp_path))
    (tmp_path / "models").symlink_to(place.folder / "cache" / "models")
    monkeypatch.setattr(TransformersEngine, "load", None)
    monkeypatch.setattr(PromptTokenizer, "encode", None)
    _, printed = place.run("pull")

    assert printed == "Pulled 24 prompts into local cache\n"
    with UnifiedCache(MODEL, layers=[16], compute_perplexity=False) as cache:
        assert cache.warmup(TEXTS).activations_cached == 24
        assert np.array_equal(cache.activations(TEXTS, layer=16), expected)


def test_raw_tensors(place: Place, pushed_texts: list[str], rows: UnifiedCache) -> None:
    names, _ = place.run("raw_tensors")

    assert set(names["tensors"]) == {"hidden.layer_16", "logits_topk.values", "logits_topk.indices"}
    assert names["X"].shape == (24, HIDDEN)
    assert np.array_equal(names["X"], rows.activations(pushed_texts, layer=16))
    assert names["info"]["model"]["name"] == MODEL


def test_upgrade(place: Place) -> None:
    place.forget(MINE)
    place.hub.add(MINE, OLDER)
    before = place.hub.files(MINE)
    place.hub.reset_counts()
    _, printed = place.run("upgrade")

    changed = {path for path, size in place.hub.files(MINE).items() if before.get(path) != size}
    assert printed == f"{place.hub.endpoint}/datasets/{MINE}\n"
    assert changed == {INDEX}
    assert before.keys() - place.hub.files(MINE).keys() == {"lmprobe_info.json", "_stage_complete"}
    assert place.hub.bytes_out("tensors/") == 0
    assert sum(place.hub.objects().values()) == 1


def test_research_and_production(place: Place, rows: UnifiedCache) -> None:
    names, _ = place.run("research", all_prompts=TEXTS, all_labels=LABELS)
    assert sorted(names["labels"].tolist()) == sorted(LABELS)

    later, _ = place.run("production", labels=names["labels"], inference_prompts=TEXTS[:5])
    assert np.array_equal(later["acts"][16], names["acts"][16])
    assert np.array_equal(later["new_acts"][16], rows.activations(TEXTS[:5], layer=16))
    assert later["predictions"].tolist() == LABELS[:5]
