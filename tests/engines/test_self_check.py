from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from streamtap.activations import Activations
from streamtap.engines.self_check import TOLERANCES, SelfCheck, check_engine, compare
from streamtap.engines.self_check_reference import Reference
from streamtap.engines.transformers import TransformersEngine
from streamtap.errors import CaptureMissed, InvalidInput, TransferFailed, Unsupported
from streamtap.spec import CaptureSpec
from streamtap.testing.fake_engine import FakeEngine
from streamtap.testing.models import tiny_model
from streamtap.testing.reference import plain_rows

IDS = np.array([31, 45, 28, 77, 52, 60, 64, 70, 26, 88, 33, 41], np.int32)
Rows = Any


@pytest.fixture
def rows() -> Rows:
    """Six layers of a stream that grows, as a model's does: each adds to the one before."""
    steps = np.random.default_rng(0).normal(size=(6, 12, 16))
    return np.cumsum(steps, axis=0).astype(np.float32)


def _reference(rows: Rows) -> Reference:
    return Reference(rows, IDS, "org/x", "sha256:0", "by hand")


def _compared(mine: Rows, right: Rows, dtype: str = "float32") -> SelfCheck:
    return compare(mine, right, name="x on y", dtype=dtype)


def _noisy(rows: Rows, relative: float, seed: int = 1) -> Rows:
    """Every row off by ``relative`` of its own length, in a direction of its own."""
    noise = np.random.default_rng(seed).normal(size=rows.shape)
    noise *= np.linalg.norm(rows, axis=-1, keepdims=True) / np.linalg.norm(noise, axis=-1, keepdims=True)
    return rows + relative * noise


def test_the_same_rows_pass(rows: Rows) -> None:
    found = _compared(rows, rows)

    assert found.passed
    assert found.fault is None
    assert [(each.layer, each.verdict, each.nearest) for each in found.layers] == [(k, "fits", k) for k in range(6)]
    assert all(each.relative == 0 and each.cosine == pytest.approx(1) for each in found.layers)
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.fault = "x"  # type: ignore[misc]


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_what_is_promised_is_where_it_ends(rows: Rows, dtype: str) -> None:
    promised = TOLERANCES[dtype]

    assert _compared(_noisy(rows, 0.9 * promised.relative), rows, dtype).passed
    found = _compared(_noisy(rows, 1.1 * promised.relative), rows, dtype)
    assert [each.verdict for each in found.layers] == ["differs"] * 6
    assert found.fault is not None
    assert found.fault.startswith("layer 0 of x on y is not the model's: cosine ")
    assert f"{found.layers[0].cosine:.6f} and relative error {found.layers[0].relative:.2g}, where" in found.fault
    assert found.fault.endswith(
        f"where {dtype} is to have {promised.cosine} at least and {promised.relative} at most; "
        "so it is with 6 of 6 layers"
    )


def test_one_row_that_points_elsewhere_is_found_among_many(rows: Rows) -> None:
    long = np.concatenate([rows] * 40, axis=1)
    mine = long.copy()
    mine[3, 17] = -mine[3, 17]

    found = _compared(mine, long, "bfloat16")

    assert found.layers[3].cosine == pytest.approx(-1, abs=1e-6)
    assert [each.layer for each in found.layers if each.verdict != "fits"] == [3]


def test_numbers_are_those_of_their_definition(rows: Rows) -> None:
    mine = _noisy(rows, 0.03)

    found = _compared(mine, rows, "bfloat16").layers[2]

    a, b = mine[2].astype(np.float64), rows[2].astype(np.float64)
    cosines = (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
    assert found.cosine == pytest.approx(cosines.min())
    first = np.linalg.norm(a[0] - b[0]) / np.linalg.norm(b[0])
    assert found.relative == pytest.approx(max(first, np.linalg.norm(a[1:] - b[1:]) / np.linalg.norm(b[1:])))


def test_a_long_first_row_neither_hides_the_others_nor_is_hidden(rows: Rows) -> None:
    rows[:, 0] *= 1000
    rest, first = rows.copy(), rows.copy()
    rest[4, 1:] *= 1.5
    first[4, 0] *= 1.5

    for mine in (rest, first):
        found = _compared(mine, rows, "bfloat16")
        assert [each.layer for each in found.layers if each.verdict == "differs"] == [4]
        assert found.layers[4].relative == pytest.approx(0.5, rel=1e-3)
        assert found.layers[4].cosine == pytest.approx(1)


def test_a_prompt_of_one_token_is_compared_too(rows: Rows) -> None:
    assert _compared(rows[:, :1], rows[:, :1]).passed
    assert not _compared(rows[:, :1] * 1.5, rows[:, :1]).passed


@pytest.mark.parametrize(
    ("step", "first"), [(1, "layer 0 of x on y is layer 1's"), (-1, "layer 1 of x on y is layer 0's")]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_one_layer_off_is_told_so(rows: Rows, step: int, first: str, dtype: str) -> None:
    mine = np.roll(rows, -step, axis=0)
    mine[-1 if step == 1 else 0] = np.random.default_rng(2).normal(size=rows.shape[1:])  # a norm, or embeddings
    mine = mine.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32)

    found = _compared(mine, rows, dtype)

    assert found.fault == f"{first} output: it is shifted by one; so it is with 5 of 6 layers"
    assert [each.nearest for each in found.layers if each.verdict == "shifted"] == [
        each.layer + step for each in found.layers if each.verdict == "shifted"
    ]


def test_a_shift_is_found_where_neighbours_are_within_the_promise(rows: Rows) -> None:
    """In a deep model one layer changes the stream by less than bfloat16 may be off."""
    slow = np.cumsum(np.concatenate([20 * rows[:1], 0.3 * (rows[1:] - rows[:-1])]), axis=0)
    assert np.linalg.norm(slow[3] - slow[2]) / np.linalg.norm(slow[3]) < 0.1
    mine = np.concatenate([slow[1:], slow[-1:]])

    for each in (mine, _noisy(mine, 0.05)):
        found = _compared(each, slow, "bfloat16")
        assert found.fault == "layer 0 of x on y is layer 1's output: it is shifted by one; so it is with 5 of 6 layers"
    assert _compared(_noisy(slow, 0.05), slow, "bfloat16").passed


def test_one_layer_off_is_found_where_neighbours_are_within_the_promise(rows: Rows) -> None:
    slow = np.cumsum(np.concatenate([20 * rows[:1], 0.3 * (rows[1:] - rows[:-1])]), axis=0)
    mine = slow.copy()
    mine[2] = slow[3]

    found = _compared(mine, slow, "bfloat16")

    assert TOLERANCES["bfloat16"].holds(found.layers[2].cosine, found.layers[2].relative)
    assert found.fault == "layer 2 of x on y is layer 3's output: it is shifted by one"


def test_one_layer_in_anothers_place_is_told_so(rows: Rows) -> None:
    mine = rows.copy()
    mine[2] = rows[3]

    found = _compared(mine, rows)

    assert found.fault == "layer 2 of x on y is layer 3's output: it is shifted by one"
    assert [each.verdict for each in found.layers] == ["fits", "fits", "shifted", "fits", "fits", "fits"]


def test_layers_that_are_alike_are_no_shift(rows: Rows) -> None:
    rows[3] = rows[2]

    assert _compared(rows, rows).passed


def test_a_model_of_one_layer_is_compared_too(rows: Rows) -> None:
    assert _compared(rows[:1], rows[:1]).passed
    assert "is not the model's" in str(_compared(rows[1:2], rows[:1]).fault)


def _zero_layer(rows: Rows) -> Rows:
    rows[4] = 0
    return rows


def _zero_rows(rows: Rows) -> Rows:
    rows[4, 3:5] = 0
    return rows


def _not_a_number(rows: Rows) -> Rows:
    rows[4, 7, 2] = np.nan
    return rows


def _infinite(rows: Rows) -> Rows:
    rows[4, 7, 2] = -np.inf
    return rows


@pytest.mark.parametrize(
    ("break_it", "verdict", "said"),
    [
        (_zero_layer, "zeros", "layer 4 of x on y holds only zeros"),
        (_zero_rows, "zeros", "layer 4 of x on y is zero at 2 of 12 positions"),
        (_not_a_number, "not finite", "layer 4 of x on y holds a value that is not finite"),
        (_infinite, "not finite", "layer 4 of x on y holds a value that is not finite"),
    ],
)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_a_broken_layer_is_named(
    rows: Rows, break_it: Callable[[Rows], Rows], verdict: str, said: str, dtype: Any
) -> None:
    found = _compared(break_it(rows.copy()).astype(dtype), rows, np.dtype(dtype).name)

    assert found.fault == said
    assert [each.verdict for each in found.layers] == ["fits"] * 4 + [verdict, "fits"]


@pytest.mark.parametrize(
    ("cut", "said"),
    [
        (np.s_[:5], "x on y gives 5 layers; the reference has 6"),
        (np.s_[:, :11], "x on y gives 11 rows a layer; the reference has 12"),
        (np.s_[:, :, :15], "x on y gives 15 values a row; the reference has 16"),
        (np.s_[0], "x on y gives rows of 2 axes; expected layers, tokens and hidden"),
    ],
)
def test_rows_of_another_shape_are_refused(rows: Rows, cut: Any, said: str) -> None:
    found = _compared(rows[cut], rows)

    assert found.fault == said
    assert found.layers == ()


def test_noise_is_refused_and_is_no_shift(rows: Rows) -> None:
    found = _compared(np.random.default_rng(3).normal(size=rows.shape), rows, "bfloat16")

    assert [each.verdict for each in found.layers] == ["differs"] * 6


def test_rows_out_of_all_range_are_refused(rows: Rows) -> None:
    assert "is not the model's" in str(_compared(rows * np.float32(1e30), rows).fault)


def test_a_row_that_is_zero_in_the_model_may_be_zero(rows: Rows) -> None:
    rows[:, 0] = 0

    assert _compared(rows, rows).passed
    assert not _compared(rows + np.float32(0.5), rows, "bfloat16").passed


def test_nothing_is_promised_for_other_dtypes(rows: Rows) -> None:
    with pytest.raises(InvalidInput, match="compute in 'int8', only for float64, float32, float16, bfloat16"):
        _compared(rows, rows, "int8")


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_right_engine_passes_in_each_dtype(family: str, dtype: str) -> None:
    right = plain_rows(tiny_model(family, std=0.1), IDS.tolist())
    reference = _reference(np.stack([right[layer].numpy() for layer in sorted(right)]))
    engine = TransformersEngine(tiny_model(family, std=0.1, dtype=getattr(torch, dtype)))

    found = check_engine(engine, reference, name="tiny")

    assert found.fault is None
    assert found.dtype == dtype
    assert max(each.relative for each in found.layers) > 0 or dtype == "float32"


class _Faulty:
    """An engine whose rows are ``change``d before anyone sees them."""

    def __init__(self, change: Callable[[dict[int, Rows]], dict[int, Rows]] | Exception, **provenance: Any) -> None:
        self._inner = FakeEngine(n_layers=5, hidden=16)
        self._change = change
        self.provenance = dataclasses.replace(self._inner.provenance, **provenance)
        self.tokenizer = self._inner.tokenizer

    def capture(self, prompts: Any, spec: CaptureSpec, *, ordered: bool = True) -> Iterator[Activations]:
        if isinstance(self._change, Exception):
            raise self._change
        for part in self._inner.capture(prompts, spec, ordered=ordered):
            yield dataclasses.replace(part, acts=self._change(part.acts))

    def close(self) -> None:
        pass

    def reference(self) -> Reference:
        return _reference(np.stack([self._inner.rows(IDS, layer) for layer in range(5)]))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda acts: acts, None),
        (
            lambda acts: {k: acts[min(k + 1, 4)] for k in acts},
            "layer 0 of it is layer 1's output: it is shifted by one",
        ),
        (lambda acts: acts | {3: acts[3] * 0}, "layer 3 of it holds only zeros"),
        (lambda acts: acts | {3: acts[3] * np.nan}, "layer 3 of it holds a value that is not finite"),
        (lambda acts: {k: rows[:, :8] for k, rows in acts.items()}, "it gives 8 values a row; the reference has 16"),
        (lambda acts: {k: rows for k, rows in acts.items() if k}, "it gives 4 layers; the reference has 5"),
        (lambda acts: acts | {2: acts[2][::-1]}, "layer 2 of it is not the model's: cosine"),
    ],
)
def test_each_kind_of_broken_engine_is_refused_by_name(change: Any, said: str | None) -> None:
    engine = _Faulty(change)

    fault = check_engine(engine, engine.reference(), name="it").fault

    assert fault is None if said is None else str(fault).startswith(said)


def test_a_capture_that_the_engine_itself_refuses_is_a_fault() -> None:
    engine = _Faulty(CaptureMissed("block 3 put out only zeros for prompt 0.", layer=3))

    found = check_engine(engine, engine.reference(), name="it")

    assert found.fault == "it gives no whole capture: block 3 put out only zeros for prompt 0."


def test_what_is_no_fault_of_the_rows_is_raised() -> None:
    engine = _Faulty(TransferFailed("the engine cannot be reached."))
    with pytest.raises(TransferFailed):
        check_engine(engine, engine.reference(), name="it")


def test_quantised_weights_are_another_model() -> None:
    engine = _Faulty(lambda acts: acts, quantization="fp8:1")
    with pytest.raises(Unsupported, match=r"it has quantised weights \(fp8:1\)"):
        check_engine(engine, engine.reference(), name="it")


def test_rows_that_were_narrowed_on_the_way_are_held_to_the_looser_promise() -> None:
    engine = _Faulty(lambda acts: {k: rows.astype(ml_dtypes.bfloat16) for k, rows in acts.items()})

    found = check_engine(engine, engine.reference(), name="it")

    assert (found.dtype, found.fault) == ("bfloat16", None)


def test_the_page_of_the_command_line_has_the_promises() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "command-line.md").read_text(encoding="utf-8")

    for dtype in ("float32", "float16", "bfloat16"):
        promised = TOLERANCES[dtype]
        assert any(
            line.startswith(f"| `{dtype}`") and line.endswith(f"| {promised.cosine} | {promised.relative} |")
            for line in page.splitlines()
        )
    assert TOLERANCES["float64"] == TOLERANCES["float32"]
