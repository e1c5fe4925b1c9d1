"""The body of a completion request: what is taken, what is refused and in which words."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamtap.completion import CaptureAsk, CompletionRequest, Sampling, SteeringVector
from streamtap.errors import BadJson, InvalidInput, InvalidLayers, InvalidPrompt, Unsupported
from streamtap.wire.requests import CompletionBody, read_body
from streamtap.wire.steering import vector_body

VECTOR = vector_body(SteeringVector((1,), np.ones((1, 8), np.float32)))


def read(**fields: Any) -> CompletionBody:
    return read_body(json.dumps({"prompt": "a", **fields}).encode())


def refusal(raw: bytes) -> str:
    with pytest.raises(InvalidInput) as refused:
        read_body(raw)
    return str(refused.value)


def refused(**fields: Any) -> str:
    return refusal(json.dumps({"prompt": "a", **fields}).encode())


def test_a_body_of_a_prompt_alone_has_the_defaults() -> None:
    body = read()

    assert body.to_request(max_tokens=7, n_layers=4) == CompletionRequest(("a",), 7)
    assert (body.model, body.captures, body.steers, body.streams, body.include_usage) == (None, *[False] * 4)
    assert body.default_max_tokens(prompt_tokens=10, context=2048) == 2038
    assert body.default_max_tokens(prompt_tokens=10, context=100_000) == 32_000


def test_everything_that_can_be_asked() -> None:
    body = read(
        **{"model": "m", "prompt": ["a", "b"], "max_tokens": 5, "n": 3, "temperature": 0, "top_p": 0.5, "top_k": 4},
        **{"min_p": 0.1, "presence_penalty": -2, "frequency_penalty": 2, "repetition_penalty": 1.5, "seed": 2**63 - 1},
        **{"stop": "x", "logprobs": 0, "echo": True, "stream": True, "stream_options": {"include_usage": True}},
        **{"user": "u", "add_special_tokens": False, "apply_steering_vectors": [VECTOR]},
    )
    request = body.to_request(max_tokens=5, n_layers=4, hidden=8)

    assert request.prompts == ("a", "b")
    assert request.sampling == Sampling(0, 0.5, 4, 0.1, -2, 2, 1.5, 2**63 - 1)
    assert (request.max_tokens, request.n, request.stop, request.logprobs) == (5, 3, ("x",), 0)
    assert (request.echo, request.stream, request.add_special_tokens) == (True, True, False)
    assert body.include_usage
    assert [vector.layers for vector in request.steering] == [(1,)]


def test_null_is_as_if_the_field_were_not_there() -> None:
    nothing = dict.fromkeys(set(CompletionBody.model_fields) - {"prompt"})

    assert read(**nothing).to_request(max_tokens=7) == CompletionRequest(("a",), 7)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("ab", ("ab",)), (["a", "b"], ("a", "b")), ([5, 6], ((5, 6),)), ([[5], [6, 7]], ((5,), (6, 7)))],
)
def test_four_forms_of_prompt(prompt: Any, prompts: tuple[Any, ...]) -> None:
    assert read(prompt=prompt, max_tokens=1).prompts == prompts


@pytest.mark.parametrize(
    ("prompt", "got"),
    [
        ("", "got an empty string"),
        ([], "got an empty list"),
        (None, "got null"),
        (3, "got 3"),
        ({"a": 1}, "got an object"),
        ([""], "got an empty string at [0]"),
        (["a", 1], "got 1 at [1]"),
        ([1, "secret"], "got a string at [1]"),
        ([True], "got true at [0]"),
        ([1, True], "got true at [1]"),
        ([-1], "got -1 at [0]"),
        ([2**31], "got 2147483648 at [0]"),
        ([1.0], "got 1.0 at [0]"),
        ([[]], "got an empty list at [0]"),
        ([[1], []], "got an empty list at [1]"),
        ([[1], [True]], "got true at [1][0]"),
        ([[1], "secret"], "got a string at [1]"),
        ([[["a"]]], "got a list of 1 at [0][0]"),
    ],
)
def test_other_prompts_are_refused_without_their_text(prompt: Any, got: str) -> None:
    message = refused(prompt=prompt)

    assert message.startswith("prompt must be a string, a list of strings, a list of token ids")
    assert got in message
    assert "secret" not in message


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("max_tokens", [-1, 1_000_001, True, 1.0, "1"]),
        ("n", [0, 17, True, 1.5]),
        ("temperature", [-0.1, 100.1, True, "hot"]),
        ("top_p", [0, 1.1]),
        ("top_k", [0, -2, 1.5, True]),
        ("min_p", [-0.1, 1.1]),
        ("presence_penalty", [-2.1, 2.1]),
        ("frequency_penalty", [-2.1, 2.1]),
        ("repetition_penalty", [0, 2.1]),
        ("seed", [-1, 2**63, 2**64, 1e30, False]),
        ("stop", [3, "", [""], ["a"] * 5, [1], {}]),
        ("logprobs", [-1, 101, True]),
        ("prompt_logprobs", [-2, 101]),
        ("echo", [1, "true"]),
        ("stream", [0, "false"]),
        ("stream_options", [True, []]),
        ("user", [3]),
        ("model", [3, ["m"]]),
        ("add_special_tokens", [1]),
        ("output_residual_stream", ["true", 1, [], [-1], [1.0], [True], {}]),
        ("output_positions", ["first", [], [-1], [True], 3]),
        ("output_dtype", ["float16", 3]),
        ("apply_steering_vectors", [[], {}, [3], [VECTOR] * 9]),
    ],
)
def test_values_out_of_bounds_are_refused_by_name(field: str, values: list[Any]) -> None:
    for value in values:
        assert refused(**{field: value}).startswith(field), value


@pytest.mark.parametrize("field", ["best_of", "suffix", "logit_bias", "nonsense"])
def test_an_unknown_field_is_refused_and_named(field: str) -> None:
    assert refused(**{field: 1}) == f"{field} is not a field here."


def test_nested_fields_are_named_by_their_place() -> None:
    vector = {**VECTOR, "strength": 2, "scale": "x", "layer_indices": [1, -1]}

    message = refused(apply_steering_vectors=[VECTOR, vector], stream=True, stream_options={"every": 1})

    assert "apply_steering_vectors[1].strength is not a field here." in message
    assert "apply_steering_vectors[1].scale must be a finite number; got a string." in message
    assert "apply_steering_vectors[1].layer_indices must be a list of layer numbers" in message
    assert "got -1 at [1]." in message
    assert "stream_options.every is not a field here." in message


def test_at_most_five_problems_are_listed() -> None:
    message = refused(a=1, b=1, c=1, d=1, e=1, f=1, g=1)

    assert message.count("is not a field here") == 5
    assert message.endswith("And 2 more.")


def test_a_name_of_any_length_is_shown_short() -> None:
    assert len(refused(**{"x" * 10_000_000: 1})) < 200


def test_a_body_of_a_million_unknown_fields_is_one_problem() -> None:
    message = refused(**{f"a{i}": 1 for i in range(100_000)})

    assert message == "the body has 100001 fields; a0 is not a field here, nor are most of them."


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": 0}, "max_tokens 0 needs echo, prompt_logprobs or output_residual_stream"),
        ({"prompt": ["a", "b"]}, "max_tokens is required"),
        ({"n": 2}, "max_tokens is required"),
        ({"output_residual_stream": True, "n": 2}, "needs n to be 1"),
        ({"output_residual_stream": [1], "stream": True}, "needs stream to be false"),
        ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs needs stream to be false"),
        ({"output_positions": "last"}, "output_positions needs output_residual_stream"),
        ({"output_dtype": "float32", "output_residual_stream": False}, "output_dtype needs output_residual_stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options needs stream"),
    ],
)
def test_fields_that_exclude_each_other_are_refused(fields: dict[str, Any], message: str) -> None:
    assert message in refused(**fields)


@pytest.mark.parametrize("fields", [{"echo": True}, {"prompt_logprobs": 0}, {"output_residual_stream": True}])
def test_no_new_token_is_fine_where_something_else_is_asked(fields: dict[str, Any]) -> None:
    assert read(max_tokens=0, **fields).default_max_tokens(prompt_tokens=3, context=10) == 0


def test_a_capture_draws_one_token_unless_more_are_asked() -> None:
    body = read(prompt=["a", "b"], output_residual_stream=True)

    assert body.default_max_tokens(prompt_tokens=3, context=2048) == 1
    assert body.to_request(max_tokens=1, n_layers=3).capture == CaptureAsk((0, 1, 2))


def test_layers_and_positions_are_ascending_and_each_once() -> None:
    body = read(output_residual_stream=[3, 1, 3], output_positions=[4, 0, 4], output_dtype="float32")

    assert body.to_request(max_tokens=1, n_layers=4).capture == CaptureAsk((1, 3), (0, 4), "float32")


def test_layers_that_the_model_lacks_are_refused_with_the_range() -> None:
    with pytest.raises(InvalidLayers, match="names layer 99; the model has layers 0 to 31"):
        read(output_residual_stream=[3, 99]).to_request(max_tokens=1, n_layers=32)
    with pytest.raises(InvalidLayers, match="not known; list them"):
        read(output_residual_stream=True).to_request(max_tokens=1)


def test_ids_outside_the_vocabulary_are_refused_by_prompt() -> None:
    body = read(prompt=[[1], [2, 300]], max_tokens=1)

    with pytest.raises(InvalidPrompt, match="prompt 1 holds token id 300; the model's ids are 0 to 299") as refused:
        body.to_request(max_tokens=1, vocabulary=300)
    assert refused.value.index == 1
    assert body.to_request(max_tokens=1, vocabulary=301).prompts == ((1,), (2, 300))


def test_vectors_for_another_model_are_refused_by_place() -> None:
    body = read(apply_steering_vectors=[VECTOR])

    with pytest.raises(InvalidInput, match=r"apply_steering_vectors\[0\].activations is 8 wide"):
        body.to_request(max_tokens=1, n_layers=4, hidden=16)
    with pytest.raises(InvalidInput, match=r"apply_steering_vectors\[0\].layer_indices names layer 1"):
        body.to_request(max_tokens=1, n_layers=1, hidden=8)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b'{"prompt": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "a", "temperature": 1e400}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b"\xef\xbb\xbf{}",
        b'{"prompt": "a"} x',
        b'{"prompt": "a", "seed": ' + b"1" * 5000 + b"}",
        b"[" * 100_000,
        b'{"prompt":' + b"[" * 5000 + b"]" * 5000 + b"}",
    ],
)
def test_what_is_no_json_is_said_to_be_none(raw: bytes) -> None:
    with pytest.raises(BadJson, match="the body must be JSON in UTF-8") as refused:
        read_body(raw)
    assert refused.value.__cause__ is None
    assert refused.value.__suppress_context__


@pytest.mark.parametrize("raw", [b"[]", b"3", b'"secret"', b"null", b"true"])
def test_a_body_that_is_no_object_is_refused(raw: bytes) -> None:
    message = refusal(raw)

    assert message.startswith("the body must be a JSON object; got ")
    assert "secret" not in message


def test_a_large_prompt_is_fine() -> None:
    assert len(str(read(prompt="x" * 10_000_000).prompt)) == 10_000_000


def test_the_schema_knows_every_field() -> None:
    schema = CompletionBody.model_json_schema()

    assert schema["required"] == ["prompt"]
    assert schema["additionalProperties"] is False
    assert len(schema["properties"]["prompt"]["anyOf"]) == 4


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just(VECTOR),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
_NAMES = st.sampled_from([*CompletionBody.model_fields, "other"])


@settings(derandomize=True, max_examples=120, deadline=None)
@given(fields=st.dictionaries(_NAMES, _JSON, max_size=5), prompt=st.sampled_from(["a", ["a"], [1], [[1]], 3]))
def test_no_body_raises_anything_else(fields: dict[str, Any], prompt: Any) -> None:
    raw = json.dumps({"prompt": prompt, **fields}).encode()

    said = ""
    try:
        read_body(raw).to_request(max_tokens=1, n_layers=4, hidden=8, vocabulary=10)
    except (InvalidInput, Unsupported) as error:
        said = str(error)
    assert len(said) < 3000


@settings(derandomize=True, max_examples=120, deadline=None)
@given(raw=st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_no_bytes_raise_anything_else(raw: bytes) -> None:
    with pytest.raises(InvalidInput):
        read_body(raw)
