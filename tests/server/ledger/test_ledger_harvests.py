"""Bulk jobs in the ledger: who may take them, and that what is over stays over."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from streamtap.errors import HarvestNotCancellable, HarvestNotFound
from streamtap.server.db import Database
from streamtap.server.harvests.jobs import JobError
from streamtap.server.ledger.harvests import MOST_ATTEMPTS

BROKEN = JobError("internal_error", "it broke.")
MODELS = ["tiny", "huge"]


def test_a_job_waits_runs_and_is_done(desk: Any) -> None:
    job = desk.submit()
    assert (job.state, job.n_prompts, job.n_tokens, job.n_shards, job.layer_indices) == ("pending", 10, 100, 3, (1, 2))
    assert (job.created_at, job.started_at, job.worker, job.is_over) == (desk.moment(), None, None, False)
    assert desk.harvests.waiting(MODELS) == 1
    desk.moment.forward(2)

    taken = desk.claim()
    assert taken is not None
    assert (taken.id, taken.state, taken.worker, taken.started_at) == (job.id, "running", "w1", desk.moment())
    assert desk.claim("w2") is None
    assert desk.harvests.waiting(MODELS) == 0
    desk.moment.forward(3)
    assert desk.harvests.beat(job.id, "w1", 4, 1, seconds=3.0) == "go"
    assert (desk.now(job).prompts_done, desk.now(job).shards_done) == (4, 1)
    assert desk.harvests.done(job.id, "w1", {"harvest_s": 3.5})

    over = desk.harvests.job(desk.ada, job.id)
    assert (over.state, over.completed_at, over.prompts_done, over.shards_done) == ("done", desk.moment(), 10, 3)
    assert (over.timings, over.worked_seconds, over.worker, over.error) == ({"harvest_s": 3.5}, 3.0, None, None)
    assert over.is_over
    assert over.files_kept
    assert desk.slots() == {}
    assert desk.used() == {"monthly_harvests": 1, "monthly_input_tokens": 100, "daily_input_tokens": 100}


def test_the_oldest_comes_first_but_a_loaded_model_goes_on_for_a_while(desk: Any) -> None:
    desk.submit(lane="large")
    desk.moment.forward(1)
    small = desk.submit()

    first = desk.claim(loaded="tiny")
    assert first is not None
    assert first.id == small.id
    desk.harvests.done(small.id, "w1")
    desk.moment.forward(70)
    desk.submit()

    second = desk.claim(loaded="tiny")
    assert second is not None
    assert second.model == "huge", "it has waited long enough"


def test_a_worker_takes_only_what_it_can_do(desk: Any) -> None:
    desk.submit(store="here")

    assert desk.harvests.claim("w1", ["huge"], store="here") is None
    assert desk.harvests.claim("w1", MODELS, store="elsewhere") is None
    assert desk.harvests.claim("w1", MODELS, store="here", lane="large") is None
    assert desk.harvests.waiting(MODELS, store="here", lane="large") == 0
    assert desk.harvests.claim("w1", MODELS, store="here", lane="small") is not None


@pytest.mark.parametrize("end", ["done", "failed", "cancelled"])
def test_what_is_over_never_changes(desk: Any, end: str) -> None:
    job = desk.submit()
    desk.claim()
    if end == "done":
        desk.harvests.done(job.id, "w1")
    elif end == "failed":
        desk.harvests.failed(job.id, "w1", BROKEN, refund=False)
    else:
        desk.harvests.cancel(desk.ada, job.id)
    before, slots = desk.now(job), desk.slots()
    assert before.state == end

    desk.moment.forward(1000)
    assert not desk.harvests.done(job.id, "w1")
    assert not desk.harvests.failed(job.id, "w1", BROKEN, refund=True)
    assert not desk.harvests.let_go(job.id, "w1")
    assert not desk.harvests.put_off(job.id, "w1", BROKEN)
    assert desk.harvests.beat(job.id, "w1", 9, 9) == ("cancel" if end == "cancelled" else "lost")
    with pytest.raises(HarvestNotCancellable, match=f"this job is {end} already"):
        desk.harvests.cancel(desk.ada, job.id)
    assert desk.claim("w2") is None
    assert desk.now(job) == before
    assert desk.slots() == slots == {}


def test_a_job_is_its_key_s_alone(desk: Any) -> None:
    job = desk.submit()

    for ask in (desk.harvests.job, desk.harvests.cancel):
        with pytest.raises(HarvestNotFound, match="no harvest job of that id for this key"):
            ask(desk.bo, job.id)
        with pytest.raises(HarvestNotFound):
            ask(desk.ada, "nothing")
    assert desk.harvests.jobs(desk.bo) == []
    assert desk.harvests.jobs(desk.ada) == [job]


def test_jobs_are_listed_newest_first(desk: Any) -> None:
    ids = []
    for _ in range(3):
        ids.append(desk.submit().id)
        desk.moment.forward(1)

    assert [job.id for job in desk.harvests.jobs(desk.ada)] == ids[::-1]


def test_a_pending_job_that_is_cancelled_is_never_taken(desk: Any) -> None:
    job = desk.submit()
    cancelled = desk.harvests.cancel(desk.ada, job.id)

    assert (cancelled.state, cancelled.completed_at) == ("cancelled", desk.moment())
    assert desk.claim() is None
    assert desk.slots() == {}
    assert desk.used()["monthly_input_tokens"] == 100, "only what fails on the server's side is given back"


def test_an_expired_lease_gives_the_job_to_another(desk: Any) -> None:
    job = desk.submit()
    desk.claim("w1")
    started = desk.moment()
    desk.moment.forward(20)
    assert desk.harvests.beat(job.id, "w1", 3, 1) == "go"
    desk.moment.forward(29)
    assert desk.claim("w2") is None, "it was heard of 29 seconds ago"
    desk.moment.forward(2)
    assert desk.harvests.waiting(MODELS) == 1

    taken = desk.claim("w2")
    assert taken is not None
    assert (taken.id, taken.worker, taken.started_at, taken.prompts_done) == (job.id, "w2", started, 3)
    assert desk.harvests.beat(job.id, "w1", 5, 2) == "lost"
    assert not desk.harvests.done(job.id, "w1")
    assert not desk.harvests.failed(job.id, "w1", BROKEN, refund=True)
    assert not desk.harvests.let_go(job.id, "w1")
    assert desk.harvests.beat(job.id, "w2", 4, 1) == "go"
    assert desk.slots() == {("ada", "harvest_small"): 1, ("all", "harvest_small"): 1}


def test_a_late_beat_keeps_a_job_that_nobody_took(desk: Any) -> None:
    job = desk.submit()
    desk.claim("w1")
    desk.moment.forward(100)

    assert desk.harvests.beat(job.id, "w1") == "go"
    assert desk.claim("w2") is None


def test_the_end_of_a_worker_frees_its_job_at_once(desk: Any) -> None:
    job = desk.submit()
    desk.claim("w1")

    assert desk.harvests.worker_ended("another") == 0
    assert desk.harvests.worker_ended("w1") == 1
    taken = desk.claim("w2")
    assert taken is not None
    assert (taken.id, taken.attempts) == (job.id, 2)


def test_progress_never_goes_back_and_a_new_shard_clears_the_attempts(desk: Any) -> None:
    job = desk.submit()
    for number in range(20):
        taken = desk.claim(f"w{number}")
        assert taken is not None
        assert taken.attempts == 1
        # A worker that goes on counts again from the first shard.
        desk.harvests.beat(job.id, f"w{number}", 1, 1)
        desk.harvests.beat(job.id, f"w{number}", number + 1, number + 1)
        assert desk.now(job).shards_done == number + 1
        desk.harvests.worker_ended(f"w{number}")


def test_a_job_that_ends_its_workers_fails_and_is_given_back(desk: Any) -> None:
    job = desk.submit()
    for number in range(MOST_ATTEMPTS):
        assert desk.claim(f"w{number}") is not None
        desk.harvests.beat(job.id, f"w{number}", 0, 0)
        desk.harvests.worker_ended(f"w{number}")
    desk.moment.forward(1)
    other = desk.submit()

    taken = desk.claim("last")
    assert taken is not None
    assert taken.id == other.id, "it goes on with the next"
    failed = desk.now(job)
    assert failed.state == "failed"
    assert failed.error is not None
    assert failed.error.code == "engine_dead"
    assert f"{MOST_ATTEMPTS} workers took this job" in failed.error.message
    assert desk.used() == {"monthly_harvests": 1, "monthly_input_tokens": 100, "daily_input_tokens": 100}


def test_a_worker_that_is_told_to_stop_lets_go_without_counting(desk: Any) -> None:
    job = desk.submit()
    for number in range(3 * MOST_ATTEMPTS):
        assert desk.claim(f"w{number}") is not None
        assert desk.harvests.let_go(job.id, f"w{number}")
        waiting = desk.now(job)
        assert (waiting.state, waiting.worker, waiting.attempts) == ("pending", None, 0)


def test_what_may_pass_is_tried_again_later_and_then_fails(desk: Any) -> None:
    job = desk.submit()
    waits = []
    for _ in range(MOST_ATTEMPTS - 1):
        assert desk.claim() is not None
        assert desk.harvests.put_off(job.id, "w1", BROKEN)
        began = desk.moment()
        assert desk.now(job).state == "pending"
        while desk.claim("probe") is None:
            desk.moment.forward(1)
        desk.harvests.let_go(job.id, "probe")
        waits.append((desk.moment() - began) // timedelta(seconds=1))
    assert waits == [15, 30, 60, 120]

    assert desk.claim() is not None
    assert desk.harvests.put_off(job.id, "w1", BROKEN)
    assert (desk.now(job).state, desk.now(job).error) == ("failed", BROKEN)
    assert desk.used()["monthly_harvests"] == 0
    assert desk.slots() == {}


@pytest.mark.parametrize(("refund", "left"), [(True, 0), (False, 100)])
def test_a_failure_of_the_server_s_is_given_back_where_it_was_charged(desk: Any, refund: bool, left: int) -> None:
    job = desk.submit()
    at = desk.moment.at
    desk.claim()
    desk.moment.forward(40 * 86400)
    desk.harvests.failed(job.id, "w1", BROKEN, refund=refund)
    assert desk.used()["monthly_input_tokens"] == 0, "another month"

    desk.moment.at = at
    assert desk.used() == {
        "monthly_harvests": left // 100,
        "monthly_input_tokens": left,
        "daily_input_tokens": left,
    }


def test_each_job_goes_to_one_of_many_workers(database: Database, desk_of: Any) -> None:
    desk = desk_of(database, small_harvests_per_key=100)
    jobs = {desk.submit().id for _ in range(24)}

    def take(number: int) -> list[str]:
        mine = []
        while job := desk.claim(f"w{number}"):
            mine.append(job.id)
        return mine

    with ThreadPoolExecutor(8) as pool:
        taken = [job_id for mine in pool.map(take, range(8)) for job_id in mine]

    # With SKIP LOCKED a worker may find nothing while others still hold rows: what is left goes to whoever asks again.
    taken += take(99)
    assert sorted(taken) == sorted(jobs)


def test_many_ends_of_one_job_free_one_slot(desk: Any) -> None:
    job = desk.submit()
    desk.claim()
    desk.submit()

    def end(number: int) -> bool:
        if number % 2:
            return bool(desk.harvests.failed(job.id, "w1", BROKEN, refund=True))
        try:
            return bool(desk.harvests.cancel(desk.ada, job.id))
        except HarvestNotCancellable:
            return False

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(end, range(16))) == 1

    assert desk.slots() == {("ada", "harvest_small"): 1, ("all", "harvest_small"): 1}


def test_a_job_that_nobody_takes_fails_in_the_end_and_frees_its_slot(desk: Any) -> None:
    job, taken = desk.submit(), desk.submit()
    desk.claim("w1")
    desk.claim("w2")
    desk.harvests.let_go(job.id, desk.now(job).worker)
    desk.moment.forward(6 * 86400)
    assert desk.harvests.beat(taken.id, desk.now(taken).worker) == "go"
    assert desk.harvests.fail_forgotten(days=7) == 0
    desk.moment.forward(1.5 * 86400)

    assert desk.harvests.fail_forgotten(days=7) == 1
    failed = desk.now(job)
    assert (failed.state, desk.now(taken).state) == ("failed", "running")
    assert failed.error is not None
    assert failed.error.code == "harvest_unavailable"
    assert desk.slots() == {("ada", "harvest_small"): 1, ("all", "harvest_small"): 1}


def test_a_job_whose_worker_died_with_its_model_or_store_holds_no_slot_for_ever(desk: Any) -> None:
    taken, elsewhere = desk.submit(), desk.submit(store="a folder that no gateway names any more")
    desk.claim("w1")
    desk.moment.forward(7.5 * 86400)

    assert desk.harvests.fail_forgotten(days=7) == 2
    assert [desk.now(job).state for job in (taken, elsewhere)] == ["failed", "failed"]
    assert desk.slots() == {}


def test_files_are_to_be_cleared_once_their_time_is_over(desk: Any) -> None:
    done = desk.submit()
    desk.claim()
    cancelled, running = desk.submit(), desk.submit()
    desk.harvests.done(done.id, "w1")
    desk.harvests.cancel(desk.ada, cancelled.id)

    def ids() -> list[str]:
        return [job.id for job in desk.harvests.to_clear(store="", keep_days=30, grace_seconds=120)]

    assert ids() == []
    desk.moment.forward(121)
    assert ids() == [cancelled.id]
    desk.harvests.cleared(cancelled.id)
    desk.moment.forward(30 * 86400)
    assert ids() == [done.id]
    assert desk.harvests.to_clear(store="elsewhere", keep_days=30, grace_seconds=120) == []
    desk.harvests.cleared(done.id)
    assert ids() == []
    assert not desk.harvests.job(desk.ada, done.id).files_kept
    assert [job.id for job in desk.harvests.under_way(store="")] == [running.id]
