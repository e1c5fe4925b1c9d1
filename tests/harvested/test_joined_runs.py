"""Several runs read as one are the run that their prompts would have been."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from streamtap.errors import HarvestMismatch, InvalidInput, InvalidLayers
from streamtap.harvested.joined import JoinedRuns
from streamtap.harvested.reader import HarvestedRun

Make = Callable[..., Any]
CUTS = (0, 1, 7, 11)


@pytest.fixture(scope="module", params=[{}, {"pooling": "mean"}, {"positions": [-1]}, {"compression": "zstd"}])
def pair(request: pytest.FixtureRequest, make_run: Make) -> tuple[HarvestedRun, JoinedRuns]:
    """One run of all prompts, and runs of 1, 6 and 4 of them."""
    whole = make_run(**request.param)
    parts = [make_run(prompts=whole.prompts[start:stop], **request.param) for start, stop in pairwise(CUTS)]
    return HarvestedRun.open(whole.folder), JoinedRuns([HarvestedRun.open(part.folder) for part in parts])


def test_a_prompt_is_found_by_its_number_in_all(pair: tuple[HarvestedRun, JoinedRuns]) -> None:
    whole, joined = pair

    assert (len(joined), joined.layers, joined.width, joined.dtype) == (11, whole.layers, whole.width, whole.dtype)
    for i in [*range(11), -1, -11]:
        for layer, rows in whole.prompt(i).items():
            np.testing.assert_array_equal(joined.prompt(i)[layer], rows)
        assert joined.token_ids(i).tolist() == whole.token_ids(i).tolist()
        assert joined.positions(i).tolist() == whole.positions(i).tolist()
        assert joined.segments(i) is None
    for i in (11, -12):
        with pytest.raises(IndexError):
            joined.prompt(i)
    with pytest.raises(InvalidLayers):
        joined.prompt(0, layers=1)


@pytest.mark.parametrize("indices", [None, [10, 0, 3, 7, 3], [8, 9], [-1, 6], [], np.array([1, 0])])
def test_rows_of_many_come_in_the_order_asked_for(pair: tuple[HarvestedRun, JoinedRuns], indices: Any) -> None:
    whole, joined = (each.activations(indices, layers=[2]) for each in pair)

    assert joined.index.tolist() == whole.index.tolist()
    assert joined.offsets.tolist() == whole.offsets.tolist()
    assert joined.token_ids.tolist() == whole.token_ids.tolist()
    assert joined.positions.tolist() == whole.positions.tolist()
    assert (joined.pooling, joined.layers) == (whole.pooling, (2,))
    np.testing.assert_array_equal(joined.acts[2], whole.acts[2])
    with pytest.raises(IndexError):
        pair[1].activations([11])


def test_statistics_are_those_of_all_rows(pair: tuple[HarvestedRun, JoinedRuns]) -> None:
    whole, joined = (each.statistics() for each in pair)

    assert joined["layer_indices"].tolist() == whole["layer_indices"].tolist()
    for name in ("mean", "std"):
        assert joined[name].dtype == np.float32
        np.testing.assert_allclose(joined[name], whole[name], rtol=1e-5, atol=1e-6)


def test_what_is_not_alike_is_not_joined(make_run: Make) -> None:
    one, two = make_run(n_prompts=2), make_run(n_prompts=2, layers=[1])

    with pytest.raises(HarvestMismatch, match="not parts of one harvest: layer_indices differs"):
        JoinedRuns([HarvestedRun.open(each.folder) for each in (one, two)])
    with pytest.raises(InvalidInput, match="at least one run"):
        JoinedRuns([])
