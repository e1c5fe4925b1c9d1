"""Which rows go to which shard, before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamtap.dataset import plan as planning
from streamtap.dataset.contents import GIB, make_plan
from streamtap.dataset.manifest import Shard
from streamtap.dataset.plan import MOST_FILES, check_files, plan_full, plan_pooled
from streamtap.errors import InvalidInput

Make = Callable[..., Any]


def test_shards_are_filled_one_after_the_other() -> None:
    layout = plan_pooled(12, 8, 47)

    assert layout.shards == (Shard(5, 5), Shard(5, 5), Shard(2, 2))
    assert layout.places.shards.tolist() == [0] * 5 + [1] * 5 + [2] * 2
    assert layout.places.rows.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]


@settings(deadline=None)
@given(n_prompts=st.integers(1, 200), row_bytes=st.integers(1, 30), size=st.integers(1, 300))
def test_pooled_shards_respect_their_size(n_prompts: int, row_bytes: int, size: int) -> None:
    if size < row_bytes:
        with pytest.raises(InvalidInput, match=f"at least one row of {row_bytes} bytes; got {size}"):
            plan_pooled(n_prompts, row_bytes, size)
        return
    layout = plan_pooled(n_prompts, row_bytes, size)
    rows = [shard.rows for shard in layout.shards]

    assert sum(rows) == n_prompts
    assert max(rows) * row_bytes <= size
    # Greedy: all but the last are full.
    assert all((each + 1) * row_bytes > size for each in rows[:-1])
    assert layout.places.rows.tolist() == [row for each in rows for row in range(each)]


@settings(deadline=None)
@given(counts=st.lists(st.integers(1, 9), min_size=1, max_size=40), most_rows=st.integers(1, 12))
def test_a_prompt_is_never_over_two_shards(counts: list[int], most_rows: int) -> None:
    layout = plan_full(np.array(counts, np.int64), 4, 4 * most_rows + 3)
    tokens, offsets = layout.token_places(slice(0, len(counts)))
    n_last = layout.last_token_shards
    ends = offsets[1:] - 1

    assert np.diff(offsets).tolist() == counts
    some, of_some = layout.token_places(slice(1, 3))
    here = slice(offsets[1], offsets[min(3, len(counts))])
    assert some.rows.tolist() == tokens.rows[here].tolist()
    assert some.shards.tolist() == tokens.shards[here].tolist()
    assert of_some.tolist() == (offsets[1:4] - offsets[1]).tolist()
    assert [shard.rows for shard in layout.shards[:n_last]] == [
        shard.rows for shard in plan_pooled(len(counts), 4, 4 * most_rows + 3).shards
    ]
    assert tokens.shards[ends].tolist() == layout.places.shards.tolist()
    assert tokens.rows[ends].tolist() == layout.places.rows.tolist()
    taken: list[tuple[int, int]] = []
    for start, stop in pairwise(offsets):
        shards, rows = tokens.shards[start : stop - 1], tokens.rows[start : stop - 1]
        assert len(set(shards.tolist())) <= 1
        assert all(shard >= n_last for shard in shards)
        assert np.diff(rows).tolist() == [1] * max(0, len(rows) - 1)
        taken += zip(shards.tolist(), rows.tolist(), strict=True)
    # Prompt after prompt, every row of every shard once.
    rest = layout.shards[n_last:]
    assert taken == [(n_last + number, row) for number, shard in enumerate(rest) for row in range(shard.rows)]
    assert all(shard.rows <= most_rows or shard.rows in [count - 1 for count in counts] for shard in rest)


def test_prompts_of_one_token_have_last_tokens_alone() -> None:
    layout = plan_full(np.ones(3, np.int64), 4, 8)

    assert layout.shards == (Shard(2, 2), Shard(1, 1))
    assert layout.last_token_shards == 2


def test_a_prompt_longer_than_a_shard_has_one_of_its_own() -> None:
    layout = plan_full(np.array([2, 9, 2], np.int64), 1, 3)

    assert [shard.rows for shard in layout.shards] == [3, 1, 8, 1]


def test_many_prompts_make_few_files_by_default(make: Make) -> None:
    made = make(1, layers=range(30)).contents
    many = replace(made, n_prompts=25_000, hidden=replace(made.hidden, width=576))
    plan = make_plan(many)

    assert plan.hidden is not None
    assert len(plan.hidden.shards) * 30 < 100
    assert GIB == 1 << 30


@settings(deadline=None)
@given(layers=st.integers(1, 128), n_prompts=st.integers(1, 40_000), rows_a_shard=st.integers(1, 80))
def test_more_files_than_a_folder_holds_are_refused_with_a_size_that_does(
    layers: int, n_prompts: int, rows_a_shard: int
) -> None:
    def count(size: int) -> int:
        return layers * len(plan_pooled(n_prompts, 4, size).shards)

    size = rows_a_shard * 4
    if count(size) <= MOST_FILES:
        check_files(count, size)
        return
    with pytest.raises(InvalidInput, match=rf"makes {count(size)} files, .* holds {MOST_FILES}") as caught:
        check_files(count, size)
    enough = int(str(caught.value).rpartition("shard_max_bytes=")[2].removesuffix(" would do."))
    assert count(enough) <= MOST_FILES


def test_the_size_that_does_is_not_just_in_proportion() -> None:
    """64 layers of 309 shards are less than twice the most; but at twice the size 155 shards are too many."""

    def count(size: int) -> int:
        return 64 * len(plan_pooled(309, 1, size).shards)

    with pytest.raises(InvalidInput, match="shard_max_bytes=3 would do"):
        check_files(count, 1)


def test_the_size_that_does_is_found_in_few_plans() -> None:
    sizes: list[int] = []

    def count(size: int) -> int:
        sizes.append(size)
        return -(-40_000_000 // size)

    with pytest.raises(InvalidInput, match="would do"):
        check_files(count, 1)
    assert len(sizes) <= 4


def test_layers_alone_may_be_too_many() -> None:
    with pytest.raises(InvalidInput, match="makes 20000 files.*fewer layers would do"):
        check_files(lambda size: 20_000, 1)


def test_the_plan_of_contents_counts_files_of_every_kind(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "MOST_FILES", 40)
    contents = make(counts=[3, 1, 5, 2, 2, 2] * 4, layers=[0, 1], k=2).contents
    with pytest.raises(InvalidInput, match="files, and a folder") as caught:
        make_plan(contents, 16)
    enough = int(str(caught.value).rpartition("shard_max_bytes=")[2].removesuffix(" would do."))
    plan = make_plan(contents, enough)

    assert plan.hidden is not None
    assert plan.logits is not None
    assert 2 * len(plan.hidden.shards) + len(plan.logits.shards) <= 40


def test_nothing_to_publish_is_refused(make: Make) -> None:
    for contents in (make(0).contents, make(3, layers=()).contents):
        with pytest.raises(InvalidInput, match="nothing to publish"):
            make_plan(contents)


@pytest.mark.parametrize("counts", [[1, 0, 2], [1, 2]], ids=["no row", "too few"])
def test_a_prompt_without_rows_is_refused(counts: list[int], make: Make) -> None:
    made = make(counts=[1, 1, 2]).contents
    with pytest.raises(InvalidInput, match="at least one row"):
        make_plan(replace(made, hidden=replace(made.hidden, counts=np.array(counts, np.int64))))
