"""Rows of a service's model, one completion for each sequence: what is asked, how much at once, what comes of it."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from streamtap.activations import Activations, join
from streamtap.engines.api import ApiEngine
from streamtap.engines.tokenizing import PromptTokenizer
from streamtap.errors import (
    CaptureMissed,
    CapturePromptTooLong,
    InvalidLayers,
    PromptTooLong,
    Unsupported,
)
from streamtap.pooling import pool
from streamtap.spec import CaptureSpec, Prompt
from streamtap.testing.characters import VOCABULARY, CharacterTokenizer
from streamtap.testing.fake_completer import FakeCompleter
from streamtap.testing.fake_text import log_of
from streamtap.testing.stub_harvests import MODEL
from streamtap.testing.stub_service import EXTENSIONS, StubService

CONTEXT = 64
PROMPTS = ["The sky is", "blue", "or grey, at times"]
Load = Callable[..., ApiEngine]


@pytest.fixture
def service(tmp_path: Path) -> StubService:
    return StubService(tmp_path, engine=FakeCompleter(dtype="float32", context_tokens=CONTEXT))


@pytest.fixture
def loading() -> dict[str, Any]:
    return {"tokenizer": PromptTokenizer(CharacterTokenizer(), context_length=CONTEXT, vocabulary=VOCABULARY)}


def capture(engine: ApiEngine, prompts: Any = PROMPTS, **spec: Any) -> Activations:
    return join(list(engine.capture(prompts, CaptureSpec(**spec))))


def ids_of(engine: ApiEngine, prompt: Any) -> list[int]:
    return [int(token) for token in engine.tokenizer.read(prompt, 0)]


def rows_of(service: StubService, ids: list[int], layer: int) -> Any:
    return service.engine.rows_engine.rows(ids, layer).astype(ml_dtypes.bfloat16)


def test_each_sequence_is_one_completion_for_the_layers_that_are_kept(service: StubService, load: Load) -> None:
    engine = load()

    acts = capture(engine, layers=[1, 3])

    assert engine.last_way.startswith("inline: 3 sequences")
    assert sorted(len(body["prompt"]) for body in service.asked) == sorted(len(ids_of(engine, p)) for p in PROMPTS)
    for body in service.asked:
        expected = {"model": MODEL, "max_tokens": 1, "temperature": 0.0, "output_residual_stream": [1, 3]}
        assert {name: value for name, value in body.items() if name != "prompt"} == expected
    assert acts.provenance == engine.provenance
    for place, prompt in enumerate(PROMPTS):
        ids = ids_of(engine, prompt)
        for layer, rows in acts.prompt(place).items():
            assert rows.dtype == ml_dtypes.bfloat16
            np.testing.assert_array_equal(rows, rows_of(service, ids, layer))


def test_equal_prompts_are_asked_for_once(service: StubService, load: Load) -> None:
    acts = capture(load(), ["same", "other", "same"], layers=[0])

    assert len(service.asked) == 2
    np.testing.assert_array_equal(acts.prompt(0)[0], acts.prompt(2)[0])


@pytest.mark.parametrize("pooling", ["last_token", "first_token"])
def test_a_row_a_prompt_is_all_that_crosses_the_wire(service: StubService, load: Load, pooling: Any) -> None:
    """V28: a request for the last token ships about layers x hidden x itemsize, however long the prompt is."""
    engine = load()
    prompt = "x" * (CONTEXT - 3)
    capture(engine, [prompt], layers="all", pooling="none")
    whole, service.sent_bytes = service.sent_bytes, 0

    acts = capture(engine, [prompt], layers="all", pooling=pooling)

    payload = 4 * 8 * 2
    assert service.sent_bytes < 4 / 3 * payload + 600, "one row a layer as base64, and the JSON around it"
    assert whole > CONTEXT / 4 * payload
    expected = rows_of(service, ids_of(engine, prompt), 2)
    np.testing.assert_array_equal(acts.acts[2], expected[[-1 if pooling == "last_token" else 0]])
    assert service.asked[1]["output_positions"] == ("last" if pooling == "last_token" else [0])


@pytest.mark.parametrize("pooling", ["mean", "max"])
def test_rows_are_pooled_here_where_no_server_does_it(service: StubService, load: Load, pooling: Any) -> None:
    engine = load()

    acts = capture(engine, PROMPTS[:1], layers=[2], pooling=pooling)

    rows = rows_of(service, ids_of(engine, PROMPTS[0]), 2)
    np.testing.assert_array_equal(acts.acts[2], pool(rows, np.array([0, len(rows)]), pooling))


def test_chosen_positions_are_chosen_there(service: StubService, load: Load) -> None:
    engine = load()

    acts = capture(engine, [Prompt(token_ids=(5, 6, 7, 8, 9), positions=(1, 3))], layers=[0], perplexity=True)

    assert service.asked[0]["output_positions"] == [1, 3]
    np.testing.assert_array_equal(acts.acts[0], rows_of(service, [5, 6, 7, 8, 9], 0)[[1, 3]])
    assert acts.positions.tolist() == [1, 3]


def test_a_service_without_our_extensions_sends_all_rows_and_we_choose(service: StubService, load: Load) -> None:
    service.can = dict.fromkeys(EXTENSIONS)
    engine = load(harvest_from=1)

    acts = capture(engine, PROMPTS, layers=[1], positions="last")
    mean = capture(engine, PROMPTS, layers=[1], pooling="mean")

    assert engine.last_way.startswith("inline")
    known = {"model", "prompt", "max_tokens", "temperature", "output_residual_stream"}
    assert all(set(body) == known for body in service.asked)
    for place, prompt in enumerate(PROMPTS):
        rows = rows_of(service, ids_of(engine, prompt), 1)
        np.testing.assert_array_equal(acts.prompt(place)[1], rows[-1:])
        np.testing.assert_array_equal(mean.prompt(place)[1], pool(rows, np.array([0, len(rows)]), "mean"))


def test_float32_comes_where_the_service_sends_it(service: StubService, load: Load) -> None:
    engine = load(dtype="float32")

    acts = capture(engine, PROMPTS[:1], layers=[2])

    assert engine.provenance.dtype == "float32"
    assert service.asked[0]["output_dtype"] == "float32"
    expected = service.engine.rows_engine.rows(ids_of(engine, PROMPTS[0]), 2)
    np.testing.assert_array_equal(acts.acts[2], expected)


def test_likelihoods_are_those_of_the_prompts_tokens(service: StubService, load: Load) -> None:
    engine = load()

    acts = capture(engine, [PROMPTS[0], (7,)], layers=[0], perplexity=True, token_nll=True)
    bare = capture(engine, PROMPTS[:1], layers=(), token_nll=True)

    ids = ids_of(engine, PROMPTS[0])
    expected = [-(log_of(token, ids[:place], 0, 0).logprob or 0) for place, token in enumerate(ids)][1:]
    assert acts.token_nll is not None
    assert bare.token_nll is not None
    np.testing.assert_allclose(acts.token_nll[0], expected, rtol=1e-6)
    np.testing.assert_allclose(bare.token_nll[0], expected, rtol=1e-6)
    assert acts.token_nll[1].shape == (0,)
    asked = sorted(service.asked, key=lambda body: len(body["prompt"]))
    assert "prompt_logprobs" not in asked[0], "a single token has no likelihood"
    assert [body["prompt_logprobs"] for body in asked[1:]] == [0, 0]
    assert "output_residual_stream" not in service.asked[-1]


def test_a_prompt_that_fills_the_context_writes_nothing(service: StubService, load: Load) -> None:
    engine = load()

    acts = capture(engine, [[9] * CONTEXT], layers=[0])

    assert service.asked[0]["max_tokens"] == 0
    assert len(acts.acts[0]) == CONTEXT


def test_where_each_prompt_writes_a_token_it_is_one_shorter(service: StubService, load: Load) -> None:
    service.can = dict.fromkeys(EXTENSIONS)
    engine = load(tokenizer=CharacterTokenizer())

    with pytest.raises(PromptTooLong, match="prompt 0 has 64 tokens; there is room for 63"):
        capture(engine, [[9] * CONTEXT], layers=[0])
    acts = capture(engine, [[9] * CONTEXT], layers=[0], truncate="right")

    assert len(acts.acts[0]) == CONTEXT - 1


def test_a_capture_over_the_cap_comes_in_fewer_layers_at_a_time(service: StubService, load: Load) -> None:
    service.can = {"max_activation_prompt_tokens": 10}
    engine = load()

    acts = capture(engine, [[9] * 20], layers="all", token_nll=True)

    assert [body["output_residual_stream"] for body in service.asked] == [[0, 1], [2, 3]]
    assert ["prompt_logprobs" in body for body in service.asked] == [True, False]
    for layer in range(4):
        np.testing.assert_array_equal(acts.acts[layer], rows_of(service, [9] * 20, layer))


@pytest.mark.parametrize(("least", "requests"), [(0, 1), (1, 2), (None, 2)])
def test_positions_that_only_cross_the_wire_count_where_no_others_were_captured(
    service: StubService, load: Load, least: int | None, requests: int
) -> None:
    service.can = {"max_activation_prompt_tokens": 10, "least_max_tokens": least}

    acts = capture(load(), [[9] * 20], layers="all", pooling="last_token")

    assert [body["output_positions"] for body in service.asked] == ["last"] * requests
    np.testing.assert_array_equal(acts.acts[3], rows_of(service, [9] * 20, 3)[-1:])


@pytest.mark.parametrize("most", [1, 3, 100])
def test_no_more_requests_are_under_way_than_a_key_may_have(service: StubService, load: Load, most: int) -> None:
    service.can, service.seconds = {"max_inflight_per_key": most}, 0.05
    engine = load()

    capture(engine, [[5, i] for i in range(3 * min(most, 16))], layers=[0], pooling="last_token")

    assert service.most_at_once == min(most, 16)


def test_two_captures_at_once_share_what_a_key_may_have(service: StubService, load: Load) -> None:
    service.can, service.seconds = {"max_inflight_per_key": 3}, 0.02
    engine = load()
    threads = [
        threading.Thread(target=capture, args=(engine, [[k, i] for i in range(20)]), kwargs={"layers": [0]})
        for k in (5, 6)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()

    assert len(service.asked) == 40
    assert service.most_at_once == 3


def test_a_slow_reader_is_waited_for(service: StubService, load: Load) -> None:
    """Memory holds what is under way, whatever the reader does."""
    service.can = {"max_inflight_per_key": 4}
    engine = load(harvest_from=None)
    prompts = ([5 + i % 90, 5 + i // 90] for i in range(1000))

    parts = engine.capture(prompts, CaptureSpec(layers=[0]), ordered=False)
    next(parts)
    threading.Event().wait(0.3)

    assert 64 <= len(service.asked) <= 64 + 2 * 4, "a part is 64 sequences"
    parts.close()  # type: ignore[attr-defined]
    threading.Event().wait(0.1)
    assert len(service.asked) <= 64 + 2 * 4, "nobody reads any more"


@pytest.mark.parametrize("fault", ["missing_layer", "short", "nan"])
def test_rows_that_are_not_whole_are_no_rows(service: StubService, load: Load, fault: Any) -> None:
    service.engine.fault = fault

    with pytest.raises(CaptureMissed):
        capture(load(), layers=[0, 2])


@pytest.mark.parametrize("wrong", ["tokens", "positions"])
def test_another_prompts_rows_are_refused(
    service: StubService, load: Load, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, swapped = load(), itertools.count()
    ask = engine._client.complete

    def other(prompt: Any, **options: Any) -> Any:
        next(swapped)
        if wrong == "positions":
            return ask(prompt, **{**options, "output_positions": [0]})
        return ask(prompt[::-1], **options)

    monkeypatch.setattr(engine._client, "complete", other)
    with pytest.raises(CaptureMissed):
        capture(engine, [[5, 6, 7]], layers=[0], positions="last")
    assert next(swapped) == 1


def test_the_likelihoods_of_other_tokens_are_refused(
    service: StubService, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load()
    ask = engine._client.complete
    monkeypatch.setattr(engine._client, "complete", lambda prompt, **options: ask(prompt[::-1], **options))

    with pytest.raises(CaptureMissed, match="no log-likelihood of token 1 of prompt 0"):
        capture(engine, [[5, 6, 7, 8]], layers=(), token_nll=True)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"exact": True}, "take backend='local'"),
        ({"logits": "last"}, "a service sends no logits; take backend='local'"),
        ({"logits": "all", "logit_top_k": 3}, "a service sends no logits"),
    ],
)
def test_what_a_service_cannot_do_is_refused_before_any_work(
    service: StubService, load: Load, spec: dict[str, Any], message: str
) -> None:
    engine = load()

    with pytest.raises(Unsupported, match=message):
        engine.capture(PROMPTS, CaptureSpec(layers=[0], **spec))
    assert service.asked == []


def test_perplexity_needs_a_service_that_has_it(service: StubService, load: Load) -> None:
    service.can = {"prompt_logprobs": False}

    with pytest.raises(Unsupported, match="no log-probabilities of prompts"):
        load().capture(PROMPTS, CaptureSpec(layers=[0], perplexity=True))


def test_layers_are_refused_here(service: StubService, load: Load) -> None:
    with pytest.raises(InvalidLayers):
        load().capture(PROMPTS, CaptureSpec(layers=[4]))
    assert service.asked == []


def test_a_refusal_names_the_prompt_by_the_callers_number(service: StubService, load: Load) -> None:
    """To the service each prompt is the only one."""
    engine = load(tokenizer=PromptTokenizer(None, context_length=1000, vocabulary=VOCABULARY))

    with pytest.raises(PromptTooLong) as caught:
        capture(engine, [[5], [6, 7], [8] * (CONTEXT + 1)], layers=[0])

    assert caught.value.index == 2
    assert not isinstance(caught.value, CapturePromptTooLong)
    assert "It is prompt 2 of those that were asked for." in caught.value.__notes__


def test_no_prompt_is_in_the_log(service: StubService, load: Load, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        capture(load(), ["a secret sentence"], layers=[0])

    assert "rows of stub come inline: 1 sequences, a request for each, 16 at once" in caplog.text
    assert "secret" not in caplog.text
