"""Whatever many keys, workers and deaths do to bulk jobs at once, the books are right afterwards."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from streamtap.errors import HarvestNotCancellable, LimitReached
from streamtap.server.db import Database, counters
from streamtap.server.harvests.jobs import Job, JobError
from streamtap.server.ledger.periods import period

FAULT = JobError("internal_error", "it broke.")


def _one_actor(desk: Any, seed: int) -> set[str]:
    """Random deeds of a key and a worker; the ids of the jobs that it was told are its to give back."""
    dice, name, given_back = random.Random(seed), f"w{seed}", set()
    key = (desk.ada, desk.bo)[seed % 2]
    for _ in range(25):
        deed = dice.randrange(4)
        if deed == 0:
            try:
                desk.submit(key, lane=dice.choice(["small", "large"]), tokens=dice.randint(1, 50))
            except LimitReached:
                continue
        elif deed == 1 and (mine := desk.harvests.jobs(key)):
            try:
                desk.harvests.cancel(key, dice.choice(mine).id)
            except HarvestNotCancellable:
                continue
        elif (job := desk.claim(name)) is not None:
            given_back |= _work(desk, dice, job, name)
    return given_back


def _work(desk: Any, dice: random.Random, job: Job, name: str) -> set[str]:
    desk.harvests.beat(job.id, name, dice.randint(0, 9), dice.randint(0, 2), seconds=0.5)
    end = dice.randrange(6)
    if end == 0:
        desk.harvests.done(job.id, name)
    elif end == 1 and desk.harvests.failed(job.id, name, FAULT, refund=True):
        return {job.id}
    elif end == 2:
        desk.harvests.failed(job.id, name, FAULT, refund=False)
    elif end == 3:
        desk.harvests.let_go(job.id, name)
    elif end == 4:
        desk.harvests.worker_ended(name)
    return set()


def test_after_a_storm_slots_and_charges_are_those_of_the_jobs(database: Database, desk_of: Any) -> None:
    desk = desk_of(database, small_harvests_per_key=6, large_harvests_per_key=2, large_harvests=3)
    with ThreadPoolExecutor(8) as pool:
        given_back = set().union(*pool.map(lambda seed: _one_actor(desk, seed), range(8)))

    for key, name in ((desk.ada, "ada"), (desk.bo, "bo")):
        jobs = desk.harvests.jobs(key)
        assert jobs
        given_back |= {job.id for job in jobs if job.error is not None and job.error.code == "engine_dead"}
        for lane, most in (("small", 6), ("large", 2)):
            live = sum(job.lane == lane and not job.is_over for job in jobs)
            assert live <= most
            assert desk.slots().get((name, f"harvest_{lane}"), 0) == live
        charged = [job.n_tokens for job in jobs if job.id not in given_back]
        assert desk.used(key) == {
            "monthly_harvests": len(charged),
            "monthly_input_tokens": sum(charged),
            "daily_input_tokens": sum(charged),
        }
    _check_totals(desk)


def _check_totals(desk: Any) -> None:
    slots = desk.slots()
    for lane in ("small", "large"):
        of_keys = sum(slots.get((name, f"harvest_{lane}"), 0) for name in ("ada", "bo"))
        assert slots.get(("all", f"harvest_{lane}"), 0) == of_keys
    with desk.database.reading() as connection:
        found = counters.read(connection, ["user:ada", "user:bo"], [period("month", desk.moment())])
    assert {each.subject: used for each, used in found.items()} == {
        f"user:{name}": desk.used(key)["monthly_input_tokens"] for name, key in (("ada", desk.ada), ("bo", desk.bo))
    }
