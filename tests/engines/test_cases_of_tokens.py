"""Faults of tokens, padding and length that people met in tools like this one, by their number in the cases."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamtap.activations import Activations, in_asked_order
from streamtap.engines.transformers import TransformersEngine
from streamtap.errors import PromptTooLong
from streamtap.spec import CaptureSpec
from streamtap.testing.models import tiny_model
from streamtap.testing.reference import plain_blocks, plain_rows, worst_row_error
from streamtap.testing.tokenizers import tiny_tokenizer

SHORT, LONG = [5, 6, 7], [(7 * i) % 80 + 4 for i in range(60)]
SHARED = [LONG[:48] + tail for tail in ([9], [10, 11, 12], [13] * 7, [14, 15, 16, 17], [18] * 12)]
TEXTS = ["No.", "The residual stream is what every block reads and adds to."]


def capture(model: Any, prompts: Sequence[Any], tokenizer: Any = None, **spec: Any) -> Activations:
    engine = TransformersEngine(model, tokenizer, name="tiny")
    return in_asked_order(list(engine.capture(prompts, CaptureSpec(**spec))))


def relative(a: Any, b: Any) -> float:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


# V15, V16: the padding side must not matter


@pytest.mark.parametrize("family", ["gpt2", "llama", "opt", "bloom"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_v15_v16_padding_reaches_no_position_on_either_side(family: str, side: str) -> None:
    model, tokenizer = tiny_model(family), tiny_tokenizer(padding_side=side)

    acts = capture(model, TEXTS, tokenizer)

    for i, text in enumerate(TEXTS):
        ids = [0, *tiny_tokenizer(adds_bos=False)(text)["input_ids"]]
        plain = plain_rows(model, ids)
        assert acts.token_ids[acts.offsets[i] : acts.offsets[i + 1]].tolist() == ids
        assert all(worst_row_error(acts.prompt(i)[k], plain[k]) <= 5e-5 for k in plain)
    assert tokenizer.padding_side == side


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("ask", [{"pooling": "last_token"}, {"positions": "last"}, {"positions": -1}], ids=str)
def test_v16_the_last_token_is_the_last_real_one(family: str, side: str, ask: dict[str, Any]) -> None:
    model, tokenizer = tiny_model(family, std=0.3), tiny_tokenizer(padding_side=side)

    acts = capture(model, TEXTS, tokenizer, **ask)

    assert len(acts.acts[0]) == 2
    assert acts.positions.tolist() == [len(text) for text in TEXTS]
    for i, text in enumerate(TEXTS):
        alone = capture(model, [text], tokenizer, exact=True)
        assert all(np.abs(acts.acts[k][i] - alone.acts[k][-1]).max() <= 1e-4 for k in alone.layers)


# V18: two BOS tokens after a chat template

CHAT = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]


@pytest.mark.parametrize("adds_bos", [True, False])
def test_v18_a_chat_has_exactly_one_bos(adds_bos: bool) -> None:
    acts = capture(tiny_model("llama"), [CHAT], tiny_tokenizer(adds_bos=adds_bos), layers=[0])

    assert acts.token_ids[0] == 0
    assert np.count_nonzero(acts.token_ids == 0) == 1


def test_v18_plain_text_keeps_the_tokenizers_bos() -> None:
    model = tiny_model("llama")

    assert capture(model, ["hello"], tiny_tokenizer(), layers=[0]).token_ids.tolist()[:2] == [0, 75]
    assert capture(model, ["hello"], tiny_tokenizer(adds_bos=False), layers=[0]).token_ids[0] == 75


@pytest.mark.filterwarnings("error")
def test_v18_token_ids_are_run_untouched() -> None:
    acts = capture(tiny_model("llama"), [[75, 72, 79], [0, 0, 75]], tiny_tokenizer(), layers=[0])

    assert acts.token_ids.tolist() == [75, 72, 79, 0, 0, 75]


def test_v18_two_bos_in_a_text_are_warned_of() -> None:
    with pytest.warns(UserWarning, match="prompt 1 .*two BOS") as caught:
        acts = capture(tiny_model("llama"), ["hello", "<s>secret"], tiny_tokenizer(), layers=[0], positions=":2")

    assert acts.token_ids.tolist() == [0, 75, 0, 0]
    assert not any("secret" in str(warning.message) for warning in caught)


# V20: mean pooling counts pads


@pytest.mark.parametrize("pooling", ["mean", "max"])
def test_v20_pooling_counts_real_tokens_only(pooling: str) -> None:
    for family in ("llama", "gpt2", "bloom"):
        model = tiny_model(family)
        pair = capture(model, [SHORT, LONG], pooling=pooling)
        alone = capture(model, [SHORT], pooling=pooling)

        assert all(relative(pair.acts[k][0], alone.acts[k][0]) <= 5e-5 for k in alone.layers)


def test_v20_there_are_as_many_rows_as_real_tokens() -> None:
    acts = capture(tiny_model("llama"), [SHORT, LONG, *SHARED])

    assert len(acts.acts[0]) == len(SHORT) + len(LONG) + sum(map(len, SHARED)) == acts.offsets[-1]


def test_v20_a_mean_can_leave_special_tokens_out() -> None:
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    raw = capture(model, TEXTS, tokenizer, exact=True)

    pooled = capture(model, TEXTS, tokenizer, pooling="mean", exclude_special_tokens=True)

    for i in range(2):
        assert all(relative(pooled.acts[k][i], raw.prompt(i)[k][1:].mean(0)) <= 5e-5 for k in raw.layers)


# V23: prompts longer than the context


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma3_multimodal", "opt", "mistral"])
def test_v23_too_long_is_refused_before_any_work_by_index_and_length(family: str) -> None:
    model = tiny_model(family)
    ran: list[int] = []
    plain_blocks(model)[0].register_forward_hook(lambda *_: ran.append(1))
    TransformersEngine(model, name="tiny")
    ran.clear()

    with pytest.raises(PromptTooLong, match=r"prompt 1 .*\b300\b.*\b256\b.*truncate") as caught:
        capture(model, [SHORT, [5] * 300])

    assert caught.value.index == 1
    assert ran == []


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_v23_the_context_itself_still_fits(family: str) -> None:
    assert capture(tiny_model(family), [[5] * 256], layers=[0]).offsets.tolist() == [0, 256]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_v23_truncation_keeps_the_side_that_was_asked_for(family: str, side: str) -> None:
    model = tiny_model(family)
    ids = [(11 * i) % 80 + 4 for i in range(300)]
    kept = ids[44:] if side == "left" else ids[:256]

    acts = capture(model, [SHORT, ids], truncate=side, exact=True)

    assert acts.prompt(1)[0].shape == (256, 32)
    assert acts.token_ids[3:].tolist() == kept
    plain = plain_rows(model, kept)
    assert all(worst_row_error(acts.prompt(1)[k], plain[k]) <= 1e-5 for k in plain)


# No test and no capture of a loaded model needs a network


def test_a_capture_from_a_folder_opens_no_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)

    def refuse(*_args: Any) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    engine = TransformersEngine.load(str(tmp_path), device="cpu")
    acts = in_asked_order(list(engine.capture([*TEXTS, CHAT], CaptureSpec())))
    engine.close()

    expected = capture(model, [*TEXTS, CHAT], tiny_tokenizer())
    assert acts.provenance.commit.startswith("sha256:")
    assert all(np.array_equal(acts.acts[k], expected.acts[k]) for k in expected.layers)
