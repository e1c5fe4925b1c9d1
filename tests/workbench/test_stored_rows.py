"""Rows out of the cache as they were asked for: from several sets, at chosen positions, and after damage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from streamtap.cache import CacheStore
from streamtap.cache.layout import ChunkLayout
from streamtap.errors import InvalidPositions, NotCached
from streamtap.positions import choose_positions
from streamtap.spec import CaptureSpec, Prompt, as_prompts
from streamtap.testing.fake_engine import FakeEngine
from streamtap.workbench.model_source import GivenEngine
from streamtap.workbench.prompt_keys import PromptKeys
from streamtap.workbench.stored_rows import RowReader
from streamtap.workbench.unified_cache import UnifiedCache

PROMPTS = ["The sky", "is", "blue at noon, as a rule", "and red", "at six"]
OpenCache = Callable[..., UnifiedCache]


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def open_cache(tmp_path: Path, engine: FakeEngine) -> OpenCache:
    def opened(**options: Any) -> UnifiedCache:
        return UnifiedCache(engine, **{"cache_dir": tmp_path, "progress": False, **options})

    return opened


def chosen(engine: FakeEngine, prompt: str, layer: int, positions: Any) -> NDArray[Any]:
    token_ids = np.array(engine.tokenizer.tokenizer(prompt)["input_ids"], np.int32)
    return engine.rows(token_ids, layer)[choose_positions(positions, token_ids)]


def flip(store: CacheStore, part_id: int, channel: str, row: int) -> None:
    """Change one bit of a stored row."""
    path = store.root / "parts" / f"part_{part_id:06d}.bin"
    layout = ChunkLayout.from_json(path.with_suffix(".json").read_text())
    chunk, place = divmod(row, layout.rows_per_chunk)
    offset = chunk * layout.chunk_bytes + layout.offsets[channel] + place * layout.channel(channel).row_bytes
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def texts_run(engine: FakeEngine, since: int) -> set[int]:
    """Numbers of the prompts that were run after the first ``since``."""
    tokens = [tuple(engine.tokenizer.tokenizer(prompt)["input_ids"]) for prompt in PROMPTS]
    return {tokens.index(run.token_ids) for run in engine.runs[since:]}


def owner(engine: FakeEngine, row: int) -> int:
    """Number of the prompt whose pooled row is number ``row`` of the first part: batches are written as they ran."""
    tokens = [tuple(engine.tokenizer.tokenizer(prompt)["input_ids"]) for prompt in PROMPTS]
    return tokens.index(engine.runs[row].token_ids)


def test_prompts_of_several_sets_come_in_order(engine: FakeEngine, open_cache: OpenCache) -> None:
    open_cache(cache_pooled=False).warmup([PROMPTS[3], PROMPTS[0]])
    open_cache(pooling="max", exact=False).warmup([PROMPTS[1]])
    cache = open_cache(pooling="max")
    asked = [PROMPTS[i] for i in (2, 1, 0, 3, 1, 4, 0)]
    stats = cache.warmup(asked)

    assert (stats.activations_cached, stats.activations_extracted) == (5, 2)
    for layer in range(4):
        expected = [chosen(engine, prompt, layer, "all").max(axis=0) for prompt in asked]
        np.testing.assert_array_equal(cache.activations(asked, layer), expected)


def test_unpooled_prompts_of_several_sets_come_in_order(engine: FakeEngine, open_cache: OpenCache) -> None:
    open_cache(cache_pooled=False).warmup(PROMPTS[:2])  # whole prompts
    cache = open_cache(cache_pooled=False, positions="-2:")
    cache.warmup(PROMPTS[3:])
    asked = [PROMPTS[i] for i in (4, 0, 3, 1, 2, 0)]
    acts = cache.rows(asked, [1])

    expected = [chosen(engine, prompt, 1, "-2:") for prompt in asked]
    np.testing.assert_array_equal(acts.acts[1], np.concatenate(expected))
    assert np.diff(acts.offsets).tolist() == [2] * 6


def test_layers_of_several_sets_are_put_together(engine: FakeEngine, open_cache: OpenCache) -> None:
    open_cache(layers=[0, 2]).warmup(PROMPTS)
    open_cache(layers=[1, 3], cache_pooled=False).warmup(PROMPTS)
    since = len(engine.runs)
    acts = open_cache().rows(PROMPTS)

    assert len(engine.runs) == since
    for layer in range(4):
        np.testing.assert_array_equal(acts.acts[layer], [chosen(engine, each, layer, "last")[0] for each in PROMPTS])


@pytest.mark.parametrize("kept", ["pooled", "raw"])
def test_damage_is_healed_by_running_only_what_was_hit(kept: str, engine: FakeEngine, open_cache: OpenCache) -> None:
    cache = open_cache(cache_pooled=kept == "pooled", compute_perplexity=False)
    cache.warmup(PROMPTS)
    flip(cache.store, 1, "layer_2", 0)
    since = len(engine.runs)
    expected = [chosen(engine, prompt, 2, "last")[0] for prompt in PROMPTS]

    np.testing.assert_array_equal(cache.activations(PROMPTS, 2), expected)
    assert texts_run(engine, since) == {owner(engine, 0)}
    since = len(engine.runs)
    np.testing.assert_array_equal(open_cache().activations(PROMPTS, 2), expected)
    assert len(engine.runs) == since
    assert cache.store.verify().sound


def test_damage_at_several_layers_is_healed_in_one_read(engine: FakeEngine, open_cache: OpenCache) -> None:
    cache = open_cache(compute_perplexity=False)
    cache.warmup(PROMPTS)
    for row, layer in ((1, 0), (3, 2), (0, 3)):
        flip(cache.store, 1, f"layer_{layer}", row)
    since = len(engine.runs)
    acts = cache.rows(PROMPTS)

    for layer in range(4):
        np.testing.assert_array_equal(acts.acts[layer], [chosen(engine, each, layer, "last")[0] for each in PROMPTS])
    assert texts_run(engine, since) == {owner(engine, row) for row in (0, 1, 3)}


def test_damage_that_verify_finds_is_run_by_the_next_warm_up(engine: FakeEngine, open_cache: OpenCache) -> None:
    cache = open_cache()
    cache.warmup(PROMPTS)
    flip(cache.store, 1, "layer_1", 2)
    assert len(cache.store.verify().damaged) == 1
    since = len(engine.runs)
    stats = open_cache().warmup(PROMPTS)

    assert (stats.activations_cached, stats.activations_extracted, stats.perplexity_cached) == (4, 1, 5)
    assert texts_run(engine, since) == {owner(engine, 2)}
    assert cache.store.verify().sound
    assert open_cache().warmup(PROMPTS).activations_cached == 5


def test_damaged_perplexity_is_made_again(engine: FakeEngine, open_cache: OpenCache) -> None:
    cache = open_cache(layers=[])
    expected = cache.get_perplexity(PROMPTS)
    flip(cache.store, 1, "perplexity", 4)
    since = len(engine.runs)

    np.testing.assert_array_equal(cache.get_perplexity(PROMPTS), expected)
    assert texts_run(engine, since) == {owner(engine, 4)}


def test_a_lost_part_file_is_made_again(engine: FakeEngine, open_cache: OpenCache) -> None:
    cache = open_cache()
    expected = cache.activations(PROMPTS, 1)
    (cache.store.root / "parts" / "part_000001.bin").unlink()

    np.testing.assert_array_equal(cache.activations(PROMPTS, 1), expected)
    np.testing.assert_array_equal(open_cache().activations(PROMPTS, 1), expected)


@pytest.fixture
def reading(tmp_path: Path, engine: FakeEngine) -> Callable[..., Any]:
    def read(prompts: Sequence[Any], **spec: Any) -> Any:
        with CacheStore(tmp_path) as store:
            asked = CaptureSpec(layers=(), **spec)
            keyed = PromptKeys(store, GivenEngine(engine), asked).find(as_prompts(prompts))
            return RowReader(store, engine.provenance, asked, engine.tokenizer.special_ids).read(keyed, 1)

    return read


def test_what_no_set_has_is_counted(reading: Callable[..., Any], open_cache: OpenCache) -> None:
    open_cache(layers=[1]).warmup(PROMPTS[:2])
    with pytest.raises(NotCached, match="3 of 5 prompts have no rows of layer 1"):
        reading(PROMPTS, pooling="last_token")
    assert len(reading(PROMPTS[:2], pooling="last_token").values) == 2


def test_a_position_that_a_stored_prompt_lacks_is_named_by_its_place(
    reading: Callable[..., Any], open_cache: OpenCache
) -> None:
    open_cache(layers=[1], cache_pooled=False, positions=[5]).warmup(["The sky"])  # in a set of its own
    open_cache(layers=[1], cache_pooled=False).warmup(PROMPTS)
    with pytest.raises(InvalidPositions, match="prompt 1: position 5 is outside its 3 tokens"):
        reading(["The sky", "is"], positions=[5])


def test_positions_of_the_prompts_own_are_found(
    engine: FakeEngine, reading: Callable[..., Any], open_cache: OpenCache
) -> None:
    tokens = engine.tokenizer.tokenizer(PROMPTS[2])["input_ids"]
    own = [
        Prompt(token_ids=tokens, positions=[0, 3]),
        Prompt(token_ids=tokens),
        Prompt(token_ids=tokens, positions=[7]),
    ]
    whole = engine.rows(tokens, 1)
    open_cache(layers=[1], cache_pooled=False, exclude_special_tokens=True).warmup([*own, "is"])

    found = reading(own, exclude_special_tokens=True)
    np.testing.assert_array_equal(found.values, np.concatenate([whole[[0, 3]], whole[1:], whole[[7]]]))
    assert np.diff(found.offsets).tolist() == [2, len(tokens) - 1, 1]
    assert found.positions.tolist() == [0, 3, *range(1, len(tokens)), 7]


def test_own_positions_come_out_of_whole_prompts(
    engine: FakeEngine, reading: Callable[..., Any], open_cache: OpenCache
) -> None:
    open_cache(layers=[1], cache_pooled=False).warmup(PROMPTS)
    tokens = [engine.tokenizer.tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    asked = [Prompt(token_ids=tokens[3], positions=[2]), PROMPTS[0], Prompt(token_ids=tokens[1], positions=[1, 2])]
    since = len(engine.runs)
    found = reading(asked, exclude_special_tokens=True)

    parts = [engine.rows(tokens[3], 1)[[2]], engine.rows(tokens[0], 1)[1:], engine.rows(tokens[1], 1)[[1, 2]]]
    np.testing.assert_array_equal(found.values, np.concatenate(parts))
    assert len(engine.runs) == since
