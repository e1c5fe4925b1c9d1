"""Prompts of a harvest that have no slot yet: both clients wait for one, and send them no more often than is of use."""

from __future__ import annotations

from typing import Any

import pytest

from streamtap.errors import HarvestConcurrencyExceeded
from streamtap.testing.stub_harvests import Asked

PROMPTS = [f"prompt {i}" + " and more" * (i % 3) for i in range(10)]


def test_what_has_no_slot_waits_for_one(user: Any) -> None:
    user.stub.slots, user.stub.most_prompts, user.stub.looks = 1, 4, 3

    job = user.harvest()
    before = job.known
    user(job.wait())

    assert (before.state, before.unsent_prompts, len(before.jobs)) == ("pending", 8, 1)
    assert (job.known.state, job.known.unsent_prompts, job.known.prompts_done) == ("done", 0, 10)
    assert [text for request in user.stub.requests.values() for text in request.prompts] == PROMPTS


def test_prompts_are_not_sent_again_and_again_while_no_job_ends(user: Any) -> None:
    user.stub.slots, user.stub.most_prompts, user.stub.looks = 1, 5, 12

    job = user.harvest()
    at_first = user.posts()
    user(job.wait())

    assert (len(job.ids), sum(user.clock.slept)) == (2, 44)
    assert user.posts() == at_first + 2, "one try as the wait begins, which may find a slot, and one when a job ends"


def test_a_slot_that_another_harvest_frees_is_found_as_soon_as_the_server_said(user: Any) -> None:
    user.stub.slots, user.stub.most_prompts, user.stub.looks = 1, 5, 1000

    job = user.harvest()
    user.stub.before = lambda _asked: setattr(user.stub, "slots", 2 if sum(user.clock.slept) > 20 else 1)
    user(job.submit_rest())

    assert sum(user.clock.slept) == 30


def test_the_rest_may_be_submitted_without_waiting_for_the_end(user: Any) -> None:
    user.stub.slots, user.stub.most_prompts = 1, 4

    job = user(user.harvest().submit_rest())

    assert (job.known.unsent_prompts, job.known.is_over) == (0, False)
    assert len(user.stub.jobs) == len(job.ids) == 4


def test_the_first_job_waits_for_a_slot_as_long_as_the_client_is_patient(user: Any) -> None:
    user.stub.slots = 0
    with pytest.raises(HarvestConcurrencyExceeded):
        user.harvest()
    assert user.clock.slept == [30.0] * 40

    def free(_asked: Asked) -> None:
        user.stub.slots = len(user.clock.slept) - 42

    user.stub.before = free
    assert user.harvest().known.state == "pending"
    assert user.clock.slept == [30.0] * 43


def test_slots_that_others_hold_are_waited_for(user: Any) -> None:
    user.stub.slots, user.stub.most_prompts = 1, 5
    job = user.harvest()
    user.stub.slots = 0

    with pytest.raises(TimeoutError, match="job-0 is running after 95 s"):
        user(job.wait(95))

    assert (job.known.unsent_prompts, [each.status for each in job.known.jobs]) == (5, ["done"])
    assert user.clock.slept == [30, 30, 30, 5]
    user.stub.slots = 1
    assert user(job.wait(1)).known.state == "done"
