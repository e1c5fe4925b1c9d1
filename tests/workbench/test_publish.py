from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

from streamtap.dataset.names import INDEX
from streamtap.errors import DatasetExists, InvalidInput
from streamtap.workbench import cached_contents
from streamtap.workbench.dataset_rows import load_activations, load_rows
from streamtap.workbench.open_dataset import fetch_dataset_metadata

Bench = Any
FilesOf = Callable[[Path], dict[str, tuple[int, bytes]]]

# Of different lengths, one of a single character, and one twice.
PROMPTS = ["The sky", "is blue at noon", "x", "and red", "in the evening", "is blue at noon", "so", "as a rule it is"]
CHAT = [{"role": "user", "content": "Why is the sky blue?"}]


def table_of(where: Path) -> Any:
    return pq.read_table(where / INDEX)


def same(left: NDArray[Any], right: NDArray[Any]) -> bool:
    return left.dtype == right.dtype and np.array_equal(left, right)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shuffle", [True, False])
def test_a_set_is_published_and_loads_as_the_cache_has_it(dtype: str, shuffle: bool, bench: Bench) -> None:
    cache = bench.fill(PROMPTS, bench.engine(dtype=dtype))
    where = bench.push(PROMPTS, labels=list(range(8)), shuffle=shuffle, shard_max_bytes=100)
    acts, labels = load_activations(where, prompts=PROMPTS, return_labels=True, dtype=None)

    assert list(acts) == [0, 1, 2, 3]
    assert all(same(acts[layer], cache.activations(PROMPTS, layer)) for layer in acts)
    assert labels.tolist() == list(range(8))
    assert fetch_dataset_metadata(where).dtype == dtype


def test_raw_rows_become_a_full_sequence(bench: Bench) -> None:
    cache = bench.fill(PROMPTS, bench.engine(dtype="float16"), cache_pooled=False)
    where = bench.push(PROMPTS, shard_max_bytes=400)
    found, wanted = load_rows(where, prompts=PROMPTS), cache.rows(PROMPTS)

    assert fetch_dataset_metadata(where).pooling == "none"
    assert all(same(found.acts[layer], wanted.acts[layer]) for layer in wanted.acts)
    assert np.array_equal(found.offsets, wanted.offsets)
    assert np.array_equal(found.token_ids, wanted.token_ids)
    assert np.array_equal(found.positions, wanted.positions)


def test_a_chat_is_named_by_its_messages(bench: Bench) -> None:
    prompts = [CHAT, "The sky", [{"role": "user", "content": 'Wärum? "so"'}, {"role": "assistant", "content": "Da."}]]
    cache = bench.fill(prompts)
    where = bench.push(prompts, shuffle=False)
    acts = load_activations(where, prompts=prompts)

    assert table_of(where)["text"].to_pylist()[0] == '[{"role": "user", "content": "Why is the sky blue?"}]'
    assert all(same(acts[layer], cache.activations(prompts, layer)) for layer in acts)


def test_prompts_of_token_ids_have_no_text(bench: Bench) -> None:
    bench.fill([[5, 6, 7], "The sky"])
    with pytest.raises(InvalidInput, match="prompt 1 is token ids; a dataset names its rows by text or chat"):
        bench.push(["The sky", [5, 6, 7]])


def test_the_same_prompt_with_different_labels_keeps_both(bench: Bench) -> None:
    prompts = ["twice", "once", "twice", "x", "twice"]
    bench.fill(prompts)
    where = bench.push(prompts, labels=[0, 1, 2, 3, 4], metadata=[{"row": i} for i in range(5)])
    acts, labels = load_activations(where, prompts=prompts, return_labels=True)

    assert table_of(where).num_rows == 5
    assert labels.tolist() == [0, 1, 2, 3, 4]
    assert np.array_equal(acts[0][0], acts[0][2])
    rows = table_of(where).to_pylist()
    assert all(row["label"] == row["row"] == row["pushed_index"] for row in rows)


def test_a_shuffle_is_the_same_each_time_and_its_own_to_each_name(bench: Bench) -> None:
    prompts = [f"prompt {i}" for i in range(30)]
    bench.fill(prompts)

    def order(where: str) -> list[int]:
        found: list[int] = table_of(bench.push(prompts, where))["pushed_index"].to_pylist()
        return found

    first = order("a/set")
    assert first != list(range(30))
    assert sorted(first) == list(range(30))
    assert order("b/set") == first  # a folder's own name is all that counts
    assert order("other") != first


def test_a_sorted_frame_gives_shards_of_one_domain(bench: Bench) -> None:
    frame = pd.DataFrame(
        {
            "prompt": [f"text {i}" for i in range(12)],
            "domain": ["law", "art", "sea"] * 4,
            "label": pd.array([0, 1, None] * 4, dtype="Int64"),
        }
    )
    bench.fill(frame["prompt"].tolist())
    frame = frame.sort_values(["domain", "prompt"]).reset_index(drop=True)
    where = bench.push(
        frame["prompt"],
        labels=frame["label"],
        metadata=frame[["domain"]].to_dict("records"),
        shuffle=False,
        shard_max_bytes=4 * 8 * 4,
    )
    table = table_of(where)

    assert table["text"].to_pylist() == frame["prompt"].tolist()
    assert table["shard_index"].to_pylist() == [0] * 4 + [1] * 4 + [2] * 4
    assert table["domain"].to_pylist() == ["art"] * 4 + ["law"] * 4 + ["sea"] * 4
    assert table["label"].to_pylist() == [1] * 4 + [0] * 4 + [None] * 4
    assert fetch_dataset_metadata(where).manifest.ordering == "given"


def test_the_same_push_again_writes_nothing(bench: Bench, files_of: FilesOf) -> None:
    options: dict[str, Any] = {"labels": list(range(8)), "metadata": [{"n": i} for i in range(8)]}
    bench.fill(PROMPTS)
    where = bench.push(PROMPTS, **options)
    before = files_of(where)
    bench.push(PROMPTS, **options)

    assert files_of(where) == before
    assert sorted(path.name for path in bench.root.iterdir()) == ["cache", "set"]


CHANGES: dict[str, dict[str, Any]] = {
    "labels": {"labels": [9] * 8},
    "metadata": {"metadata": [{"n": 1}] * 8},
    "layers": {"layers": [1]},
    "order": {"shuffle": False},
    "description": {"description": "Other words."},
    "shards": {"shard_max_bytes": 64},
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_push_replaces_only_when_asked(change: str, bench: Bench, files_of: FilesOf) -> None:
    cache = bench.fill(PROMPTS)
    where = bench.push(PROMPTS)
    before = files_of(where)
    with pytest.raises(DatasetExists, match="exist_ok=True"):
        bench.push(PROMPTS, **CHANGES[change])
    assert files_of(where) == before

    bench.push(PROMPTS, **CHANGES[change], exist_ok=True)
    assert files_of(where) != before
    assert same(load_activations(where, 1, PROMPTS)[1], cache.activations(PROMPTS, 1))


def test_other_rows_of_the_same_texts_are_another_push(bench: Bench) -> None:
    """The text of a chat is the same whether or not the assistant's turn was opened; its rows are not."""
    bench.fill([CHAT], generation_prompt=False)
    bench.fill([CHAT], folder="opened", generation_prompt=True)
    bench.push([CHAT])
    with pytest.raises(DatasetExists):
        bench.push([CHAT], folder="opened")


def test_scores_that_came_later_are_another_push(bench: Bench) -> None:
    bench.fill(PROMPTS, compute_perplexity=False)
    where = bench.push(PROMPTS)
    assert "perplexity_mean" not in table_of(where).column_names
    for more in ({}, {"token_perplexity": True}):
        bench.fill(PROMPTS[:2], **more)
        bench.push(PROMPTS, exist_ok=True)
        bench.fill(PROMPTS, **more)
        with pytest.raises(DatasetExists):
            bench.push(PROMPTS)
        bench.push(PROMPTS, exist_ok=True)
    table = table_of(where)
    assert table["perplexity_mean"].null_count == 0  # no prompt is of one token: each has its BOS
    assert table["token_perplexity"].null_count == 0


def test_perplexity_and_tokens_stand_in_the_index(bench: Bench) -> None:
    engine = bench.engine()
    bench.fill(PROMPTS, engine)
    bench.fill(PROMPTS[3:], engine, token_perplexity=True)
    rows = table_of(bench.push(PROMPTS, shuffle=False)).to_pylist()
    for text, row in zip(PROMPTS, rows, strict=True):
        ids = engine.tokenizer.tokenizer(text)["input_ids"]
        wanted = engine.perplexity(ids)

        assert (row["token_ids"], row["num_tokens"]) == (ids, len(ids))
        assert [row[f"perplexity_{name}"] for name in ("mean", "min", "max")] == wanted.tolist()
        if text in PROMPTS[3:]:
            assert np.allclose(row["token_perplexity"], np.exp(engine.losses(ids).astype(np.float64)), rtol=1e-12)
        else:
            assert row["token_perplexity"] is None


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "labels": ({"labels": [1, 2]}, "labels must be one a prompt: got 2 for 8"),
    "label": ({"labels": [1.5] * 8}, "label 0 is a float"),
    "metadata": ({"metadata": [{"a": 1}] * 7 + [{"b": 1}]}, "prompt 7 differs in 'a', 'b'"),
    "core": ({"metadata": [{"text": 1}] * 8}, "'text' is a column of the format itself"),
    "shards": ({"shard_max_bytes": 8}, "at least one row of 32 bytes"),
    "private": ({"private": True}, "private= is for the Hub"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_is_refused_before_any_work(kind: str, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.fill(PROMPTS)
    monkeypatch.setattr(cached_contents.RowReader, "read", lambda *_: pytest.fail("a row was read"))
    options, message = REFUSED[kind]
    with pytest.raises(InvalidInput, match=message):
        bench.push(PROMPTS, **options)
    assert [path.name for path in bench.root.iterdir()] == ["cache"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_push_that_is_cut_leaves_the_old_dataset_and_the_next_one_completes(
    stream: bool, bench: Bench, files_of: FilesOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = bench.fill(PROMPTS)
    where = bench.push(PROMPTS[:4])
    before = files_of(where)
    with monkeypatch.context() as patch:
        read = cached_contents.RowReader.read

        def cut(self: Any, keyed: Any, layer: int) -> Any:
            if layer == 2:
                raise OSError("the power went out")
            return read(self, keyed, layer)

        patch.setattr(cached_contents.RowReader, "read", cut)
        with pytest.raises(OSError, match="the power"):
            bench.push(PROMPTS, exist_ok=True, stream=stream)
    assert files_of(where) == before
    assert sorted(path.name for path in bench.root.iterdir()) == ["cache", "set"]

    bench.push(PROMPTS, exist_ok=True, stream=stream)
    assert same(load_activations(where, 2, PROMPTS)[2], cache.activations(PROMPTS, 2))
    assert table_of(where).num_rows == len(PROMPTS)


@pytest.mark.parametrize(
    ("device", "told"), [("http://models.corp/v1", ""), ("models:8080", ""), ("cuda:1", "cuda:1"), ("cpu", "cpu")]
)
def test_the_address_where_the_model_ran_is_not_told(device: str, told: str, bench: Bench) -> None:
    cache = bench.fill(PROMPTS, bench.engine(named={"device": device}))
    where = bench.push(PROMPTS)

    said = fetch_dataset_metadata(where).manifest.capture["provenance"]
    assert said == {**asdict(cache.provenance), "device": told}
    assert told or all(device.encode() not in file.read_bytes() for file in where.rglob("*") if file.is_file())
    bench.pull(where)
    assert np.array_equal(bench.cache("org/fake", "pulled").activations(PROMPTS, 1), cache.activations(PROMPTS, 1))


def test_what_was_pulled_whole_is_published_as_the_same(bench: Bench, files_of: FilesOf) -> None:
    prompts = [CHAT, *PROMPTS, "abcdefgh" * 12]
    bench.fill(prompts, truncate="right", cache_logits=True, logit_top_k=3, token_perplexity=True)
    where = bench.push(prompts, labels=list(range(10)))
    before = files_of(where)
    bench.pull(where)
    bench.push(prompts, folder="pulled", labels=list(range(10)))

    assert files_of(where) == before
