from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

from streamtap.dataset.names import INDEX
from streamtap.errors import InvalidInput, InvalidLayers, NotCached
from streamtap.workbench.dataset_rows import load_activations
from streamtap.workbench.open_dataset import fetch_dataset_metadata

Bench = Any

# Of different lengths, one of a single character, and one twice.
PROMPTS = ["The sky", "is blue at noon", "x", "and red", "in the evening", "is blue at noon", "so", "as a rule it is"]


def table_of(where: Path) -> Any:
    return pq.read_table(where / INDEX)


def same(left: NDArray[Any], right: NDArray[Any]) -> bool:
    return left.dtype == right.dtype and np.array_equal(left, right)


def test_what_is_missing_is_counted_and_named_by_its_kind(bench: Bench) -> None:
    bench.fill(["complete", "no logits", "one layer"])
    bench.fill(["one layer 2"], layers=[2])
    bench.fill(["complete", "one layer", "one layer 2"], layers=[], cache_logits=True, logit_top_k=3)
    bench.fill(["third", "fourth"], layers=[1, 3], cache_logits=True, logit_top_k=3)
    prompts = ["complete", "never seen", "no logits", "one layer 2", "nor this", "third", "one layer", "fourth"]

    with pytest.raises(NotCached) as raised:
        bench.push(prompts)
    said = str(raised.value)
    assert "6 of 8 prompts are not whole in the cache" in said
    for part in (
        "2 lack rows (prompts 1, 4)",
        "1 lack logits (prompts 2)",
        "1 lack layers 0, 1, 3 (prompts 3)",
        "2 lack layers 0, 2 (prompts 5, 7)",
        "skip_missing=True",
    ):
        assert part in said
    assert not any(text in said for text in prompts)
    assert not (bench.root / "set").exists()


def test_a_long_list_of_missing_prompts_is_cut(bench: Bench) -> None:
    bench.fill(["here"])
    with pytest.raises(NotCached, match=r"20 lack rows \(prompts 1, 2, 3, 4, 5, 6, 7, 8, …\)"):
        bench.push(["here", *(f"absent {i}" for i in range(20))])


@pytest.mark.parametrize("shuffle", [True, False])
def test_skipped_prompts_take_their_labels_and_metadata_with_them(shuffle: bool, bench: Bench) -> None:
    cache = bench.fill(PROMPTS)
    prompts = ["absent", PROMPTS[0], "gone", *PROMPTS[1:4], "away"]
    where = bench.push(
        prompts,
        labels=[f"label {i}" for i in range(7)],
        metadata=[{"n": i} for i in range(7)],
        skip_missing=True,
        shuffle=shuffle,
    )
    rows = table_of(where).to_pylist()

    assert sorted(row["n"] for row in rows) == [1, 3, 4, 5]
    assert all(row["text"] == prompts[row["n"]] and row["label"] == f"label {row['n']}" for row in rows)
    assert shuffle or [row["n"] for row in rows] == [1, 3, 4, 5]
    acts = load_activations(where)
    assert same(acts[1], cache.activations([row["text"] for row in rows], 1))


def test_skipping_everything_is_refused(bench: Bench) -> None:
    bench.fill(PROMPTS)
    with pytest.raises(NotCached, match="none of the 2 prompts is among the rows"):
        bench.push(["absent", "gone"], skip_missing=True)
    bench.fill(["of one layer"], layers=[2])
    with pytest.raises(NotCached, match=r"1 lack rows \(prompts 0\)"):
        bench.push(["of one layer"], skip_missing=True, layers=[1])


def test_logits_that_have_no_place_are_refused_by_name(bench: Bench) -> None:
    bench.fill(PROMPTS, cache_logits=True, logit_positions="all", logit_top_k=3)
    with pytest.raises(InvalidInput, match="of all positions, which have no place in the format.*tensors="):
        bench.push(PROMPTS)
    with pytest.raises(InvalidInput, match="of all positions"):
        bench.push(PROMPTS, tensors=["logits_topk"])

    bench.fill(PROMPTS, folder="whole", cache_logits=True)
    with pytest.raises(InvalidInput, match="of the whole vocabulary.*logit_top_k=50"):
        bench.push(PROMPTS, folder="whole", tensors=["hidden_layers", "logits_topk"])

    bench.push(PROMPTS, tensors=["hidden_layers"])
    assert "shard_index_logits" not in table_of(bench.root / "set").column_names


def test_of_logits_of_several_sizes_the_caller_picks(bench: Bench) -> None:
    caches = [bench.fill(PROMPTS, cache_logits=True, logit_top_k=k) for k in (3, 5)]
    with pytest.raises(InvalidInput, match=r"several sizes \(k = 3, 5\); pick one with logit_top_k="):
        bench.push(PROMPTS)
    with pytest.raises(NotCached, match="no last-position logits with k = 7"):
        bench.push(PROMPTS, logit_top_k=7)

    where = bench.push(PROMPTS, logit_top_k=5)
    bench.pull(where)
    wanted = caches[1].get_logits(PROMPTS)
    found = bench.cache(folder="pulled", cache_logits=True, logit_top_k=5).get_logits(PROMPTS)
    assert same(found.values, wanted.values)
    assert same(found.ids, wanted.ids)


def test_tensors_choose(bench: Bench) -> None:
    bench.fill(PROMPTS)
    with pytest.raises(NotCached, match="no last-position logits of these prompts"):
        bench.push(PROMPTS, tensors=["logits_topk"])
    bench.fill(PROMPTS, cache_logits=True, logit_top_k=3)
    both = fetch_dataset_metadata(bench.push(PROMPTS, "both"))
    only = fetch_dataset_metadata(bench.push(PROMPTS, "only", tensors="logits_topk"))
    rows = fetch_dataset_metadata(bench.push(PROMPTS, "rows", tensors=["hidden_layers"]))

    assert set(both.tensor_descriptors) == {"hidden_layers", "logits_topk"}
    assert (set(only.tensor_descriptors), only.available_layers) == ({"logits_topk"}, [])
    assert set(rows.tensor_descriptors) == {"hidden_layers"}
    for wrong in (["hidden"], [], "router_logits"):
        with pytest.raises(InvalidInput, match="tensors must be some of 'hidden_layers', 'logits_topk'"):
            bench.push(PROMPTS, "wrong", tensors=wrong)


def test_layers_are_those_asked_for_or_all_that_these_prompts_have(bench: Bench) -> None:
    bench.fill(PROMPTS)
    bench.fill(["of two layers", "and this"], layers=[1, 3])

    assert fetch_dataset_metadata(bench.push(PROMPTS, "some", layers=[0, -1])).available_layers == [0, 3]
    assert fetch_dataset_metadata(bench.push(["and this"], "two")).available_layers == [1, 3]
    with pytest.raises(NotCached, match="1 lack layers 0, 2"):
        bench.push([*PROMPTS, "and this"], "all")
    with pytest.raises(InvalidLayers, match="layer 9 is not in the model"):
        bench.push(PROMPTS, "nine", layers=9)
    with pytest.raises(InvalidLayers, match="no layers were asked for"):
        bench.push(PROMPTS, "none", layers=[])
