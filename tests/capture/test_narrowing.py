"""What leaves the device: the rows in another dtype, or their products with directions; never other rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from streamtap.activations import Activations
from streamtap.capture.narrowing import Narrowing
from streamtap.engines.transformers import TransformersEngine
from streamtap.errors import InvalidInput
from streamtap.pooling import POOLINGS
from streamtap.spec import CaptureSpec, Projection
from streamtap.testing.models import tiny_model

FAMILIES = ("llama", "gpt2", "gemma2", "mixtral")
POSITIONS: tuple[Any, ...] = ("all", "last", "-3:", [0, 2, -1])
_COMMON = list(range(5, 45))
#: Lengths that differ, and a prefix long enough to be shared.
PROMPTS = [[*_COMMON, *range(50 + i, 53 + 3 * i)] for i in range(6)] + [[7, 8, 9, 6], list(range(10, 30))]
DIRECTIONS = np.random.default_rng(3).normal(size=(5, 32)) * np.array([[1e-4], [1], [10], [1], [1e4]])
UNIT = DIRECTIONS / np.linalg.norm(DIRECTIONS, axis=1, keepdims=True)


def engine_of(family: str, dtype: torch.dtype = torch.float32, **options: Any) -> TransformersEngine:
    return TransformersEngine(tiny_model(family, dtype=dtype), name="tiny", **options)


def captured(engine: TransformersEngine, prompts: Sequence[Sequence[int]] = PROMPTS, **spec: Any) -> Activations:
    parts = list(engine.capture(prompts, CaptureSpec(**spec)))
    assert len(parts) == 1
    return parts[0]


def same_places(one: Activations, other: Activations) -> bool:
    return all(
        np.array_equal(getattr(one, name), getattr(other, name))
        for name in ("offsets", "token_ids", "positions", "index")
    )


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_products_are_those_of_the_plain_rows(family: str, pooling: Any, share: bool) -> None:
    engine = engine_of(family, share_prefixes=share)
    for positions in POSITIONS:
        asked = {"pooling": pooling, "positions": positions, "layers": [0, 2]}
        plain = captured(engine, **asked)
        products = captured(engine, projection=Projection.onto(DIRECTIONS), **asked)

        assert same_places(plain, products)
        for layer in (0, 2):
            assert products.acts[layer].dtype == np.float32
            wide = plain.acts[layer].astype(np.float64)
            scale = np.linalg.norm(wide, axis=1, keepdims=True)
            assert products.acts[layer].shape == (len(wide), 5)
            assert np.abs(products.acts[layer] - wide @ UNIT.T).max(initial=0) <= 2e-6 * scale.max(initial=1)


def test_a_prefix_is_shared_here() -> None:
    """Or the tests above would tell nothing of it."""
    engine = engine_of("llama")
    captured(engine, projection=Projection.onto(DIRECTIONS), layers=[0])

    assert engine._sharing is True


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("model_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_another_dtype_is_the_plain_row_rounded_once(model_dtype: torch.dtype, pooling: Any, share: bool) -> None:
    engine = engine_of("llama", model_dtype, share_prefixes=share)
    for positions in POSITIONS:
        asked = {"pooling": pooling, "positions": positions, "layers": [1, 2]}
        plain = captured(engine, **asked)
        for dtype, numpy_dtype in (("bfloat16", ml_dtypes.bfloat16), ("float32", np.float32)):
            narrow = captured(engine, dtype=dtype, **asked)
            assert same_places(plain, narrow)
            for layer in (1, 2):
                assert narrow.acts[layer].dtype == numpy_dtype
                expected = plain.acts[layer].astype(np.float32).astype(numpy_dtype)
                assert np.array_equal(narrow.acts[layer], expected)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_products_of_bfloat16_rows_are_taken_in_float32(pooling: Any) -> None:
    engine = engine_of("llama", torch.bfloat16)
    plain = captured(engine, pooling=pooling, layers=[2])
    products = captured(engine, pooling=pooling, layers=[2], projection=Projection.onto(DIRECTIONS))

    wide = plain.acts[2].astype(np.float64)
    scale = np.linalg.norm(wide, axis=1).max()
    assert np.abs(products.acts[2] - wide @ UNIT.T).max() <= 2e-6 * scale


def test_batches_and_exact_runs_agree() -> None:
    engine, single = engine_of("llama"), engine_of("llama", batch_size=1)
    for asked in ({"projection": Projection.onto(DIRECTIONS)}, {"dtype": "float32"}):
        together, alone = captured(engine, layers=[1], **asked), captured(single, layers=[1], **asked)
        exact = captured(engine, layers=[1], exact=True, **asked)
        assert np.allclose(together.acts[1], alone.acts[1], rtol=1e-4, atol=1e-3)
        assert np.allclose(alone.acts[1], exact.acts[1], rtol=1e-4, atol=1e-3)


def test_scores_beside_products_are_unchanged() -> None:
    engine = engine_of("llama")
    asked = {"layers": [1], "perplexity": True, "logits": "last"}
    plain = captured(engine, **asked)
    narrow = captured(engine, projection=Projection.onto(DIRECTIONS), **asked)

    assert np.array_equal(plain.perplexity, narrow.perplexity)  # type: ignore[arg-type]
    assert np.array_equal(plain.logits, narrow.logits)  # type: ignore[arg-type]


def test_directions_of_another_width_are_refused_before_any_pass() -> None:
    with pytest.raises(InvalidInput, match="directions are 31 wide; rows of tiny are 32"):
        next(engine_of("llama").capture([[5, 6]], CaptureSpec(projection=Projection.onto(np.ones((1, 31))))))


@pytest.mark.parametrize(
    ("directions", "said"),
    [
        (np.zeros((2, 4)), "direction 0 is zero or not finite"),
        ([[1, 0], [np.nan, 1]], "direction 1 is zero or not finite"),
        ([[1, 0], [0, np.inf]], "direction 1 is zero or not finite"),
        (np.ones(4), r"directions must be \[directions, hidden\]; got shape \[4\]"),
        (np.ones((0, 4)), r"got shape \[0, 4\]"),
    ],
)
def test_directions_that_are_none_are_refused(directions: Any, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        Projection.onto(directions)


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1, 1e20, 1e30])
def test_directions_become_unit_length_whatever_theirs(scale: float) -> None:
    unit = Projection.onto(DIRECTIONS * scale).directions

    assert unit.dtype == np.float32
    assert np.allclose(np.linalg.norm(unit.astype(np.float64), axis=1), 1, atol=1e-6)
    assert np.allclose(unit, UNIT, atol=1e-6)


def test_narrowing_keeps_leading_axes_and_finds_the_device() -> None:
    rows = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(0))
    narrow = Narrowing(None, Projection.onto(DIRECTIONS).directions)

    assert narrow(rows).shape == (2, 3, 5)
    assert torch.allclose(narrow(rows), rows @ torch.from_numpy(UNIT.astype(np.float32)).T, atol=1e-5)
    assert Narrowing(None, None)(rows) is rows
    assert Narrowing("bfloat16", None)(rows).dtype == torch.bfloat16
