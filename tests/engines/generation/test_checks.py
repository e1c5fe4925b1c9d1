"""What means nothing is refused before it can spoil a step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from streamtap.completion import CaptureAsk, CompletionRequest, Sampling, SteeringVector
from streamtap.engines.transformers import TransformersEngine
from streamtap.errors import InvalidInput

ALL = CaptureAsk((0, 1, 2), "all", "float32")
PLAIN = CompletionRequest(("abc",), 6)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"capture": CaptureAsk((3,))}, "layer 3; the model's layers are 0 to 2"),
        ({"capture": CaptureAsk(())}, "no layer"),
        ({"capture": ALL, "n": 2}, "n=2"),
        ({"max_tokens": 5000}, "at most the model's context"),
        ({"prompts": ((1, 97),)}, "token id 97"),
        ({"prompts": ()}, "no prompt"),
        ({"capture": ALL, "stream": True}, "does not stream"),
        ({"capture": CaptureAsk((0,), (0, 9))}, "names position 9"),
        ({"capture": CaptureAsk((0,), (-1,))}, "positions are 'all'"),
        ({"capture": CaptureAsk((0,), "first")}, "positions are 'all'"),  # type: ignore[arg-type]
        ({"capture": CaptureAsk((0,), "all", "float16")}, "dtype is bfloat16 or float32"),  # type: ignore[arg-type]
        ({"logprobs": -1}, "logprobs must be a whole number from 0; got -1"),
        ({"prompt_logprobs": -2}, "prompt_logprobs must be a whole number from -1"),
        ({"max_tokens": -1}, "max_tokens must be a whole number from 0"),
        ({"n": 0}, "n must be a whole number from 1"),
        ({"sampling": Sampling(temperature=float("nan"))}, "temperature must be a number from 0 to 100; got nan"),
        ({"sampling": Sampling(top_p=0)}, "top_p must be a number above 0 to 1; got 0"),
        ({"sampling": Sampling(top_k=0)}, "top_k must be a whole number from 1; got 0"),
        ({"sampling": Sampling(seed=1.5)}, "seed must be a whole number from 0; got 1.5"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_run_is_refused_before_any_work(
    engine: TransformersEngine, fields: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidInput, match=said):
        engine.submit(replace(PLAIN, **fields), lambda _event: None)


def test_positions_may_be_any_list(engine: TransformersEngine) -> None:
    completion = engine.complete("abc", capture=[0], positions=[2, 0, 2])

    assert completion.activations.positions.tolist() == [0, 2]


@pytest.mark.parametrize("steer", [{"scale": 1.0}, SteeringVector((0,), [[0.0] * 32])])  # type: ignore[arg-type]
def test_one_vector_by_itself_is_no_list(engine: TransformersEngine, steer: Any) -> None:
    with pytest.raises(InvalidInput, match="steer takes a list"):
        engine.complete("abc", max_tokens=1, steer=steer)


@pytest.mark.parametrize("prompt", [[], [[1.5]], [[True]], [1, "a"], ["a", [1]], [[1], "a"], 7.0])
def test_prompts_of_no_known_form_are_refused(engine: TransformersEngine, prompt: Any) -> None:
    with pytest.raises(InvalidInput, match="prompt must be text"):
        engine.complete(prompt, max_tokens=1)
