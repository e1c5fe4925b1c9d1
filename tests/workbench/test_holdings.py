from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from streamtap.errors import InvalidInput, NotCached
from streamtap.workbench.dataset_rows import load_activations, load_rows
from streamtap.workbench.open_dataset import fetch_dataset_metadata

Bench = Any

# Of different lengths, one of a single character, and one twice.
PROMPTS = ["The sky", "is blue at noon", "x", "and red", "in the evening", "is blue at noon", "so", "as a rule it is"]
CHAT = [{"role": "user", "content": "Why is the sky blue?"}]


def same(left: NDArray[Any], right: NDArray[Any]) -> bool:
    return left.dtype == right.dtype and np.array_equal(left, right)


AMBIGUOUS: dict[str, tuple[list[dict[str, Any]], str, list[Any]]] = {
    "pooling": ([{"pooling": "mean"}, {"pooling": "last_token"}], "pooling", ["mean", "last_token"]),
    "dtype": ([{"dtype": "float32"}, {"dtype": "bfloat16"}], "dtype", ["float32", "bfloat16"]),
    "commit": ([{"commit": "c0ffee"}, {"commit": "decade"}], "revision", ["c0ffee", "decade"]),
    "exact": ([{"exact": False}, {"exact": True}], "exact", [False, True]),
    "positions": ([{"positions": "all"}, {"positions": "-2:"}], "positions", ["all", "-2:"]),
    "special": (
        [{"exclude_special_tokens": False}, {"exclude_special_tokens": True}],
        "exclude_special_tokens",
        [0, 1],
    ),
    "quantization": ([{}, {"quantization": "8bit"}], "quantization", ["none", "8bit"]),
    "engine": ([{"engine": "fake"}, {"engine": "other"}], "engine", ["fake", "other"]),
    "tokenizer": ([{"tokenizer": "one"}, {"tokenizer": "two"}], "tokenizer", ["one", "two"]),
    "raw": ([{"pooling": "mean"}, {"cache_pooled": False}], "pooling", ["mean", "none"]),
}


@pytest.mark.parametrize("kind", AMBIGUOUS)
def test_of_several_sets_the_caller_picks_one(kind: str, bench: Bench) -> None:
    ways, argument, values = AMBIGUOUS[kind]
    caches = []
    for way in ways:
        named = {key: way[key] for key in ("commit", "quantization", "engine", "tokenizer") if key in way}
        engine = bench.engine(named=named, dtype=way.get("dtype", "float32"))
        options = {key: value for key, value in way.items() if key not in named and key != "dtype"}
        caches.append(bench.fill(PROMPTS, engine, **options))

    with pytest.raises(
        InvalidInput, match=f"2 different sets of rows of org/fake.*Pick one with {argument}="
    ) as raised:
        bench.push(PROMPTS)
    assert all(f"{argument}={type_of(value, kind)!r}" in str(raised.value) for value in values)
    assert not (bench.root / "set").exists()

    for value, cache, name in zip(values, caches, ("one", "two"), strict=True):
        where = bench.push(PROMPTS, name, **{argument: type_of(value, kind)})
        if value == "none" and kind == "raw":
            assert same(load_rows(where, [2], PROMPTS).acts[2], cache.rows(PROMPTS, [2]).acts[2])
        else:
            acts = load_activations(where, prompts=PROMPTS, dtype=None)
            assert all(same(acts[layer], cache.activations(PROMPTS, layer)) for layer in acts)


def type_of(value: Any, kind: str) -> Any:
    return bool(value) if kind == "special" else value


def test_two_sets_that_no_argument_fits_are_named(bench: Bench) -> None:
    bench.fill(PROMPTS, pooling="mean")
    with pytest.raises(NotCached, match=r"no rows of org/fake as asked for; it holds .*pooling='mean'"):
        bench.push(PROMPTS, pooling="max")
    with pytest.raises(InvalidInput, match="pooling must be one of"):
        bench.push(PROMPTS, pooling="median")


@pytest.mark.parametrize("pooling", ["last_token", "first_token", "mean", "max"])
def test_a_pooling_is_made_of_raw_rows(pooling: str, bench: Bench) -> None:
    cache = bench.fill(PROMPTS, bench.engine(dtype="bfloat16"), cache_pooled=False)
    where = bench.push(PROMPTS, pooling=pooling)
    acts = load_activations(where, prompts=PROMPTS, dtype=None)

    assert fetch_dataset_metadata(where).pooling == pooling
    assert all(same(acts[layer], cache.activations(PROMPTS, layer, pooling)) for layer in acts)


def test_of_raw_rows_and_pooled_ones_together_each_prompt_is_found(bench: Bench) -> None:
    bench.fill(PROMPTS[:4], pooling="mean")
    bench.fill(PROMPTS[4:], cache_pooled=False, pooling="mean")
    acts = load_activations(bench.push(PROMPTS, pooling="mean"), prompts=PROMPTS)

    cache = bench.fill(PROMPTS, folder="other", pooling="mean")
    assert all(same(acts[layer], cache.activations(PROMPTS, layer)) for layer in acts)


def test_layers_are_those_of_raw_rows_and_pooled_ones_together(bench: Bench) -> None:
    raw = bench.fill(PROMPTS, cache_pooled=False, layers=[0, 2, 3])
    pooled = bench.fill(PROMPTS[:3], pooling="mean", layers=[1])
    with pytest.raises(NotCached, match=r"4 lack layer 1 \(prompts 3, 4, 6, 7\)"):
        bench.push(PROMPTS, pooling="mean")
    pooled.warmup(PROMPTS)
    acts = load_activations(bench.push(PROMPTS, pooling="mean"), prompts=PROMPTS, dtype=None)

    assert sorted(acts) == [0, 1, 2, 3]
    for layer in acts:
        cache = pooled if layer == 1 else raw
        assert same(acts[layer], cache.activations(PROMPTS, layer, "mean"))


def test_a_pooled_layer_of_one_prompt_does_not_hide_the_raw_ones(bench: Bench) -> None:
    raw = bench.fill(PROMPTS, cache_pooled=False)
    bench.fill(PROMPTS[:1], bench.engine(), folder="other", pooling="mean", layers=[1])
    # Pooled rows beside raw ones come of another run, and of a pull.
    bench.push(PROMPTS[:1], "one", "other")
    bench.pull("one", "cache")
    acts = load_activations(bench.push(PROMPTS, pooling="mean"), prompts=PROMPTS, dtype=None)

    assert sorted(acts) == [0, 1, 2, 3]
    assert all(same(acts[layer], raw.activations(PROMPTS, layer, "mean")) for layer in acts)


def test_raw_rows_of_some_positions_have_no_place_unpooled(bench: Bench) -> None:
    cache = bench.fill(PROMPTS, cache_pooled=False, positions="-2:")
    with pytest.raises(InvalidInput, match=r"of positions '-2:' without pooling.*Choose a pooling="):
        bench.push(PROMPTS)
    assert not (bench.root / "set").exists()

    acts = load_activations(bench.push(PROMPTS, pooling="mean"), prompts=PROMPTS)
    assert all(same(acts[layer], cache.activations(PROMPTS, layer, "mean")) for layer in acts)


def test_rows_at_positions_of_the_prompts_own_are_refused(bench: Bench) -> None:
    bench.fill([CHAT], positions="role:user", pooling="mean")
    with pytest.raises(NotCached, match="positions that each prompt chose itself"):
        bench.push([CHAT])


def test_an_unknown_model_is_told_which_there_are(bench: Bench) -> None:
    with pytest.raises(NotCached, match="no rows of 'org/other'; it holds no rows at all"):
        bench.push(PROMPTS, model="org/other")
    bench.fill(PROMPTS)
    with pytest.raises(NotCached, match="no rows of 'org/other'; it holds rows of org/fake"):
        bench.push(PROMPTS, model="org/other")


def test_a_chat_of_which_there_are_two_forms_is_picked(bench: Bench) -> None:
    prompts = [CHAT, "The sky"]
    caches = [bench.fill(prompts, generation_prompt=opened) for opened in (False, True)]
    with pytest.raises(InvalidInput, match=r"1 prompts .* several ways.*\(prompts 0\).*generation_prompt="):
        bench.push(prompts)
    for opened, cache in zip((False, True), caches, strict=True):
        where = bench.push(prompts, f"set-{opened}", generation_prompt=opened)
        assert same(load_activations(where, [2], prompts)[2], cache.activations(prompts, 2))


def test_the_form_of_which_there_are_rows_is_taken(bench: Bench) -> None:
    """A chat whose other form was only scored is not taken for missing."""
    bench.fill([CHAT], layers=[])
    cache = bench.fill([CHAT], generation_prompt=True)

    assert same(load_activations(bench.push([CHAT]), 2)[2], cache.activations([CHAT], 2))


def test_a_long_prompt_of_which_there_are_two_cuts_is_picked(bench: Bench) -> None:
    prompts = ["short", "abcdefgh" * 12]
    caches = {side: bench.fill(prompts, truncate=side) for side in ("left", "right")}
    with pytest.raises(InvalidInput, match=r"1 prompts .*\(prompts 1\).*truncate="):
        bench.push(prompts)
    for side, cache in caches.items():
        where = bench.push(prompts, side, truncate=side)
        assert same(load_activations(where, [2], prompts)[2], cache.activations(prompts, 2))


def test_rows_known_by_text_alone_are_not_published_as_ones_own(bench: Bench) -> None:
    with pytest.warns(UserWarning, match="does not record"):
        bench.pull(bench.sample("v2-pooled"))
    info = fetch_dataset_metadata(bench.root / "v2-pooled")
    with pytest.raises(NotCached, match="were pulled from a dataset that does not record how they were made"):
        bench.push(info.prompts, folder="pulled", model=info.model_name)
