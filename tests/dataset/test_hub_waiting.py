from __future__ import annotations

import pytest

from streamtap.dataset.hub_waiting import FIRST_CONTACT_SECONDS, Failure, Patience, asked_seconds
from streamtap.errors import TransferFailed

DATE = "Wed, 21 Oct 2015 07:28:00 GMT"


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry-after": "120"}, 120.0),
        ({"retry-after": "Wed, 21 Oct 2015 07:28:30 GMT", "date": DATE}, 30.0),
        ({"retry-after": DATE}, 0.0),
        ({"retry-after": "soon"}, None),
        ({"ratelimit": '"api";r=0;t=55'}, 55.0),
        ({"ratelimit": '"api"; r = 0 ; t = 5'}, 5.0),
        ({"ratelimit": '"api";r=12;t=55'}, None),
        ({"retry-after": "3", "ratelimit": '"api";r=0;t=55'}, 3.0),
    ],
)
def test_what_a_server_asks_for(headers: dict[str, str], seconds: float | None) -> None:
    assert asked_seconds(headers) == seconds


def waits(
    failure: Failure, *, patience_seconds: float = 600, took_seconds: float = 0, first_contact: bool = False
) -> list[float]:
    waited: list[float] = []
    patience = Patience(patience_seconds, waited.append)
    while patience.wait_after(failure, took_seconds, first_contact=first_contact) is not None:
        assert len(waited) < 1000
    return waited


ERROR = TransferFailed("it failed.")


def test_waits_double_up_to_a_minute_and_end() -> None:
    waited = waits(Failure(ERROR, again=True))

    assert [round(wait / 1.125 / 2**n) for n, wait in enumerate(waited[:6])] == [1] * 6
    assert max(waited) <= 75
    assert 500 < sum(waited) <= 600


def test_a_wish_is_granted_and_never_undercut() -> None:
    waited = waits(Failure(ERROR, again=True, asked_seconds=100))

    assert len(waited) == 5
    assert all(100 <= wait < 101 for wait in waited)


def test_a_wish_beyond_all_patience_ends_it_at_once() -> None:
    assert waits(Failure(ERROR, again=True, asked_seconds=601)) == []


def test_what_will_not_pass_is_not_tried_again() -> None:
    assert waits(Failure(ERROR)) == []


def test_what_may_not_pass_is_tried_a_few_times() -> None:
    assert len(waits(Failure(ERROR, again=True, most_tries=3))) == 2


def test_a_client_that_waits_by_itself_uses_up_the_patience() -> None:
    failure = Failure(ERROR, again=True, counts=True)

    assert len(waits(failure, took_seconds=500)) == 1
    assert len(waits(failure, took_seconds=100)) in (4, 5)


def test_a_transfer_that_took_long_does_not() -> None:
    assert len(waits(Failure(ERROR, again=True), took_seconds=5000)) > 10


def test_the_first_contact_is_short() -> None:
    assert 7 < sum(waits(Failure(ERROR, again=True), first_contact=True)) <= FIRST_CONTACT_SECONDS
