"""The dialect of engine processes, both ways, and what vLLM itself is never asked."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from streamtap.completion import CaptureAsk, CompletionRequest, Sampling, SteeringVector
from streamtap.engines.vllm import DialectOptions, from_dialect, to_dialect, to_vllm
from streamtap.engines.vllm_limits import check_vllm_can, for_vllm
from streamtap.errors import InvalidInput, InvalidLayers, SteeringNotFinite, SteeringUnsupported, Unsupported

N_LAYERS, HIDDEN = 4, 3
VECTOR = SteeringVector((1,), np.ones((1, HIDDEN), np.float32))


def sent(request: CompletionRequest, *, stream: bool = False, include_usage: bool = False) -> dict[str, Any]:
    body = to_dialect(request, model="m", stream=stream, include_usage=include_usage)
    return json.loads(json.dumps(body))


def received(body: dict[str, Any]) -> CompletionRequest:
    return from_dialect(body, n_layers=N_LAYERS, hidden=HIDDEN)[0]


def test_a_plain_request() -> None:
    assert sent(CompletionRequest(("a",), 5)) == {
        **{"model": "m", "prompt": "a", "max_tokens": 5, "n": 1, "temperature": 1.0, "top_p": 1.0, "top_k": -1},
        **{"min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0},
        **{"echo": False, "add_special_tokens": True, "stream": False},
    }


def test_a_capture_and_a_vector_are_what_vllm_lens_reads() -> None:
    body = sent(CompletionRequest(((1, 2),), 1, capture=CaptureAsk((1, 3)), steering=(VECTOR,)))

    assert body["prompt"] == [1, 2]
    assert set(body["vllm_xargs"]) == {"output_residual_stream", "apply_steering_vectors"}
    assert body["vllm_xargs"]["output_residual_stream"] == [1, 3]
    (vector,) = json.loads(body["vllm_xargs"]["apply_steering_vectors"])
    assert set(vector) == {"activations", "layer_indices", "scale", "norm_match"}


def test_what_only_our_worker_knows_is_written_where_it_was_asked() -> None:
    arguments = sent(CompletionRequest(("a",), 1, capture=CaptureAsk((1,), (0, 2), "float32")))["vllm_xargs"]

    assert arguments == {"output_residual_stream": [1], "output_positions": [0, 2], "output_dtype": "float32"}


@pytest.mark.parametrize("layers", [True, "true", [0, 1, 2, 3], "[0,1,2,3]", "[3, 2, 1, 0, 0]"])
def test_layers_come_in_any_form_that_vllm_takes(layers: Any) -> None:
    body = {"prompt": "a", "max_tokens": 1, "vllm_xargs": {"output_residual_stream": layers}}

    assert received(body).capture == CaptureAsk((0, 1, 2, 3))


@pytest.mark.parametrize("layers", [False, "false", None, "null"])
def test_no_layers_are_no_capture(layers: Any) -> None:
    body = {"prompt": "a", "max_tokens": 1, "vllm_xargs": {"output_residual_stream": layers}}

    assert received(body).capture is None


@pytest.mark.parametrize("positions", ["last", [0, 1], "[1, 0]"])
def test_positions_come_as_a_word_or_a_list(positions: Any) -> None:
    arguments = {"output_residual_stream": True, "output_positions": positions}

    capture = received({"prompt": "a", "max_tokens": 1, "vllm_xargs": arguments}).capture

    assert capture is not None
    assert capture.positions == ("last" if positions == "last" else (0, 1))


def test_how_to_answer() -> None:
    request = CompletionRequest(("a",), 1, stream=True)

    _, options = from_dialect(sent(request, stream=True, include_usage=True), n_layers=4, hidden=3)
    assert options == DialectOptions("m", True, True)
    _, options = from_dialect(sent(request, stream=True), n_layers=4, hidden=3)
    assert options == DialectOptions("m", True, False)


def test_a_vector_that_grew_on_its_way_is_taken() -> None:
    noise = np.random.default_rng(0).standard_normal((4, 20_000)).astype(np.float32)
    vector = SteeringVector((0, 1, 2, 3), noise)
    body = sent(CompletionRequest(("a",), 1, steering=(vector, vector)))
    assert len(body["vllm_xargs"]["apply_steering_vectors"]) > 600_000

    request, _ = from_dialect(body, n_layers=4, hidden=20_000)

    assert np.array_equal(request.steering[1].vectors, noise)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt": "a"}, "max_tokens is required"),
        ({"prompt": "a", "max_tokens": 1, "vllm_xargs": 3}, "vllm_xargs must be an object"),
        ({"prompt": "a", "max_tokens": 1, "vllm_xargs": {"x": 1}}, "vllm_xargs.x is not an argument"),
        ({"prompt": "a", "max_tokens": 1, "vllm_xargs": {"output_residual_stream": "[1"}}, "must be JSON"),
        ({"prompt": "a", "max_tokens": 1, "vllm_xargs": {"output_residual_stream": 3}}, "output_residual_stream"),
        ({"prompt": "a", "max_tokens": 1, "vllm_xargs": {"apply_steering_vectors": "[3]"}}, "must be an object"),
        ({"prompt": "a", "max_tokens": 1, "nonsense": 1}, "nonsense is not a field"),
        ([], "must be a JSON object"),
    ],
)
def test_other_bodies_are_refused(body: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        received(body)


def test_layers_that_the_model_lacks_are_refused() -> None:
    with pytest.raises(InvalidLayers, match="names layer 4"):
        received({"prompt": "a", "max_tokens": 1, "vllm_xargs": {"output_residual_stream": [4]}})


def test_text_and_ids_in_one_request_are_refused() -> None:
    with pytest.raises(InvalidInput, match="all be text or all be token ids"):
        sent(CompletionRequest(("a", (1,)), 1))


_FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
_TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
_IDS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=4).map(tuple)
_SAMPLINGS = st.builds(
    Sampling,
    temperature=st.floats(0, 100),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=st.none() | st.integers(1, 2**40),
    min_p=st.floats(0, 1),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0, 2, exclude_min=True),
    seed=st.none() | st.integers(0, 2**63 - 1),
)
_LAYERS = st.sets(st.integers(0, N_LAYERS - 1), min_size=1).map(lambda found: tuple(sorted(found)))
_POSITIONS = st.sampled_from(["all", "last", "prompt", "generated"]) | st.sets(st.integers(0, 50), min_size=1).map(
    lambda found: tuple(sorted(found))
)


@st.composite
def _vectors(draw: st.DrawFn) -> SteeringVector:
    layers = draw(_LAYERS)
    positions = draw(st.none() | st.lists(st.integers(0, 99), min_size=1, max_size=3, unique=True).map(tuple))
    spans = None if positions else draw(st.none() | st.just(((0, 2), (5, 9))))
    shape = (len(layers), HIDDEN) if positions is None else (len(layers), len(positions), HIDDEN)
    values = draw(arrays.arrays(np.float32, shape, elements=_FINITE))
    scale = draw(st.floats(allow_nan=False, allow_infinity=False))
    return SteeringVector(layers, values, scale, draw(st.booleans()), positions, spans)


@st.composite
def _requests(draw: st.DrawFn) -> CompletionRequest:
    capture = draw(st.none() | st.builds(CaptureAsk, _LAYERS, _POSITIONS, st.sampled_from(["bfloat16", "float32"])))
    return CompletionRequest(
        prompts=tuple(draw(st.lists(_TEXT, min_size=1, max_size=3) | st.lists(_IDS, min_size=1, max_size=3))),
        max_tokens=draw(st.integers(1, 1_000_000)),
        n=1 if capture else draw(st.integers(1, 16)),
        sampling=draw(_SAMPLINGS),
        stop=tuple(draw(st.lists(_TEXT, max_size=4))),
        logprobs=draw(st.none() | st.integers(0, 100)),
        prompt_logprobs=draw(st.none() | st.integers(-1, 100)),
        echo=draw(st.booleans()),
        add_special_tokens=draw(st.booleans()),
        capture=capture,
        steering=tuple(draw(st.lists(_vectors(), max_size=2))),
    )


@settings(derandomize=True, max_examples=80, deadline=None)
@given(request=_requests())
def test_what_is_sent_is_received(request: CompletionRequest) -> None:
    back = received(sent(request))

    assert replace(back, steering=()) == replace(request, steering=())
    assert len(back.steering) == len(request.steering)
    for got, asked in zip(back.steering, request.steering, strict=True):
        assert np.array_equal(got.vectors, asked.vectors)
        assert (got.layers, got.scale, got.norm_match) == (asked.layers, asked.scale, asked.norm_match)
        assert (got.positions, got.spans) == (asked.positions, asked.spans)


def test_a_vllm_is_sent_nothing_of_ours() -> None:
    request = CompletionRequest(
        ("a",), 1, capture=CaptureAsk((1,), "last", "float32"), steering=(replace(VECTOR, scale=2.0),)
    )

    body = to_vllm(request, model="m", stream=False, include_usage=False)

    assert set(body["vllm_xargs"]) == {"output_residual_stream", "apply_steering_vectors"}
    assert body["vllm_xargs"]["output_residual_stream"] == [1]
    assert body["return_token_ids"] is True
    # vLLM would leave the prompt's text out for them.
    echoed = to_vllm(replace(request, echo=True), model="m", stream=False, include_usage=False)
    assert "return_token_ids" not in echoed
    assert body["cache_salt"] != to_vllm(request, model="m", stream=False, include_usage=False)["cache_salt"]


def test_several_greedy_samples_are_drawn_from_the_likeliest_alone() -> None:
    greedy = CompletionRequest(("a",), 5, n=2, sampling=Sampling(temperature=0, top_k=7))

    body = to_vllm(greedy, model="m", stream=False, include_usage=False)

    assert (body["n"], body["temperature"], body["top_k"]) == (2, 1.0, 1)
    alone = to_vllm(replace(greedy, n=1), model="m", stream=False, include_usage=False)
    assert (alone["temperature"], alone["top_k"]) == (0, 7)


def test_a_vllm_is_told_no_more_than_it_is_asked() -> None:
    request = CompletionRequest(("a",), 5)

    assert to_vllm(request, model="m", stream=False, include_usage=False) == sent(request)


CAPTURE = CaptureAsk((1,))
SPANS = replace(VECTOR, spans=((0, 2),))
DEEP = SteeringVector((1,), np.ones((1, 2, HIDDEN), np.float32), positions=(0, 1))
NORMED = replace(VECTOR, norm_match=True)
ELSEWHERE = replace(VECTOR, layers=(2,))


@pytest.mark.parametrize(
    ("request_", "kind"),
    [
        (CompletionRequest(("a",), 0, capture=CAPTURE), Unsupported),
        (CompletionRequest(("a",), 0, prompt_logprobs=0), Unsupported),
        (CompletionRequest(("a", "b"), 1, capture=CAPTURE), Unsupported),
        (CompletionRequest(("a", "b"), 1, steering=(VECTOR,)), SteeringUnsupported),
        (CompletionRequest(("a",), 1, n=2, steering=(VECTOR,)), SteeringUnsupported),
        (CompletionRequest(("a",), 2, steering=(SPANS,)), SteeringUnsupported),
        (CompletionRequest(("a",), 2, steering=(DEEP,)), SteeringUnsupported),
        (CompletionRequest(("a",), 1, steering=(VECTOR, NORMED)), SteeringUnsupported),
        (CompletionRequest(("a",), 1, steering=(NORMED, NORMED)), SteeringUnsupported),
    ],
)
def test_what_vllm_gets_wrong_is_refused(request_: CompletionRequest, kind: type[Unsupported]) -> None:
    with pytest.raises(kind, match="vLLM"):
        check_vllm_can(request_, runs_whole=True)


@pytest.mark.parametrize("vector", [SPANS, DEEP])
def test_single_positions_of_a_prompt_that_may_run_in_pieces_are_refused(vector: SteeringVector) -> None:
    with pytest.raises(SteeringUnsupported, match="in pieces"):
        check_vllm_can(CompletionRequest(("a",), 1, steering=(VECTOR, vector)), runs_whole=False)


@pytest.mark.parametrize(
    "request_",
    [
        CompletionRequest(("a", "b"), 3, n=4),
        CompletionRequest(("a",), 0, echo=True),
        CompletionRequest(("a",), 9, capture=CAPTURE, steering=(VECTOR, VECTOR)),
        CompletionRequest(("a",), 9, capture=replace(CAPTURE, positions="last", dtype="float32")),
        CompletionRequest(("a",), 1, steering=(DEEP,)),
        CompletionRequest(("a",), 1, steering=(SPANS, VECTOR)),
        CompletionRequest(("a",), 9, steering=(NORMED, VECTOR, replace(ELSEWHERE, norm_match=True), ELSEWHERE)),
    ],
)
def test_what_vllm_gets_right_is_let_through(request_: CompletionRequest) -> None:
    check_vllm_can(request_, runs_whole=True)


def test_spans_become_a_vector_for_each_position_that_the_prompt_has() -> None:
    wide = SteeringVector((1, 2), np.arange(6, dtype=np.float32).reshape(2, 3), 0.5, True, spans=((1, 3), (5, 2**31)))

    made = for_vllm(CompletionRequest(("a",), 1, steering=(VECTOR, wide)), [8], None)

    plain, spread = made.steering
    assert plain is VECTOR
    assert (spread.positions, spread.spans) == ((1, 2, 5, 6, 7), None)
    assert (spread.layers, spread.scale, spread.norm_match) == ((1, 2), 0.5, True)
    assert spread.vectors.shape == (2, 5, 3)
    assert all(np.array_equal(spread.vectors[:, place], wide.vectors) for place in range(5))


def test_a_request_without_spans_is_what_it_was() -> None:
    request = CompletionRequest(("a",), 1, steering=(VECTOR, DEEP))

    assert for_vllm(request, [3], None) is request


def test_spans_that_would_grow_too_large_are_refused() -> None:
    wide = SteeringVector((1,), np.ones((1, 4096), np.float32), spans=((0, 2000),))

    request = CompletionRequest(("a",), 1, steering=(wide,))

    assert for_vllm(request, [1024], None).steering[0].positions == tuple(range(1024))
    with pytest.raises(SteeringUnsupported, match="1025 positions"):
        for_vllm(request, [1025], None)


@pytest.mark.parametrize(
    ("scale", "dtype", "fits"),
    [
        (6e4, "float16", True),
        (7e4, "float16", False),
        (7e4, "bfloat16", True),
        (-1e39, None, False),
        (1e308, None, False),
    ],
)
def test_a_vector_that_no_dtype_holds_is_refused(scale: float, dtype: str | None, fits: bool) -> None:
    request = CompletionRequest(("a",), 1, steering=(VECTOR, replace(VECTOR, scale=scale)))

    if fits:
        assert for_vllm(request, [1], dtype) is request
    else:
        with pytest.raises(SteeringNotFinite, match="lower its scale"):
            for_vllm(request, [1], dtype)
    # Where the norm is matched, how long the vector is does not matter.
    normed = CompletionRequest(("a",), 1, steering=(replace(VECTOR, scale=scale, norm_match=True),))
    assert for_vllm(normed, [1], dtype) is normed
