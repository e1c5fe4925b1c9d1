"""A program that knows OpenAI's SDK and nothing of ours, at the running service."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import openai
import pytest
import zstandard

pytestmark = pytest.mark.xdist_group("demo-model")

PROMPT = "The capital of France is"
ASK: dict[str, Any] = {"model": "llama-8b", "prompt": PROMPT}


@pytest.fixture(scope="module")
def sdk(demo_service: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=demo_service.base_url, api_key=demo_service.key, max_retries=0) as client:
        yield client


def test_three_samples_of_each_of_two_prompts(sdk: openai.OpenAI) -> None:
    ask = {"model": "llama-8b", "prompt": [PROMPT, "Water boils at"], "n": 3, "max_tokens": 6, "seed": 11}

    first, again = (sdk.completions.create(**ask) for _ in range(2))

    assert [choice.index for choice in first.choices] == list(range(6))
    assert [choice.text for choice in again.choices] == [choice.text for choice in first.choices]
    assert len({choice.text for choice in first.choices}) > 3
    assert first.usage is not None
    assert first.usage.prompt_tokens == 8
    assert first.usage.completion_tokens <= 36


def test_a_greedy_text_is_the_plain_models(sdk: openai.OpenAI, plain: Any) -> None:
    ids = plain.ids(PROMPT)
    for _ in range(8):
        ids.append(int(plain.logits(ids)[-1].argmax()))

    done = sdk.completions.create(**ASK, max_tokens=8, temperature=0)

    assert done.choices[0].text == plain.text(ids[5:])
    assert done.choices[0].finish_reason == "length"
    assert done.model == "demo"


def test_a_stop_ends_the_text_before_it(sdk: openai.OpenAI) -> None:
    whole = sdk.completions.create(**ASK, max_tokens=12, temperature=0).choices[0].text
    stop = whole[7:10]  # across tokens, for it begins inside a word

    done = sdk.completions.create(**ASK, max_tokens=12, temperature=0, stop=[stop, "never comes"])
    parts = [
        chunk.choices[0].text
        for chunk in sdk.completions.create(**ASK, max_tokens=12, temperature=0, stop=stop, stream=True)
    ]

    assert done.choices[0].text == whole[: whole.index(stop)] == "".join(parts)
    assert done.choices[0].finish_reason == "stop"
    assert done.choices[0].model_extra is not None
    assert done.choices[0].model_extra["stop_reason"] == stop


def test_a_stream_with_usage(sdk: openai.OpenAI) -> None:
    whole = sdk.completions.create(**ASK, max_tokens=6, temperature=0)
    ask = {**ASK, "max_tokens": 6, "temperature": 0, "stream": True}

    with_usage = list(sdk.completions.create(**ask, stream_options={"include_usage": True}))
    without = list(sdk.completions.create(**ask))

    assert with_usage[-1].choices == []
    assert with_usage[-1].usage == whole.usage
    assert all(chunk.choices and chunk.usage is None for chunk in [*with_usage[:-1], *without])
    assert len(without) == 6
    assert "".join(chunk.choices[0].text for chunk in without) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in without] == [None] * 5 + ["length"]


def test_characters_are_never_cut_in_a_stream(sdk: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": "llama-8b", "prompt": "😀😃😄 日本語 🎉", "max_tokens": 0, "echo": True}

    whole = sdk.completions.create(**ask).choices[0].text
    parts = [chunk.choices[0].text for chunk in sdk.completions.create(**ask, stream=True)]

    assert whole == "".join(parts) == ask["prompt"]
    assert not any("\N{REPLACEMENT CHARACTER}" in part for part in parts)


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_log_probabilities_with_the_prompt_echoed(max_tokens: int, sdk: openai.OpenAI, plain: Any) -> None:
    done = sdk.completions.create(**ASK, max_tokens=max_tokens, temperature=0, echo=True, logprobs=1)

    logs = done.choices[0].logprobs
    assert logs is not None
    assert logs.tokens is not None
    assert logs.token_logprobs is not None
    assert logs.text_offset is not None
    assert logs.top_logprobs is not None
    assert len(logs.tokens) == len(logs.token_logprobs) == 5 + max_tokens
    assert "".join(logs.tokens) == done.choices[0].text
    assert logs.token_logprobs[0] is None
    assert logs.text_offset == [len("".join(logs.tokens[:place])) for place in range(5 + max_tokens)]
    ids = plain.ids(PROMPT)
    expected = plain.logprobs(ids)
    told = [*expected[range(4), ids[1:]], expected[-1].max()][: 4 + max_tokens]
    assert np.allclose(np.array(logs.token_logprobs[1:], float), told, atol=1e-4)
    assert max(logs.top_logprobs[-1].values()) == pytest.approx(expected[3 + max_tokens].max(), abs=1e-4)


def test_a_capture_through_extra_body(sdk: openai.OpenAI, plain: Any) -> None:
    done = sdk.completions.create(**ASK, max_tokens=2, temperature=0, extra_body={"output_residual_stream": [3, 15]})

    assert done.model_extra is not None
    envelope = done.model_extra["activations"]["residual_stream"]
    raw = zstandard.ZstdDecompressor().decompress(base64.b64decode(envelope["data"], validate=True))
    rows = np.frombuffer(raw, np.uint16).view(ml_dtypes.bfloat16).reshape(envelope["shape"]).astype(np.float32)
    expected = plain.rows(done.model_extra["activations"]["token_ids"])[[3, 15]]
    assert rows.shape == (2, 6, 576)
    assert (np.linalg.norm(rows - expected, axis=-1) <= 2**-8 * np.linalg.norm(expected, axis=-1)).all()


def test_refusals_are_the_sdks_errors_and_chat_is_one(sdk: openai.OpenAI, demo_service: Any) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        sdk.completions.create(**ASK, max_tokens=1, extra_body={"output_residual_stream": [30]})
    assert refused.value.code == "invalid_request"
    assert "0 to 29" in refused.value.message
    with pytest.raises(openai.BadRequestError) as chat:
        sdk.chat.completions.create(model="llama-8b", messages=[{"role": "user", "content": "hello"}])
    assert chat.value.code == "chat_completions_unsupported"
    with (
        openai.OpenAI(base_url=demo_service.base_url, api_key="stp_wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()
    assert [model.id for model in sdk.models.list()] == ["llama-8b"]
