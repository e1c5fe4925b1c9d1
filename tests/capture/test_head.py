"""The head in slices: equal to the whole, checked against the model, refused where it is not a plain matrix."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from streamtap.capture import head as module
from streamtap.capture.forward import Forward
from streamtap.capture.head import Head, HeadRows
from streamtap.errors import Unsupported
from streamtap.testing.models import tiny_model

TARGETS = np.array([3, -1, 90, 0, 96, -1, 5], np.int64)
KEEP = np.array([True, False, False, True, True, False, True])


@lru_cache(maxsize=4)
def model_of(family: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return tiny_model(family, dtype=dtype)


def head_of(family: str, dtype: torch.dtype = torch.float32) -> Head:
    return Head(Forward(model_of(family, dtype)))


def normed(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(7, 32, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("family", ["llama", "gemma2", "granite", "cohere"])
def test_values_are_those_of_the_whole_softmax(family: str) -> None:
    head, rows = head_of(family), normed()
    whole = head.logits(rows)

    found = head.read(rows, TARGETS, KEEP, None)

    aimed = TARGETS >= 0
    nll = -whole.log_softmax(-1)[torch.arange(7), torch.from_numpy(np.maximum(TARGETS, 0))].detach().numpy()
    np.testing.assert_allclose(found.nll[aimed], nll[aimed], rtol=1e-5, atol=1e-5)
    assert np.isnan(found.nll[~aimed]).all()
    assert found.nll.dtype == np.float32
    assert found.logits is not None
    assert np.array_equal(found.logits, whole.detach().numpy()[KEEP])
    assert found.ids is None


def assert_same(a: HeadRows, b: HeadRows) -> None:
    np.testing.assert_allclose(a.nll, b.nll, rtol=1e-6)
    for one, other in ((a.logits, b.logits), (a.ids, b.ids)):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("top_k", [None, 1, 4, 1000])
@pytest.mark.parametrize("rows_a_slice", [1, 2, 3, 7])
def test_slices_give_what_the_whole_gives(
    monkeypatch: pytest.MonkeyPatch, rows_a_slice: int, top_k: int | None
) -> None:
    head = head_of("llama")
    whole = head.read(normed(), TARGETS, KEEP, top_k)
    sizes: list[int] = []
    logits = head.logits

    def counted(rows: torch.Tensor) -> torch.Tensor:
        sizes.append(len(rows))
        return logits(rows)

    monkeypatch.setattr(head, "logits", counted)
    monkeypatch.setattr(module, "SLICE_BYTES", rows_a_slice * 4 * 97 + 3)

    assert_same(head.read(normed(), TARGETS, KEEP, top_k), whole)
    assert max(sizes) == rows_a_slice
    assert sum(sizes) == 7


def test_a_slice_holds_one_row_however_small_it_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    head = head_of("llama")
    whole = head.read(normed(), TARGETS, KEEP, None)
    monkeypatch.setattr(module, "SLICE_BYTES", 1)

    assert_same(head.read(normed(), TARGETS, KEEP, None), whole)


def test_the_largest_logits_come_first_with_their_ids() -> None:
    head = head_of("llama")
    whole = head.logits(normed()).detach().numpy()[KEEP]

    found = head.read(normed(), TARGETS, KEEP, 3)

    assert found.logits is not None
    assert found.ids is not None
    assert found.ids.dtype == np.int32
    assert np.array_equal(found.logits, -np.sort(-whole, axis=1)[:, :3])
    assert np.array_equal(np.take_along_axis(whole, found.ids.astype(np.int64), axis=1), found.logits)


def test_no_row_kept_gives_no_logits_and_no_rows_give_nothing() -> None:
    head = head_of("llama")

    assert head.read(normed(), TARGETS, np.zeros(7, bool), 3).logits is None
    nothing = head.read(normed()[:0], TARGETS[:0], KEEP[:0], None)
    assert (len(nothing.nll), nothing.logits, nothing.ids) == (0, None, None)


@pytest.mark.parametrize("family", ["llama", "gemma2", "granite", "cohere", "opt", "gemma3_multimodal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_released_families_pass_the_check_in_every_dtype(family: str, dtype: torch.dtype) -> None:
    found = head_of(family, dtype).read(normed(dtype), TARGETS, KEEP, None)

    assert found.logits is not None
    assert found.logits.dtype == np.float32
    assert np.isfinite(found.logits).all()


@pytest.mark.parametrize(
    "change",
    [
        lambda logits: logits * 1.01,
        lambda logits: logits + logits.abs().max() * 0.01,
        lambda logits: logits.roll(1, dims=-1),
        lambda logits: torch.full_like(logits, float("nan")),
    ],
    ids=["scaled", "moved", "permuted", "nan"],
)
def test_a_model_whose_logits_are_something_else_is_refused(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    model: Any = tiny_model("llama")
    plain = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        output = plain(*args, **kwargs)
        output.logits = change(output.logits)
        return output

    monkeypatch.setattr(model, "forward", forward)

    with pytest.raises(Unsupported, match="LlamaForCausalLM .*relative error.*compute_perplexity=False"):
        Head(Forward(model))


def test_a_cap_that_the_config_hides_is_found_out() -> None:
    model: Any = tiny_model("gemma2")
    forward = Forward(model)
    hidden = type(model.config).from_dict(model.config.to_dict() | {"final_logit_softcapping": None})
    object.__setattr__(forward.blocks, "text_config", hidden)

    with pytest.raises(Unsupported, match="not its output matrix"):
        Head(forward)


def test_a_model_without_head_is_refused_by_name() -> None:
    with pytest.raises(Unsupported, match="LlamaModel has no language-model head.*compute_perplexity=False"):
        Head(Forward(model_of("llama").base_model))


def test_the_check_is_made_on_the_model_alone_and_leaves_no_hook() -> None:
    model = tiny_model("llama")

    Head(Forward(model))

    assert not any(each._forward_hooks or each._forward_pre_hooks for each in model.modules())
