"""A probe of prompts takes its rows from a cache, learns what one of arrays learns, and says what it cannot do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamtap.errors import (
    InvalidInput,
    InvalidLayers,
    InvalidPrompt,
    InvalidRows,
    PoolingMismatch,
    Unsupported,
)
from streamtap.spec import Prompt
from streamtap.testing.fake_engine import FakeEngine
from streamtap.workbench.probe import Probe
from streamtap.workbench.unified_cache import UnifiedCache

PROMPTS = [f"prompt {i} of several" for i in range(40)]
TRAIN, TEST = PROMPTS[:30], PROMPTS[30:]
LAYER = 2


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(hidden=16)


@pytest.fixture
def probe(engine: FakeEngine, tmp_path: Path) -> Probe:
    return Probe(random_state=0, model=engine, layer=LAYER, cache_dir=tmp_path)


def rows_of(engine: FakeEngine, prompts: list[str], layer: int = LAYER) -> Any:
    ids = [engine.tokenizer.tokenizer(prompt)["input_ids"] for prompt in prompts]
    return np.stack([engine.rows(each, layer)[-1] for each in ids])


def labels_of(engine: FakeEngine, prompts: list[str]) -> Any:
    """What a line can tell: the sign of the row's first number."""
    return (rows_of(engine, prompts)[:, 0] > 0).astype(int)


def test_it_learns_and_predicts_what_a_probe_of_those_arrays_does(engine: FakeEngine, probe: Probe) -> None:
    labels = labels_of(engine, PROMPTS)
    probe.fit(TRAIN, labels[:30])
    plain = Probe(random_state=0).fit_from_activations(rows_of(engine, TRAIN), labels[:30])
    rows = rows_of(engine, TEST)

    assert probe.direction_ is not None
    np.testing.assert_array_equal(probe.direction_, plain.direction_)
    np.testing.assert_array_equal(probe.predict(TEST), plain.predict_from_activations(rows))
    np.testing.assert_array_equal(probe.predict_proba(TEST), plain.predict_proba_from_activations(rows))
    assert probe.score(TEST, labels[30:]) == plain.score_from_activations(rows, labels[30:])
    assert probe.evaluate(TEST, labels[30:]) == plain.evaluate_from_activations(rows, labels[30:])
    assert probe.score(TRAIN, labels[:30]) > 0.9


def test_one_layer_runs_without_scores_and_no_prompt_twice(engine: FakeEngine, probe: Probe, tmp_path: Path) -> None:
    labels = labels_of(engine, PROMPTS)
    probe.fit(TRAIN, labels[:30])
    probe.predict(PROMPTS)
    assert [(run.layers, run.scores) for run in engine.runs] == [((LAYER,), ())] * len(PROMPTS)

    again = Probe(model=engine, layer=LAYER, cache_dir=tmp_path).fit(PROMPTS, labels)
    assert again.score(PROMPTS, labels) > 0.9
    assert len(engine.runs) == len(PROMPTS)


@pytest.mark.parametrize("layer", [-2, "2", [2], "middle"])
def test_a_layer_may_be_named_in_any_way_that_names_one(layer: Any, engine: FakeEngine, tmp_path: Path) -> None:
    probe = Probe(model=engine, layer=layer, cache_dir=tmp_path).fit(TRAIN, labels_of(engine, TRAIN))
    assert probe.layer_ == LAYER
    assert {run.layers for run in engine.runs} == {(LAYER,)}


@pytest.mark.parametrize(
    ("layer", "error", "message"),
    [
        ("all", InvalidInput, "reads one layer, and 'all' names 4"),
        ([1, 2], InvalidInput, "names 2; name one with layer="),
        (None, InvalidInput, "reads one layer of its model; name it"),
        (9, InvalidLayers, "9"),
    ],
)
def test_other_layers_are_refused(layer: Any, error: Any, message: str, engine: FakeEngine, tmp_path: Path) -> None:
    with pytest.raises(error, match=message):
        Probe(model=engine, layer=layer, cache_dir=tmp_path).fit(TRAIN, labels_of(engine, TRAIN))
    assert engine.runs == []


@pytest.mark.parametrize("pooling", ["mean", "first_token", "max"])
def test_pooling_is_the_one_asked_for(pooling: Any, engine: FakeEngine, tmp_path: Path) -> None:
    prompts, labels = ["ab", "abc", "b", "bcd"], [1, 1, 0, 0]
    probe = Probe(model=engine, layer=LAYER, pooling=pooling, cache_dir=tmp_path).fit(prompts, labels)
    cache = UnifiedCache(
        engine, compute_perplexity=False, pooling=pooling, cache_dir=tmp_path / "other", progress=False
    )
    plain = Probe().fit_from_activations(cache.activations(prompts, LAYER), labels)
    assert np.array_equal(probe.direction_, plain.direction_)


def test_no_pooling_is_refused(engine: FakeEngine, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="one row a prompt"):
        Probe(model=engine, layer=LAYER, pooling="none", cache_dir=tmp_path).fit(TRAIN, labels_of(engine, TRAIN))


def test_positive_and_negative_prompts_are_labels_one_and_zero(engine: FakeEngine, probe: Probe) -> None:
    positive, negative = TRAIN[:18], TRAIN[18:]
    probe.fit(positive, negative)
    labelled = Probe(random_state=0).fit_from_activations(rows_of(engine, TRAIN), [1] * 18 + [0] * 12)
    assert probe.classes_.tolist() == [0, 1]
    assert np.array_equal(probe.direction_, labelled.direction_)
    assert np.array_equal(probe.predict(TEST), labelled.predict_from_activations(rows_of(engine, TEST)))


def chats(texts: list[str]) -> list[Any]:
    return [[{"role": "user", "content": text}] for text in texts]


@pytest.mark.parametrize(
    ("positive", "negative"),
    [
        (["aa", "ab"], ("ba", "bb")),
        ([[5, 6], [7]], [[8], [9, 10]]),
        ([np.array([5, 6])], [np.array([7])]),
        ([Prompt(text="aa"), Prompt(text="ab")], [Prompt(text="ba"), Prompt(text="ba")]),
        ([Prompt(token_ids=[5])], [Prompt(token_ids=np.array([6]))]),
    ],
)
def test_prompts_of_every_kind_may_be_negative(positive: Any, negative: Any, probe: Probe) -> None:
    probe.fit(positive, negative)
    assert probe.predict([*positive, *negative]).tolist() == [1] * len(positive) + [0] * len(negative)


@pytest.mark.parametrize("labels", [np.array(["yes", "no"] * 15), np.array(["yes", "no"] * 15, dtype=object)])
def test_an_array_of_texts_is_labels(labels: Any, probe: Probe) -> None:
    probe.fit(TRAIN, labels)
    assert probe.classes_.tolist() == ["no", "yes"]


@pytest.mark.parametrize(
    ("prompts", "second", "message"),
    [
        (TRAIN, ["yes", "no"] * 15, r"may be labels or negative prompts: give labels of text as an array"),
        ([[5], [6], [7]], [[0, 1], [1, 0], [0, 1]], "may be labels or negative prompts"),
        (TRAIN, [[0, 1]] * 30, "holds token ids where the prompts are texts"),
        (TRAIN, chats(TEST), "holds chats where the prompts are texts"),
    ],
)
def test_a_second_list_in_doubt_is_refused(
    prompts: Any, second: Any, message: str, engine: FakeEngine, probe: Probe
) -> None:
    with pytest.raises(InvalidInput, match=message):
        probe.fit(prompts, second)
    assert engine.runs == []


@pytest.mark.parametrize(
    ("prompts", "labels", "error", "message"),
    [
        (TRAIN, [0, 1], InvalidRows, "for each of the 30 rows; got 2"),
        (TRAIN, [1] * 30, InvalidRows, "at least 2 classes"),
        (TRAIN, [], InvalidRows, "got 0"),
        (TRAIN, "yes", InvalidRows, "expected a sequence"),
        (["good", ""], [0, 1], InvalidPrompt, "prompt 1 is an empty string"),
        ([], [], InvalidInput, "at least one prompt"),
        ("good", [1], InvalidInput, "got one string"),
        (["good", "better"], ["bad", ""], InvalidPrompt, "prompt 1"),
    ],
)
def test_bad_examples_are_refused_before_any_prompt_runs(
    prompts: Any, labels: Any, error: Any, message: str, engine: FakeEngine, probe: Probe
) -> None:
    with pytest.raises(error, match=message):
        probe.fit(prompts, labels)
    assert engine.runs == []


def test_a_wrong_classifier_is_refused_before_any_prompt_runs(engine: FakeEngine, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="forest"):
        Probe("forest", model=engine, layer=LAYER, cache_dir=tmp_path).fit(TRAIN, labels_of(engine, TRAIN))
    assert engine.runs == []


def test_what_cannot_be_told_is_refused_before_any_prompt_runs(engine: FakeEngine, tmp_path: Path) -> None:
    ridge = Probe("ridge", model=engine, layer=LAYER, cache_dir=tmp_path)
    ridge.fit_from_activations(rows_of(engine, TRAIN), labels_of(engine, TRAIN))
    with pytest.raises(Unsupported, match="gives no probabilities"):
        ridge.predict_proba(TEST)
    with pytest.raises(InvalidRows, match="for each of the 10 rows"):
        ridge.score(TEST, [1])
    with pytest.raises(InvalidInput, match="at least one prompt"):
        ridge.predict([])
    assert engine.runs == []
    assert ridge.score(TEST, labels_of(engine, TEST)) > 0.5


@pytest.mark.parametrize("method", ["predict", "predict_proba", "score", "evaluate"])
def test_before_fit(method: str, engine: FakeEngine, probe: Probe) -> None:
    arguments = (TEST,) if method.startswith("predict") else (TEST, [0] * len(TEST))
    with pytest.raises(InvalidInput, match=r"not fitted yet; call fit_from_activations\(X, y\), or fit"):
        getattr(probe, method)(*arguments)
    assert engine.runs == []


def test_without_a_model_it_says_how_to_name_one(engine: FakeEngine) -> None:
    with pytest.raises(InvalidInput, match=r"no model to run prompts with: make it with Probe\(model=…, layer=…\)"):
        Probe().fit(TRAIN, labels_of(engine, TRAIN))
    fitted = Probe().fit_from_activations(rows_of(engine, TRAIN), labels_of(engine, TRAIN))
    for work in (fitted.predict, fitted.predict_proba):
        with pytest.raises(InvalidInput, match="no model to run prompts with"):
            work(TEST)


def test_rows_fitted_by_layer_are_what_prompts_are_read_at(engine: FakeEngine, tmp_path: Path) -> None:
    labels = labels_of(engine, TRAIN)
    cache = UnifiedCache(engine, compute_perplexity=False, cache_dir=tmp_path, progress=False)
    held = cache.rows(TRAIN)
    probe = Probe(random_state=0, model=engine, cache_dir=tmp_path).fit_from_activations(held, labels, layer=LAYER)
    expected = probe.predict_from_activations(rows_of(engine, TEST))
    assert np.array_equal(probe.predict(TEST), expected)
    other = Probe(model=engine, layer=3, cache_dir=tmp_path).fit_from_activations(held, labels, layer=LAYER)
    with pytest.raises(InvalidInput, match="fitted on layer 2 and asks for prompts' rows at layer 3"):
        other.predict(TEST)


def test_a_failed_fit_leaves_the_earlier_one(engine: FakeEngine, probe: Probe) -> None:
    before = probe.fit(TRAIN, labels_of(engine, TRAIN)).predict(TEST)
    with pytest.raises(InvalidRows):
        probe.fit(TRAIN, [1] * 30)
    assert np.array_equal(probe.predict(TEST), before)


def test_a_cache_that_is_given_is_used_and_left_open(engine: FakeEngine, tmp_path: Path) -> None:
    cache = UnifiedCache(engine, layers=[LAYER], compute_perplexity=False, cache_dir=tmp_path, progress=False)
    cache.warmup(PROMPTS)
    with_layer, without = Probe(cache=cache, layer=LAYER), Probe(cache=cache)
    labels = labels_of(engine, TRAIN)
    assert np.array_equal(with_layer.fit(TRAIN, labels).predict(TEST), without.fit(TRAIN, labels).predict(TEST))
    assert without.layer_ == LAYER
    without.close()
    assert cache.activations(TEST, LAYER).shape == (10, 16)
    assert len(engine.runs) == len(PROMPTS)


def test_a_cache_of_every_row_serves_any_pooling(engine: FakeEngine, tmp_path: Path) -> None:
    cache = UnifiedCache(engine, compute_perplexity=False, cache_pooled=False, cache_dir=tmp_path, progress=False)
    labels = labels_of(engine, TRAIN)
    for pooling in ("mean", "last_token"):
        assert Probe(cache=cache, layer=LAYER, pooling=pooling).fit(TRAIN, labels).layer_ == LAYER
    assert len(engine.runs) == len(TRAIN)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"pooling": "mean"}, PoolingMismatch, "asks for pooling 'mean' and the cache given keeps 'last_token'"),
        ({"model": "demo"}, InvalidInput, "model cannot be set beside cache="),
        ({"backend": "api", "api_key": "k"}, InvalidInput, "backend, api_key cannot be set beside cache="),
        ({"layer": None}, InvalidInput, "'all' names 4"),
        ({"cache": "a-folder"}, InvalidInput, r"cache must be a UnifiedCache; got str.*cache_dir="),
    ],
)
def test_a_cache_that_does_not_fit_is_refused(
    options: dict[str, Any], error: Any, message: str, engine: FakeEngine, tmp_path: Path
) -> None:
    cache = UnifiedCache(engine, compute_perplexity=False, cache_dir=tmp_path, progress=False)
    with pytest.raises(error, match=message):
        Probe(**{"cache": cache, "layer": LAYER, **options}).fit(TRAIN, labels_of(engine, TRAIN))
    assert engine.runs == []


def test_closed_it_opens_again(engine: FakeEngine, probe: Probe) -> None:
    before = probe.fit(TRAIN, labels_of(engine, TRAIN)).predict(TEST)
    probe.close()
    probe.close()
    assert np.array_equal(probe.predict(TEST), before)
    assert len(engine.runs) == len(PROMPTS)


def test_the_rows_of_a_service_are_learnt_from_like_any(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    served = FakeEngine(dtype="bfloat16", hidden=16, named={"engine": "api", "commit": "api:here#m"})
    asked: list[dict[str, Any]] = []

    def load(model: str, **options: Any) -> FakeEngine:
        asked.append({"model": model, **options})
        return served

    monkeypatch.setattr("streamtap.workbench.served_model.load_engine", load)
    where = {"backend": "api", "api_base": "http://127.0.0.1:9/v1", "api_key": "secret"}
    probe = Probe(random_state=0, model="m", layer=LAYER, cache_dir=tmp_path, **where)  # type: ignore[arg-type]
    labels = labels_of(served, PROMPTS)
    probe.fit(TRAIN, labels[:30])
    plain = Probe(random_state=0).fit_from_activations(rows_of(served, TRAIN), labels[:30])
    assert np.array_equal(probe.direction_, plain.direction_)
    assert probe.score(TEST, labels[30:]) == plain.score_from_activations(rows_of(served, TEST), labels[30:])
    assert asked == [{"model": "m", "revision": None, "dtype": "auto", **where}]
    assert {run.layers for run in served.runs} == {(LAYER,)}
    probe.close()
    assert served.closed


def test_how_the_model_is_run_is_the_caches(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, engine: FakeEngine
) -> None:
    """Every choice reaches the cache under its name: here one that notes them and then runs the fake engine."""
    asked: dict[str, Any] = {}

    class Noting(UnifiedCache):
        def __init__(self, model: Any, **options: Any) -> None:
            asked.update(options, model=model)
            super().__init__(engine, layers=LAYER, compute_perplexity=False, cache_dir=tmp_path, progress=False)

    monkeypatch.setattr("streamtap.workbench.unified_cache.UnifiedCache", Noting)
    choices = {"backend": "api", "api_base": "http://127.0.0.1:9/v1", "api_key": "secret", "batch_size": 3}
    choices |= {"device": "cuda:1", "dtype": "float32", "remote": False, "pooling": "last_token", "cache_dir": tmp_path}
    probe = Probe(model="served", layer=LAYER, **choices).fit(TRAIN, labels_of(engine, TRAIN))  # type: ignore[arg-type]
    assert asked == {"model": "served", "layers": LAYER, "compute_perplexity": False, **choices}
    assert "secret" not in repr(probe) + repr(probe.source)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"backend": "elsewhere"}, InvalidInput, "backend must be one of"),
        ({"remote": True}, Unsupported, "backend='nnsight'"),
    ],
)
def test_a_backend_that_is_none_is_refused(options: dict[str, Any], error: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=message):
        Probe(model="demo", layer=1, cache_dir=tmp_path, **options).fit(["a", "b"], [0, 1])
