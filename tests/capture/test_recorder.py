"""One pass recorded: the chosen rows and no others, or an error that names the block."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from streamtap.capture.recorder import PassLayout, Recorder
from streamtap.errors import CaptureMissed


def layout_of(lengths: tuple[int, ...], *chosen: list[int], start: int = 0) -> PassLayout:
    return PassLayout(lengths, tuple(np.array(each, np.int32) for each in chosen), (7, 8, 9)[: len(lengths)], start)


LAYOUT = layout_of((4, 2, 3), [0, 3], [1], [0, 1, 2])
#: Where the chosen rows stand in [batch, positions].
PLACES = [(0, 0), (0, 3), (1, 1), (2, 0), (2, 1), (2, 2)]


def stream_of(seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(seed)).to(dtype)


def record(streams: dict[int, torch.Tensor], pooling: str = "none", layout: PassLayout = LAYOUT) -> Any:
    recorder = Recorder(layout, sorted(streams), 5, pooling)
    for layer, stream in streams.items():
        recorder.read(layer, stream)
    return recorder.finish()


def test_a_layout_says_where_rows_and_tokens_lie() -> None:
    assert LAYOUT.width == 4
    assert LAYOUT.flat_rows.tolist() == [4 * b + position for b, position in PLACES]
    assert np.argwhere(LAYOUT.chosen_mask).tolist() == [list(place) for place in PLACES]
    assert LAYOUT.real_mask.sum(axis=1).tolist() == [4, 2, 3]


@pytest.mark.parametrize("pooling", ["none", "last_token", "first_token"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_chosen_rows_come_bit_for_bit_in_the_models_dtype(pooling: str, dtype: torch.dtype) -> None:
    streams = {2: stream_of(2, dtype), 0: stream_of(0, dtype)}

    rows = record(streams, pooling)

    assert list(rows) == [0, 2]
    for layer, stream in streams.items():
        assert rows[layer].dtype == dtype
        assert torch.equal(rows[layer], torch.stack([stream[place] for place in PLACES]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_sums_and_maxima_are_over_chosen_rows_only(dtype: torch.dtype) -> None:
    stream = stream_of(1, dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    chosen = [torch.stack([stream[place] for place in PLACES if place[0] == b]) for b in range(3)]

    sums, maxima = record({0: stream}, "mean")[0], record({0: stream}, "max")[0]

    assert sums.dtype == wide  # divided and rounded later, once
    torch.testing.assert_close(sums, torch.stack([rows.to(wide).sum(0) for rows in chosen]))
    assert maxima.dtype == dtype
    assert torch.equal(maxima, torch.stack([rows.amax(0) for rows in chosen]))


def test_a_sequence_without_a_chosen_row_in_this_pass_adds_nothing() -> None:
    layout = layout_of((4, 2, 3), [0], [], [1])

    assert torch.equal(record({0: stream_of(0)}, "mean", layout)[0][1], torch.zeros(5))
    assert torch.equal(record({0: stream_of(0)}, "max", layout)[0][1], torch.full((5,), float("-inf")))
    assert len(record({0: stream_of(0)}, "none", layout)[0]) == 2


def test_what_the_model_does_afterwards_to_its_output_does_not_reach_the_rows() -> None:
    recorder = Recorder(LAYOUT, [0], 5, "none")
    stream = stream_of(0)
    expected = torch.stack([stream[place] for place in PLACES])

    recorder.read(0, stream)
    stream.add_(1.0)  # as some blocks add to the residual in place

    assert torch.equal(recorder.finish()[0], expected)


def test_rows_keep_no_graph() -> None:
    assert not record({0: stream_of(0).requires_grad_()})[0].requires_grad


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("pooling", ["none", "mean", "max", "last_token"])
def test_a_real_value_that_is_not_finite_is_found_though_its_row_is_not_kept(value: float, pooling: str) -> None:
    spoilt = stream_of(1)
    spoilt[2, 1, 4] = value
    layout = layout_of((4, 2, 3), [0], [0], [2], start=100)

    with pytest.raises(CaptureMissed, match="block 3 .*not finite, first at prompt 9, position 101") as caught:
        record({0: stream_of(0), 3: spoilt}, pooling, layout)
    assert caught.value.layer == 3


@pytest.mark.parametrize("pooling", ["none", "mean", "max"])
def test_what_stands_in_the_padding_does_not_matter(pooling: str) -> None:
    spoilt = stream_of(0)
    spoilt[1, 2:] = float("nan")

    assert torch.equal(record({0: spoilt}, pooling)[0], record({0: stream_of(0)}, pooling)[0])


def test_large_half_precision_values_are_finite() -> None:
    large = torch.full((3, 4, 5), 60000.0, dtype=torch.float16)

    assert torch.isfinite(record({0: large})[0]).all()


def test_a_layer_of_zeros_is_dead_even_where_the_padding_is_not() -> None:
    dead = torch.zeros(3, 4, 5)
    dead[1, 3] = 1.0

    with pytest.raises(CaptureMissed, match="block 1 put out only zeros") as caught:
        record({0: stream_of(0), 1: dead})
    assert caught.value.layer == 1


def test_one_row_of_zeros_is_not_a_dead_layer() -> None:
    stream = stream_of(0)
    stream[0, 0] = 0

    assert record({0: stream})[0][0].abs().sum() == 0


def test_a_block_that_did_not_fire_is_named() -> None:
    recorder = Recorder(LAYOUT, [0, 1, 2], 5, "none")
    recorder.read(0, stream_of(0))
    recorder.read(2, stream_of(2))

    with pytest.raises(CaptureMissed, match="block 1 fired 0 of 1 times") as caught:
        recorder.finish()
    assert caught.value.layer == 1


def test_a_block_that_fires_twice_is_refused_at_once() -> None:
    recorder = Recorder(LAYOUT, [0], 5, "none")
    recorder.read(0, stream_of(0))

    with pytest.raises(CaptureMissed, match="block 0 fired twice") as caught:
        recorder.read(0, stream_of(0))
    assert caught.value.layer == 0


@pytest.mark.parametrize("shape", [(3, 4, 6), (3, 3, 5), (2, 4, 5), (12, 1, 5)])
def test_an_output_of_another_shape_than_the_pass_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(CaptureMissed, match=r"block 0 put out shape .*expected \(3, 4, 5\)"):
        Recorder(LAYOUT, [0], 5, "none").read(0, torch.ones(shape))
