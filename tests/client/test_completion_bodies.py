from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from streamtap.client.bodies import completion_body, encoded
from streamtap.client.options import CompletionOptions
from streamtap.client.steering import steering_vector
from streamtap.completion import CaptureAsk, CompletionRequest, Sampling, SteeringVector
from streamtap.errors import InvalidInput
from streamtap.wire.requests import CompletionBody, read_body

VECTOR = SteeringVector((1,), np.ones((1, 8), np.float32), 2.0)
EVERYTHING = CompletionRequest(
    prompts=("one", "two"),
    max_tokens=7,
    sampling=Sampling(0.5, 0.9, 40, 0.1, 0.2, 0.3, 1.1, 5),
    stop=(".", "\n"),
    logprobs=3,
    prompt_logprobs=-1,
    echo=True,
    add_special_tokens=False,
    capture=CaptureAsk((1, 3), (0, 2), "float32"),
    steering=(VECTOR,),
)


def _body(prompt: Any, **options: Any) -> dict[str, Any]:
    return completion_body(prompt, None, options)


def test_what_was_not_said_is_left_to_the_server() -> None:
    assert completion_body("text", "llama", {"temperature": None}) == {"model": "llama", "prompt": "text"}
    assert _body("text", temperature=0) == {"prompt": "text", "temperature": 0}


@pytest.mark.parametrize(
    ("prompt", "sent"),
    [
        ("one", "one"),
        (["one", "two"], ["one", "two"]),
        (("one",), ["one"]),
        ([5, 6], [5, 6]),
        (np.array([5, 6]), [5, 6]),
        (torch.tensor([[5, 6], [7, 8]]), [[5, 6], [7, 8]]),
        ([np.array([5, 6], np.int32), [7]], [[5, 6], [7]]),
        ([], []),
    ],
)
def test_prompts_of_every_form(prompt: Any, sent: Any) -> None:
    assert _body(prompt) == {"prompt": sent}
    assert encoded(_body(prompt))


@pytest.mark.parametrize("prompt", [["one", 2], [1.5], [True, False], [[1], [2.0]]])
def test_other_prompts_are_refused(prompt: Any) -> None:
    with pytest.raises(InvalidInput, match=r"all texts or all token ids|must be whole numbers"):
        _body(prompt)


@pytest.mark.parametrize("prompt", [5, None, b"text", {"a": 1}, np.array(5)])
def test_what_is_no_prompt_is_refused(prompt: Any) -> None:
    with pytest.raises(InvalidInput, match=f"prompt must be a text, a list of .*; got {type(prompt).__name__}"):
        _body(prompt)


def test_one_number_among_lists_of_token_ids_is_refused() -> None:
    with pytest.raises(InvalidInput, match="token ids must be whole numbers in a list; got int"):
        _body([[1], 2])


def test_arrays_become_lists() -> None:
    body = _body(
        "text",
        output_residual_stream=np.array([3, 1]),
        output_positions=(np.int64(4),),
        seed=np.int64(5),
        temperature=np.float32(0.5),
        stop=(".",),
    )

    assert body == {
        "prompt": "text",
        "output_residual_stream": [3, 1],
        "output_positions": [4],
        "seed": 5,
        "temperature": 0.5,
        "stop": ["."],
    }
    assert read_body(encoded(body)).max_tokens is None


def test_true_and_named_positions_are_sent_as_they_are() -> None:
    body = _body("text", output_residual_stream=True, output_positions="last")

    assert (body["output_residual_stream"], body["output_positions"]) == (True, "last")


def test_vectors_may_be_objects_or_envelopes() -> None:
    envelope = steering_vector(np.ones(8), 1, 2.0)

    assert _body("text", apply_steering_vectors=[VECTOR])["apply_steering_vectors"] == [envelope]
    assert _body("text", apply_steering_vectors=(envelope,))["apply_steering_vectors"] == [envelope]


@pytest.mark.parametrize("one", [VECTOR, steering_vector([1.0, 2.0], 1)])
def test_one_vector_by_itself_is_no_list(one: Any) -> None:
    with pytest.raises(InvalidInput, match="takes a list of steering vectors"):
        _body("text", apply_steering_vectors=one)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"apply_steering_vectors": 5}, "takes a list of steering vectors; got int"),
        ({"apply_steering_vectors": [5]}, "each from steering_vector.*; one is of type int"),
        ({"apply_steering_vectors": ["ab"]}, "each from steering_vector.*; one is of type str"),
        ({"stop": 5}, "stop takes a text or a list of texts; got int"),
    ],
)
def test_options_of_another_kind_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        _body("text", **options)


def test_every_option_is_one_that_the_server_knows() -> None:
    asked = set(CompletionOptions.__optional_keys__)

    assert set(CompletionBody.model_fields) - asked == {"model", "prompt", "stream", "stream_options"}
    assert asked - set(CompletionBody.model_fields) == set()


def test_a_whole_request_says_the_same_to_a_server() -> None:
    found = read_body(encoded(_body(EVERYTHING))).to_request(max_tokens=7, n_layers=4, hidden=8)

    assert found.steering[0].vectors.tolist() == VECTOR.vectors.tolist()
    # Vectors have no equality.
    assert _without_steering(found) == _without_steering(EVERYTHING)


def _without_steering(request: CompletionRequest) -> dict[str, Any]:
    return {name: value for name, value in vars(request).items() if name != "steering"}


def test_a_plain_request_is_sent_without_what_is_as_ever() -> None:
    assert _body(CompletionRequest(("one",), 3)) == {"prompt": "one", "max_tokens": 3}
    assert _body(CompletionRequest(((5, 6),), 3, n=2)) == {"prompt": [5, 6], "max_tokens": 3, "n": 2}
    assert _body(CompletionRequest(((5,), (6,)), 3)) == {"prompt": [[5], [6]], "max_tokens": 3}


def test_nothing_stands_beside_a_whole_request_but_the_user() -> None:
    assert _body(CompletionRequest(("one",), 3), user="ada")["user"] == "ada"
    with pytest.raises(InvalidInput, match="max_tokens, seed cannot stand beside it"):
        _body(CompletionRequest(("one",), 3), max_tokens=4, seed=1)
    with pytest.raises(InvalidInput, match="the request holds both"):
        _body(CompletionRequest(("one", (5, 6)), 3))


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(InvalidInput, match="no option max_token; there are add_special_tokens, "):
        _body("text", max_token=3)


@pytest.mark.parametrize("asked", [15, 1.5])
def test_layers_that_are_no_list_are_refused(asked: Any) -> None:
    with pytest.raises(InvalidInput, match=f"output_residual_stream takes a list of whole numbers; got {asked}"):
        _body("text", output_residual_stream=asked)


@pytest.mark.parametrize(
    "body", [{"prompt": "a secret", "temperature": float("nan")}, {"prompt": "a secret \ud800"}, {"prompt": object()}]
)
def test_what_json_cannot_say_is_refused_without_the_prompt(body: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match="cannot be written as JSON") as caught:
        encoded(body)

    assert "secret" not in str(caught.value)
    assert caught.value.__context__ is None
