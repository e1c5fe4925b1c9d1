"""Layer specs: every way of writing them, what they name, and what is refused."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streamtap.errors import InvalidLayers
from streamtap.layers import from_hidden_states_index, resolve_layers, to_hidden_states_index

#: The same examples in every run, however busy the machine.
STEADY = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])

MEANT: list[tuple[Any, tuple[int, ...]]] = [
    (0, (0,)),
    (15, (15,)),
    (-1, (15,)),
    (-16, (0,)),
    (np.int64(3), (3,)),
    ("all", tuple(range(16))),
    ("middle", (8,)),
    ("last", (15,)),
    ("3", (3,)),
    ("-1", (15,)),
    ("8-10", (8, 9, 10)),
    ("5-5", (5,)),
    ("8,10", (8, 10)),
    (" 8 , 10 - 12 ", (8, 10, 11, 12)),
    ("10-11,8,-1", (8, 10, 11, 15)),
    ("8:10", (8, 9)),
    (":2", (0, 1)),
    ("-2:", (14, 15)),
    ([8, -1, 8, 15], (8, 15)),
    ((2, 1), (1, 2)),
    ({3, 4}, (3, 4)),
    (range(3), (0, 1, 2)),
    (np.array([2, 1]), (1, 2)),
    ((n for n in (4, 5)), (4, 5)),
    ([], ()),
]


@pytest.mark.parametrize(("spec", "layers"), MEANT, ids=lambda value: str(value)[:20])
def test_a_spec_names_its_blocks_ascending_and_once(spec: Any, layers: tuple[int, ...]) -> None:
    found = resolve_layers(spec, 16)

    assert found == layers
    assert all(type(layer) is int for layer in found)


@pytest.mark.parametrize("n_layers", [1, 2, 3, 30])
def test_the_middle_is_a_block_of_every_model(n_layers: int) -> None:
    assert resolve_layers("middle", n_layers) == (n_layers // 2,)
    assert resolve_layers("last", n_layers) == resolve_layers(-1, n_layers) == (n_layers - 1,)


REFUSED: list[tuple[Any, str]] = [
    (16, "layer 16 is not in the model: it has 16 blocks, 0 to 15"),
    (-17, "layer -17"),
    ([3, 16], "layer 16"),
    ("16", "layer 16"),
    ("3-16", "layer 16"),
    ("9-8", "backwards; write 8-9"),
    ("9:8", "names no block"),
    ("20:", "names no block"),
    (True, "whole|int"),
    ([True], "whole numbers"),
    (np.array([True, False]), "whole numbers"),
    ([1.0], "whole numbers"),
    (1.5, "must be an int"),
    (None, "must be an int"),
    (np.array(3), "must be an int"),
    (np.array([[1, 2]]), "whole numbers"),
    ([[1, 2]], "whole numbers"),
    (["3"], "whole numbers"),
    # one number for two, if blanks were only left out
    ("1 2", "not understood"),
    ("", "not understood"),
    (" ", "not understood"),
    (",", "not understood"),
    ("8,", "not understood"),
    ("-", "not understood"),
    ("-:", "not understood"),
    ("1:2:3", "not understood"),
    ("-3--1", "not understood"),
    ("All", "not understood"),
    ("first", "not understood"),
    ("٣", "not understood"),
]


@pytest.mark.parametrize(("spec", "reason"), REFUSED, ids=lambda value: repr(value)[:20])
def test_what_names_no_block_is_refused_with_the_reason(spec: Any, reason: str) -> None:
    with pytest.raises(InvalidLayers, match=reason):
        resolve_layers(spec, 16)


@STEADY
@given(st.text("0123456789-:, al", max_size=8), st.integers(1, 20))
def test_any_text_gives_blocks_of_the_model_or_is_refused(text: str, n_layers: int) -> None:
    layers: tuple[int, ...] = ()
    with suppress(InvalidLayers):
        layers = resolve_layers(text, n_layers)
        assert layers
    assert list(layers) == sorted(set(layers) & set(range(n_layers)))


@STEADY
@given(st.lists(st.integers(-8, 7)))
def test_a_list_and_its_text_mean_the_same(numbers: list[int]) -> None:
    layers = resolve_layers(numbers, 8)

    assert layers == tuple(sorted({number % 8 for number in numbers}))
    if numbers:
        assert resolve_layers(",".join(map(str, numbers)), 8) == layers


def test_hidden_states_are_counted_from_the_embedding() -> None:
    assert [from_hidden_states_index(i) for i in (1, 30)] == [0, 29]
    assert [to_hidden_states_index(k) for k in (0, 29)] == [1, 30]
    for index in (0, -1):
        with pytest.raises(InvalidLayers, match=rf"hidden_states\[{index}\]"):
            from_hidden_states_index(index)
    with pytest.raises(InvalidLayers, match="-1"):
        to_hidden_states_index(-1)
