"""What we publish, loaded by ``lmprobe`` itself: every value as it was made."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

from streamtap import Activations, CaptureSpec, UnifiedCache, push_dataset
from streamtap.activations import join
from streamtap.testing import FakeEngine, HubServer

Array = NDArray[Any]
Job = Callable[..., Mapping[str, Any]]

LAYERS, HIDDEN, TOP_K = 4, 8, 5
MODEL, COMMIT = "tester/fake", "c0ffee"
INDEX = "index/train-00000-of-00001.parquet"
PROMPTS = [f"prompt {i}{' and more' * (i % 4)}" for i in range(20)]
LABELS = [i % 3 for i in range(20)]
FIVE_ROWS = HIDDEN * 4 * 5
SCORES = {"cache_logits": True, "logit_top_k": TOP_K, "compute_perplexity": True, "token_perplexity": True}

#: How the rows are kept, and how they are pushed.
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "pooled": ({}, {}),
    "pooled-in-order": ({}, {"shuffle": False}),
    "pooled-shards": ({}, {"shard_max_bytes": FIVE_ROWS}),
    "pooled-shards-in-order": ({}, {"shard_max_bytes": FIVE_ROWS, "shuffle": False, "stream": True}),
    "pooled-mean": ({"pooling": "mean"}, {}),
    "pooled-bfloat16": ({"dtype": "bfloat16"}, {"shard_max_bytes": FIVE_ROWS}),
    "pooled-float16": ({"dtype": "float16"}, {}),
    "full": ({"pooling": "none"}, {}),
    "full-shards": ({"pooling": "none"}, {"shard_max_bytes": 8 * FIVE_ROWS}),
    "full-shards-in-order": ({"pooling": "none"}, {"shard_max_bytes": 8 * FIVE_ROWS, "shuffle": False}),
    "full-bfloat16": ({"pooling": "none", "dtype": "bfloat16"}, {"shard_max_bytes": 8 * FIVE_ROWS}),
}
POOLED = [kind for kind in KINDS if kind.startswith("pooled")]


@dataclass(frozen=True)
class Ours:
    """A dataset of ours and what must be read from it; ``order`` is each row's place in ``prompts``."""

    repo: str
    pooling: str
    prompts: Sequence[str]
    labels: Sequence[Any] | None
    made: Activations
    order: Sequence[int]

    def row(self, layer: int, place: int) -> Array:
        """The row [hidden] that stands for one prompt."""
        stop = int(self.made.offsets[place + 1])
        return np.asarray(self.made.acts[layer][stop - 1], np.float32)

    def rows(self, layer: int, places: Sequence[int]) -> Array:
        """Such rows of some prompts, [prompts, hidden]."""
        return np.stack([self.row(layer, place) for place in places])

    def earlier(self, layer: int, places: Sequence[int]) -> Array:
        """The rows before those, prompt after prompt: none where there is one row a prompt."""
        spans = [range(int(self.made.offsets[place]), int(self.made.offsets[place + 1]) - 1) for place in places]
        numbers = [number for span in spans for number in span]
        return np.asarray(self.made.acts[layer][numbers], np.float32)


class Publisher:
    """Publishes what an engine made of prompts; its model has a configuration on the Hub, and no weights."""

    def __init__(self, hub: HubServer, folder: Path) -> None:
        self._hub, self._folder = hub, folder
        self._known: dict[str, Ours] = {}
        config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": LAYERS}
        sizes = {"hidden_size": HIDDEN, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 300}
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps(config | sizes))
        hub.add(MODEL, folder / "model", repo_type="model")

    def kind(self, name: str) -> Ours:
        """A dataset of one of the kinds, with labels and metadata."""
        if name not in self._known:
            kept, push = KINDS[name]
            self._known[name] = self.new(name, kept=kept, labels=LABELS, metadata=_metadata(len(PROMPTS)), **push)
        return self._known[name]

    def new(
        self,
        name: str,
        *,
        prompts: Sequence[str] = PROMPTS,
        kept: Mapping[str, Any] = {},
        scores: Mapping[str, Any] = {},
        labels: Sequence[Any] | None = None,
        **push: Any,
    ) -> Ours:
        """A dataset of what an engine makes of ``prompts``."""
        pooling = kept.get("pooling", "last_token")
        engine = FakeEngine(LAYERS, HIDDEN, kept.get("dtype", "float32"), named={"model": MODEL, "commit": COMMIT})
        cache_dir = self._folder / name
        pooled: dict[str, Any] = {"cache_pooled": False} if pooling == "none" else {"pooling": pooling}
        with UnifiedCache(engine, cache_dir=cache_dir, **pooled, **{"compute_perplexity": False, **scores}) as unified:
            unified.warmup(prompts)
        repo = f"tester/{name}"
        push_dataset(repo, MODEL, prompts, labels=labels, cache_dir=cache_dir, **push)
        spec = CaptureSpec(layers="all", pooling=pooling, logits="last", logit_top_k=TOP_K, perplexity=True)
        made = join(list(engine.capture(prompts, spec)))
        index = pq.read_table(io.BytesIO(self._hub.read(repo, INDEX)))
        return Ours(repo, pooling, prompts, labels, made, index["pushed_index"].to_pylist())


def _metadata(count: int) -> list[dict[str, Any]]:
    """Columns of every sort beside those of the format."""
    return [
        {"source": f"s{i}", "score": i / 4, "is_held_out": i % 2 == 0, "day": date(2024, 1, i + 1), "tags": ["a"] * i}
        | {"maybe": i if i % 2 else None, "note": {"n": i}}
        for i in range(count)
    ]


@pytest.fixture(scope="module")
def ours(hub: HubServer, tmp_path_factory: pytest.TempPathFactory) -> Publisher:
    return Publisher(hub, tmp_path_factory.mktemp("published"))


def assert_rows(found: Mapping[str, Any], ours: Ours, layers: Sequence[int], places: Sequence[int]) -> None:
    assert {name for name in found if name.startswith("layer_")} == {f"layer_{layer}" for layer in layers}
    for layer in layers:
        assert found[f"layer_{layer}"].dtype == np.float32
        np.testing.assert_array_equal(found[f"layer_{layer}"], ours.rows(layer, places))


@pytest.mark.parametrize("kind", KINDS)
def test_it_loads_every_row_and_label(ours: Publisher, lmprobe: Job, kind: str) -> None:
    dataset = ours.kind(kind)

    found = lmprobe("load", dataset=dataset.repo, return_labels=True, pooling=_pooling(dataset))

    assert_rows(found, dataset, range(LAYERS), dataset.order)
    assert found["labels"].tolist() == [LABELS[place] for place in dataset.order]
    assert (list(dataset.order) == list(range(len(PROMPTS)))) == kind.endswith("in-order")


@pytest.mark.parametrize("kind", KINDS)
def test_it_loads_chosen_prompts_of_chosen_layers(ours: Publisher, lmprobe: Job, kind: str) -> None:
    dataset, places = ours.kind(kind), [17, 3, 8, 0]

    found = lmprobe(
        "load",
        dataset=dataset.repo,
        prompts=[PROMPTS[place] for place in places],
        layers=[1, 3],
        return_labels=True,
        pooling=_pooling(dataset),
    )

    assert_rows(found, dataset, [1, 3], places)
    assert found["labels"].tolist() == [LABELS[place] for place in places]


@pytest.mark.parametrize("kind", KINDS)
def test_it_loads_the_tensors_as_they_lie(ours: Publisher, lmprobe: Job, kind: str) -> None:
    dataset = ours.kind(kind)

    found = lmprobe("load_tensors", repo_id=dataset.repo, layers=[0, 2])

    assert found.keys() == {"hidden.layer_0", "hidden.layer_2", "info"}
    for layer in (0, 2):
        lies = np.concatenate([dataset.rows(layer, dataset.order), dataset.earlier(layer, dataset.order)])
        np.testing.assert_array_equal(found[f"hidden.layer_{layer}"], lies)
    assert found["info"]["model"] == {"name": MODEL, "revision": COMMIT}


@pytest.mark.parametrize("kind", KINDS)
def test_it_reads_what_is_there(ours: Publisher, lmprobe: Job, kind: str) -> None:
    dataset = ours.kind(kind)

    found = lmprobe("describe", repo_id=dataset.repo)

    assert (found["model_name"], found["num_prompts"], found["format_version"]) == (MODEL, len(PROMPTS), "2.0")
    assert found["available_layers"] == list(range(LAYERS))
    assert found["prompts"] == [PROMPTS[place] for place in dataset.order]
    hidden = found["tensor_descriptors"]["hidden_layers"]
    assert hidden["storage"] == ("full_sequence" if dataset.pooling == "none" else "pooled")
    assert hidden["dtype"] == KINDS[kind][0].get("dtype", "float32")


@pytest.mark.parametrize("materialize", [False, True], ids=["lazy", "materialized"])
@pytest.mark.parametrize("kind", POOLED)
def test_its_cache_serves_what_it_pulled(ours: Publisher, lmprobe: Job, kind: str, materialize: bool) -> None:
    dataset, places = ours.kind(kind), [5, 19, 2]

    found = lmprobe(
        "pull_and_read",
        repo_id=dataset.repo,
        materialize=materialize,
        model=MODEL,
        prompts=[PROMPTS[place] for place in places],
        options={"layers": [1, 2], "pooling": _pooling(dataset)},
    )

    assert found["pulled"] == len(PROMPTS)
    np.testing.assert_array_equal(found["acts"], np.hstack([dataset.rows(layer, places) for layer in (1, 2)]))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in POOLED])
def test_its_cache_serves_every_token_that_it_pulled(ours: Publisher, lmprobe: Job, kind: str) -> None:
    dataset, place = ours.kind(kind), 7

    found = lmprobe(
        "pull_and_read",
        repo_id=dataset.repo,
        materialize=True,
        model=MODEL,
        prompts=[PROMPTS[place]],
        options={"layers": [1, 2], "cache_pooled": False},
    )

    rows = [np.concatenate([dataset.earlier(layer, [place]), dataset.rows(layer, [place])]) for layer in (1, 2)]
    assert found["acts"].shape == (1, len(rows[0]), 2 * HIDDEN)
    np.testing.assert_array_equal(found["acts"][0], np.hstack(rows))


@pytest.mark.parametrize("pooling", ["last_token", "none"])
def test_it_loads_logits_beside_perplexity(ours: Publisher, lmprobe: Job, pooling: str) -> None:
    """It reads no perplexity of any dataset; its columns are in the way of nothing."""
    name = f"scores-{pooling.replace('_', '-')}"
    dataset = ours.new(name, kept={"pooling": pooling}, scores=SCORES, shard_max_bytes=8 * FIVE_ROWS)

    tensors = lmprobe("load_tensors", repo_id=dataset.repo, tensors=["logits_topk"])
    found = lmprobe("load", dataset=dataset.repo)

    assert dataset.made.logits is not None
    assert dataset.made.logit_ids is not None
    np.testing.assert_array_equal(tensors["logits_topk.values"], dataset.made.logits[list(dataset.order)])
    np.testing.assert_array_equal(tensors["logits_topk.indices"], dataset.made.logit_ids[list(dataset.order)])
    assert_rows(found, dataset, range(LAYERS), dataset.order)


def test_its_cache_serves_logits_that_it_pulled(ours: Publisher, lmprobe: Job) -> None:
    dataset, places = ours.new("pulled-logits", scores=SCORES), [11, 4, 6]

    found = lmprobe(
        "pull_and_read",
        repo_id=dataset.repo,
        materialize=True,
        model=MODEL,
        prompts=[PROMPTS[place] for place in places],
        options={"layers": [1], "cache_logits": True, "logit_top_k": TOP_K},
    )

    assert dataset.made.logits is not None
    assert dataset.made.logit_ids is not None
    np.testing.assert_array_equal(found["acts"], dataset.rows(1, places))
    np.testing.assert_array_equal(found["logits"].reshape(3, TOP_K), dataset.made.logits[places])
    np.testing.assert_array_equal(found["ids"].reshape(3, TOP_K), dataset.made.logit_ids[places])


def test_it_loads_string_labels(ours: Publisher, lmprobe: Job) -> None:
    labels = [("spam", "ham", "eggs")[i % 3] for i in range(len(PROMPTS))]
    dataset = ours.new("strings", labels=labels)

    found = lmprobe("load", dataset=dataset.repo, return_labels=True)

    assert found["labels"].tolist() == [labels[place] for place in dataset.order]


def test_it_loads_the_rows_of_partly_labelled_prompts(ours: Publisher, lmprobe: Job) -> None:
    labels = ["spam" if i % 3 else None for i in range(len(PROMPTS))]
    dataset = ours.new("partly", labels=labels)

    found = lmprobe("load", dataset=dataset.repo, return_labels=True)

    assert_rows(found, dataset, range(LAYERS), dataset.order)


def test_it_loads_unlabelled_duplicates(ours: Publisher, lmprobe: Job) -> None:
    prompts = [*PROMPTS[:4], PROMPTS[1], PROMPTS[1]]
    dataset = ours.new("twice", prompts=prompts)

    found = lmprobe("load", dataset=dataset.repo, return_labels=True)

    assert_rows(found, dataset, range(LAYERS), dataset.order)
    assert "labels" not in found


def test_it_loads_the_rows_of_duplicates_with_labels_of_their_own(ours: Publisher, lmprobe: Job) -> None:
    prompts, labels = [*PROMPTS[:4], PROMPTS[1]], [0, 1, 0, 1, 2]
    dataset = ours.new("twice-labelled", prompts=prompts, labels=labels)

    found = lmprobe("load", dataset=dataset.repo, return_labels=True)

    assert_rows(found, dataset, range(LAYERS), dataset.order)


def test_it_loads_what_a_real_model_made(demo: str, lmprobe: Job, tmp_path: Path) -> None:
    """Equal to the bit, and none of it computed there: its own pass would round otherwise."""
    options: dict[str, Any] = {"layers": [15, 29], "cache_logits": True, "logit_top_k": 10}
    with UnifiedCache(demo, cache_dir=tmp_path / "cache", **options) as unified:
        rows, logits = unified.get_activations(PROMPTS)[0], unified.get_logits(PROMPTS)
    push_dataset("tester/real", demo, PROMPTS, labels=LABELS, cache_dir=tmp_path / "cache")

    found = lmprobe(
        "pull_and_read",
        repo_id="tester/real",
        materialize=True,
        model=demo,
        prompts=PROMPTS,
        options=options,
    )

    np.testing.assert_array_equal(found["acts"], rows)
    np.testing.assert_array_equal(found["logits"].reshape(len(PROMPTS), 10), logits.values)
    np.testing.assert_array_equal(found["ids"].reshape(len(PROMPTS), 10), logits.ids)


def _pooling(dataset: Ours) -> str:
    """What to ask the library for, which takes one row a prompt of a dataset of all rows."""
    return "last_token" if dataset.pooling == "none" else dataset.pooling
