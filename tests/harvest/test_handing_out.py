from __future__ import annotations

import numpy as np

from streamtap.harvest.handing_out import AT_ONCE, HandingOut
from streamtap.harvest.plan import ShardPlan, Tokenised


def _plans(count: int) -> list[ShardPlan]:
    return [ShardPlan(number, number, (Tokenised(np.array([number + 4], np.int32)),)) for number in range(count)]


def _all(handing: HandingOut) -> list[tuple[int, int]]:
    found = []
    while (each := handing.next()) is not None:
        found.append((each[0], each[1].number))
    return found


def test_shards_go_out_in_order_one_to_each_before_a_second_to_any() -> None:
    handing = HandingOut(iter(_plans(7)))
    handing.join(0)
    handing.join(1)

    assert _all(handing) == [(0, 0), (1, 1), (0, 2), (1, 3)]


def test_a_hand_that_is_free_again_gets_the_next() -> None:
    plans = _plans(4)
    handing = HandingOut(iter(plans))
    handing.join(0)
    assert _all(handing) == [(0, 0), (0, 1)]

    handing.made(0, plans[0])

    assert _all(handing) == [(0, 2)]


def test_shards_of_an_engine_that_left_go_first_and_to_another() -> None:
    handing = HandingOut(iter(_plans(6)))
    handing.join(0)
    handing.join(1)
    _all(handing)

    lost = handing.leave(0)
    tries = [handing.again(plan) for plan in reversed(lost)]
    handing.join(2)

    assert [plan.number for plan in lost] == [0, 2]
    assert tries == [1, 1]
    assert _all(handing) == [(2, 0), (2, 2)]


def test_an_engine_that_left_before_it_was_ready_had_nothing() -> None:
    assert HandingOut(iter(_plans(1))).leave(5) == []


def test_tries_are_counted_by_shard_until_it_is_made() -> None:
    plans = _plans(1)
    handing = HandingOut(iter(plans))
    counted = []
    for engine in range(3):
        handing.join(engine)
        _all(handing)
        counted.append(handing.again(handing.leave(engine)[0]))

    assert counted == [1, 2, 3]


def test_a_shard_in_a_spool_waits_for_its_engine() -> None:
    plans = _plans(5)
    handing = HandingOut(iter(plans))
    handing.join(0)
    handing.join(1, spooled=[0])

    assert _all(handing) == [(0, 1), (1, 0), (0, 2), (1, 3)]


def test_a_shard_that_could_not_be_uploaded_goes_back_to_the_same_engine_even_if_others_are_idle() -> None:
    plans = _plans(2)
    handing = HandingOut(iter(plans))
    handing.join(0)
    handing.join(1)
    assert _all(handing) == [(0, 0), (1, 1)]
    handing.made(0, plans[0])

    assert handing.failed(1, plans[1], spooled=True) == 1

    assert _all(handing) == [(1, 1)]


def test_a_shard_in_the_spool_of_a_dead_engine_goes_to_anybody() -> None:
    plans = _plans(2)
    handing = HandingOut(iter(plans))
    handing.join(0)
    handing.join(1)
    _all(handing)
    handing.failed(1, plans[1], spooled=True)

    handing.leave(1)

    assert _all(handing) == [(0, 1)]


def test_a_shard_that_failed_otherwise_may_go_anywhere() -> None:
    plans = _plans(3)
    handing = HandingOut(iter(plans))
    handing.join(0)
    assert _all(handing) == [(0, 0), (0, 1)]
    handing.join(1)

    handing.failed(0, plans[0], spooled=False)

    assert _all(handing) == [(1, 0), (0, 2)]


def test_as_many_engines_are_wanted_as_have_something_to_do() -> None:
    plans = _plans(5)
    handing = HandingOut(iter(plans))

    assert handing.wanted(3) == 3
    assert handing.wanted(9) == 5
    handing.join(0)
    _all(handing)
    assert handing.wanted(9) == 5
    for plan in plans[:AT_ONCE]:
        handing.made(0, plan)
    assert handing.wanted(9) == 3


def test_it_is_over_when_nothing_waits_and_nobody_works() -> None:
    plans = _plans(1)
    handing = HandingOut(iter(plans))
    handing.join(0)
    _all(handing)
    assert handing.wanted(1) == 1

    handing.made(0, plans[0])

    assert handing.wanted(1) == 0
    assert handing.next() is None


def test_plans_are_taken_as_they_are_needed() -> None:
    taken = []

    def stream() -> object:
        for plan in _plans(1000):
            taken.append(plan.number)
            yield plan

    handing = HandingOut(stream())  # type: ignore[arg-type]
    handing.join(0)
    _all(handing)
    handing.wanted(4)

    assert len(taken) < 10
