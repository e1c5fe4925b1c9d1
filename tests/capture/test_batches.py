"""The plan of passes: nobody is lost, nobody runs twice, and what is shared is really equal."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streamtap.capture.batches import (
    MIN_SAVED_TOKENS,
    MIN_SHARED_TOKENS,
    Group,
    TokenIds,
    cut_batches,
    share_prefixes,
)

#: The same examples in every run, however busy the machine.
STEADY = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


def tokens(*parts: Sequence[int]) -> TokenIds:
    return np.array([token for part in parts for token in part], np.int32)


@st.composite
def trees(draw: st.DrawFn) -> list[TokenIds]:
    """Distinct sequences that grow out of each other: each continues the start of an earlier one."""
    grown: list[tuple[int, ...]] = []
    for _ in range(draw(st.integers(1, 24))):
        stem = draw(st.sampled_from(grown)) if grown else ()
        kept = stem[: draw(st.sampled_from([0, 31, 32, 33, 64, 100, 1000]))]
        tail = tuple(draw(st.lists(st.integers(0, 70_000), min_size=1, max_size=3)))
        middle = (draw(st.integers(0, 2)),) * draw(st.sampled_from([0, 30, 70]))
        grown.append(kept + middle + tail)
    return [tokens(each) for each in dict.fromkeys(grown)]


def run_tokens(groups: Sequence[Group], sequences: Sequence[TokenIds]) -> int:
    """Tokens that have to be run."""
    return sum(group.prefix + sum(len(sequences[i]) - group.prefix for i in group.members) for group in groups)


@STEADY
@given(trees())
def test_everyone_is_in_one_group_of_equal_beginnings(sequences: list[TokenIds]) -> None:
    groups = share_prefixes(sequences)

    assert sorted(i for group in groups for i in group.members) == list(range(len(sequences)))
    assert all(group.members for group in groups)
    for group in groups:
        first = sequences[group.members[0]][: group.prefix]
        for i in group.members:
            assert np.array_equal(sequences[i][: group.prefix], first)
            assert len(sequences[i]) > group.prefix


@STEADY
@given(trees())
def test_sharing_is_only_done_where_it_saves_enough(sequences: list[TokenIds]) -> None:
    groups = share_prefixes(sequences)
    shared = [group for group in groups if group.prefix]

    for group in shared:
        assert group.prefix >= MIN_SHARED_TOKENS
        assert group.prefix * (len(group.members) - 1) >= MIN_SAVED_TOKENS
    whole = sum(map(len, sequences))
    assert run_tokens(groups, sequences) <= whole - MIN_SAVED_TOKENS * len(shared)
    assert sum(not group.prefix for group in groups) <= 1


def best_single(sequences: Sequence[TokenIds]) -> int:
    """Most tokens saved by one group that shares one prefix, tried for every prefix there is."""
    best = 0
    for stem in sequences:
        for n in range(MIN_SHARED_TOKENS, len(stem)):
            sharing = sum(len(each) > n and np.array_equal(each[:n], stem[:n]) for each in sequences)
            best = max(best, n * (sharing - 1))
    return best if best >= MIN_SAVED_TOKENS else 0


@settings(STEADY, max_examples=40)
@given(trees())
def test_several_groups_save_at_least_what_the_best_one_would(sequences: list[TokenIds]) -> None:
    saved = sum(map(len, sequences)) - run_tokens(share_prefixes(sequences), sequences)

    assert saved >= best_single(sequences)


@STEADY
@given(trees(), st.data())
def test_the_order_of_the_prompts_does_not_change_what_is_saved(sequences: list[TokenIds], data: st.DataObject) -> None:
    shuffled = data.draw(st.permutations(sequences))

    assert run_tokens(share_prefixes(shuffled), shuffled) == run_tokens(share_prefixes(sequences), sequences)


SYSTEM, EXAMPLES, OTHER = list(range(100, 200)), list(range(300, 400)), list(range(500, 600))


def test_a_prefix_within_a_prefix_is_shared_at_the_longer_one() -> None:
    long = [tokens(SYSTEM, EXAMPLES, [i]) for i in range(4)]
    short = [tokens(SYSTEM, [i]) for i in range(3)]

    groups = share_prefixes([*long, *short, tokens(OTHER)])

    assert {(group.prefix, group.members) for group in groups} == {(200, (0, 1, 2, 3)), (100, (4, 5, 6)), (0, (7,))}


def test_a_little_more_in_common_does_not_break_a_large_group() -> None:
    prompts = [tokens(SYSTEM, [i, j]) for i in range(5) for j in range(2)]

    (group,) = share_prefixes(prompts)

    assert group.prefix == 100
    assert len(group.members) == 10


def test_a_prompt_that_is_the_prefix_keeps_one_token_of_its_own() -> None:
    (group,) = share_prefixes([tokens(SYSTEM), tokens(SYSTEM, [1]), tokens(SYSTEM, [2, 3])])

    assert group.prefix == 99
    assert sorted(group.members) == [0, 1, 2]


def test_large_token_ids_are_told_apart() -> None:
    ids = [1, 255, 256, 65_535, 65_536, 2**31 - 1]
    prompts = [tokens(SYSTEM, [i], [j]) for j in ids for i in ids]

    (group,) = share_prefixes(prompts)

    assert (group.prefix, len(group.members)) == (100, 36)


@pytest.mark.parametrize("prompts", [[], [tokens([5])], [tokens([5]), tokens([6])], [tokens(SYSTEM)]], ids=len)
def test_what_shares_nothing_is_one_group(prompts: list[TokenIds]) -> None:
    groups = share_prefixes(prompts)

    assert groups == ([Group(0, tuple(i for i in np.argsort([p[0] for p in prompts]).tolist()))] if prompts else [])


@pytest.mark.parametrize(("length", "n", "shares"), [(31, 40, False), (32, 4, False), (32, 5, True), (128, 2, True)])
def test_the_thresholds_stand_where_they_are_said_to(length: int, n: int, shares: bool) -> None:
    prompts = [tokens(range(1000, 1000 + length), [i]) for i in range(n)]

    assert any(group.prefix for group in share_prefixes(prompts)) is shares


GROUPS = st.tuples(
    st.lists(st.integers(1, 60), min_size=1, max_size=30),
    st.sampled_from([0, 0, 32, 100]),
    st.none() | st.integers(1, 8),
    st.integers(1, 150),
)


@STEADY
@given(GROUPS)
def test_batches_hold_everyone_once_within_both_limits(case: tuple[list[int], int, int | None, int]) -> None:
    tails, prefix, max_prompts, max_tokens = case
    lengths = [prefix + tail for tail in tails]
    members = tuple(range(1, len(lengths), 2)) + tuple(range(0, len(lengths), 2))

    batches = list(cut_batches(Group(prefix, members), lengths, max_prompts, max_tokens))

    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        width = max(lengths[i] for i in batch) - prefix
        assert len(batch) <= (max_prompts or len(batch))
        assert len(batch) == 1 or len(batch) * width <= max_tokens
    in_order = [lengths[i] for batch in batches for i in batch]
    assert in_order == sorted(lengths, reverse=True)


@STEADY
@given(GROUPS)
def test_no_two_batches_could_have_been_one(case: tuple[list[int], int, int | None, int]) -> None:
    lengths, _, max_prompts, max_tokens = case

    batches = list(cut_batches(Group(0, tuple(range(len(lengths)))), lengths, max_prompts, max_tokens))

    for batch in batches[:-1]:
        padded = (len(batch) + 1) * max(lengths[i] for i in batch)
        assert len(batch) == max_prompts or padded > max_tokens


def test_short_tails_over_a_long_prefix_do_not_pile_up_states() -> None:
    lengths = [1001] * 4000

    batches = list(cut_batches(Group(1000, tuple(range(4000))), lengths, None, 2048))

    assert max(map(len, batches)) * 1001 <= 8 * 2048
    assert min(map(len, batches[:-1])) > 1
