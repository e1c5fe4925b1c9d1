"""One worker over a fake model: what becomes of a job, whatever happens on the way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamtap.errors import EngineOutOfMemory, InvalidInput, NotEnoughSpace, TransferFailed
from streamtap.server.db import job_rows
from streamtap.server.harvests.heart import Heart
from streamtap.server.harvests.jobs import Job
from streamtap.server.harvests.storage import HarvestStore
from streamtap.server.ledger.harvests import MOST_ATTEMPTS
from streamtap.server.ledger.usage import usage_of
from streamtap.testing.fake_engine import FakeEngine

SECRET = "what nobody may read"


def _until(condition: Callable[[], bool], seconds: float = 15) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def _in_thread(working: Any) -> threading.Thread:
    thread = threading.Thread(target=working.run)
    thread.start()
    return thread


def _left(shop: Any) -> list[str]:
    """What is there beside the runs, the database and the store's name."""
    inputs = [path.name for path in (shop.folder / "harvest-inputs").iterdir() if path.name != "store-id"]
    spools = [path.name for path in shop.folder.glob("harvest-spool/*")]
    return inputs + spools


def test_a_job_becomes_a_run_and_leaves_nothing_else(any_shop: Any, caplog: pytest.LogCaptureFixture) -> None:
    shop = any_shop
    job = shop.submit([SECRET, "two", "three"])
    with caplog.at_level("INFO"):
        assert shop.working().run() == 0

    over = shop.now(job)
    assert (over.state, over.prompts_done, over.shards_done, over.error) == ("done", 3, 2, None)
    assert set(over.timings) == {"waiting_s", "loading_s", "harvest_s"}
    assert over.worked_seconds > 0
    run, engine = shop.run_of(job), FakeEngine()
    run.verify()
    assert (run.manifest.run_id, run.manifest.n_prompts) == (job.run_id, 3)
    assert (run.manifest.model_id, run.manifest.hf_repo) == ("tiny", "org/tiny")
    for index, prompt in enumerate([SECRET, "two", "three"]):
        ids = engine.tokenizer.tokenizer(prompt)["input_ids"]
        np.testing.assert_array_equal(run.token_ids(index), ids)
        for layer, rows in run.prompt(index).items():
            np.testing.assert_array_equal(rows, engine.rows(ids, layer).astype(rows.dtype))
    assert _left(shop) == []
    events = [record.message for record in caplog.records]
    assert events == ["harvest_taken", "harvest_over"]
    fields = str([record.__dict__ for record in caplog.records])
    assert SECRET not in fields


def test_a_run_says_the_model_s_name_and_not_where_it_lies(shop: Any) -> None:
    job = shop.submit()
    shop.working(load=lambda model: FakeEngine(named={"model": model.checkpoint})).run()

    raw = (shop.folder / "harvest" / job.run_id / "manifest.json").read_text()
    assert "org/tiny" in raw
    assert "/secret/" not in raw


def test_prompts_are_cut_to_the_context_that_was_counted(shop: Any) -> None:
    job = shop.submit(["x" * 200, "short"])
    shop.working(context_tokens=150).run()

    manifest = shop.run_of(job).manifest
    assert [dict(each) for each in manifest.truncated_prompts] == [{"index": 0, "tokens": 201, "kept": 64}]


def test_one_engine_is_kept_from_job_to_job(shop: Any) -> None:
    made: list[str] = []

    def load(model: Any) -> FakeEngine:
        made.append(model.id)
        return FakeEngine()

    jobs = [shop.submit() for _ in range(3)]
    shop.working(load=load).run()

    assert [shop.now(job).state for job in jobs] == ["done"] * 3
    assert made == ["tiny"]


def test_a_lane_does_its_own_jobs(shop: Any) -> None:
    small, large = shop.submit(), shop.submit(model="huge")
    shop.working(lane="large").run()

    assert (shop.now(small).state, shop.now(large).state) == ("pending", "done")


def test_it_ends_when_idle_for_long_enough(shop: Any) -> None:
    began = time.monotonic()

    assert shop.working().run() == 0
    assert time.monotonic() - began < 10


def test_a_job_that_is_cancelled_stops_within_seconds(shop: Any) -> None:
    job = shop.submit(["one"] * 200, shard_size=4)
    thread = _in_thread(shop.working(before_batch=lambda _: time.sleep(0.05)))
    _until(lambda: shop.now(job).shards_done >= 2)

    began = time.monotonic()
    shop.harvests.cancel(shop.key, job.id)
    thread.join(10)
    assert not thread.is_alive()
    assert time.monotonic() - began < 6, "all of it would take ten"
    over = shop.now(job)
    assert over.state == "cancelled"
    assert 2 <= over.shards_done < 50
    assert _left(shop) == []
    assert not (shop.folder / "harvest" / job.run_id / "manifest.json").exists()


def test_a_job_cancelled_while_its_model_loads_is_not_begun(shop: Any) -> None:
    loading, go = threading.Event(), threading.Event()
    engine = FakeEngine()

    def load(_model: Any) -> FakeEngine:
        loading.set()
        assert go.wait(10)
        return engine

    job = shop.submit()
    thread = _in_thread(shop.working(load=load))
    assert loading.wait(10)
    shop.harvests.cancel(shop.key, job.id)
    time.sleep(1.2)  # one beat
    go.set()
    thread.join(10)

    assert shop.now(job).state == "cancelled"
    assert engine.batches <= 1
    assert _left(shop) == []


def test_a_worker_that_is_told_to_stop_lets_go_and_another_goes_on(shop: Any) -> None:
    told = threading.Event()
    first, second = FakeEngine(), FakeEngine()
    first.before_batch = lambda number: told.set() if number == 6 else None
    job = shop.submit(["one"] * 40, shard_size=4)

    assert shop.working(load=lambda _: first, told=told).run() == 0
    waiting = shop.now(job)
    assert (waiting.state, waiting.worker, waiting.attempts) == ("pending", None, 0)
    shop.working("w2", load=lambda _: second).run()

    over = shop.now(job)
    assert (over.state, over.shards_done) == ("done", 10)
    assert first.batches + second.batches <= 11, "at most one shard is run again"
    shop.run_of(job).verify()
    assert _left(shop) == []


def test_a_failure_that_may_pass_makes_the_job_wait(shop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(_number: int) -> None:
        raise EngineOutOfMemory("prompt 0 does not fit.")

    job = shop.submit()
    assert shop.working(before_batch=no_memory).run() == 0

    waiting = shop.now(job)
    assert (waiting.state, waiting.error, waiting.attempts) == ("pending", None, 1)
    assert shop.harvests.claim("w2", ["tiny"], store=shop.store.identity) is None, "not at once"


@pytest.mark.parametrize("error", [TransferFailed("the store answered 500."), NotEnoughSpace("the disk is full.")])
def test_a_store_that_fails_keeps_what_was_made(shop: Any, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = FakeEngine(), FakeEngine()
    whole = HarvestStore.run

    def broken(store: HarvestStore, run_id: str) -> Any:
        place = whole(store, run_id)
        put_file, count = place.put_file, iter(range(100))

        def failing(name: str, file: Path, *, sha256: str) -> None:
            if next(count) >= 2:
                raise error
            put_file(name, file, sha256=sha256)

        monkeypatch.setattr(place, "put_file", failing)
        return place

    job = shop.submit(["one"] * 20, shard_size=4)
    with monkeypatch.context() as patch:
        patch.setattr(HarvestStore, "run", broken)
        assert shop.working(load=lambda _: first).run() == 0
    assert shop.now(job).state == "pending"
    _ready_now(shop, job)
    shop.working("w2", load=lambda _: second).run()

    assert shop.now(job).state == "done"
    assert first.batches + second.batches == 5, "what lay in the spool was not run again"
    shop.run_of(job).verify()


def _ready_now(shop: Any, *jobs: Job) -> None:
    for job in jobs:
        with shop.database.writing() as connection:
            job_rows.change(connection, job.id, {"ready_at": job.created_at})


def test_a_failure_of_the_server_s_is_told_without_its_inside_and_given_back(
    shop: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def load(_model: Any) -> FakeEngine:
        raise InvalidInput("/secret/tiny could not be loaded: its weights are damaged.")

    job = shop.submit()
    with caplog.at_level("INFO"):
        assert shop.working(load=load).run() == 0

    failed = shop.now(job)
    assert failed.state == "failed"
    assert failed.error is not None
    assert failed.error.code == "upstream_server_error"
    assert "its engine could not be loaded" in failed.error.message
    assert "/secret/" not in failed.error.message
    assert "/secret/tiny could not be loaded" in str([record.__dict__ for record in caplog.records])
    assert _used(shop) == 0
    assert _left(shop) == []


def test_a_mistake_of_the_caller_s_is_told_in_full_and_charged(shop: Any) -> None:
    job = shop.submit(["one", "two"], positions=[2, 40])
    shop.working().run()

    failed = shop.now(job)
    assert failed.state == "failed"
    assert failed.error is not None
    assert failed.error.code == "invalid_request"
    assert "prompt 0" in failed.error.message
    assert _used(shop) == 6


def test_what_nobody_foresaw_is_tried_in_other_processes_and_then_fails(
    shop: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_number: int) -> None:
        raise RuntimeError(f"a text that may hold {SECRET}")

    job, other = shop.submit(), shop.submit()
    with caplog.at_level("INFO"):
        for attempt in range(1, MOST_ATTEMPTS + 1):
            _ready_now(shop, job, other)
            before = shop.now(job).attempts
            # Whichever comes first: this process is of no use to the next.
            while shop.now(job).attempts == before and not shop.now(job).is_over:
                assert shop.working(before_batch=broken).run() == 1
            assert attempt == MOST_ATTEMPTS or shop.now(job).state == "pending"

    failed = shop.now(job)
    assert failed.state == "failed"
    assert failed.error is not None
    assert failed.error.code == "internal_error"
    assert "RuntimeError" in failed.error.message
    assert SECRET not in failed.error.message + str([record.__dict__ for record in caplog.records])


def test_a_job_whose_request_is_gone_fails(shop: Any) -> None:
    job = shop.submit()
    shop.store.remove_input(job.id)
    assert shop.working().run() == 0

    assert shop.now(job).state == "failed"
    assert _used(shop) == 0


def _used(shop: Any) -> int:
    told = usage_of(shop.database, shop.config.limits, shop.key, datetime.now(UTC))
    return int(told["usage"]["monthly_input_tokens"]["used"])


def test_two_workers_race_for_one_job(any_shop: Any) -> None:
    shop = any_shop
    engines = [FakeEngine() for _ in range(2)]
    job = shop.submit(["one"] * 40, shard_size=4)
    threads = [_in_thread(shop.working(f"w{i}", load=lambda _, i=i: engines[i])) for i in range(2)]
    for thread in threads:
        thread.join(20)

    assert shop.now(job).state == "done"
    assert sorted(engine.batches for engine in engines) == [0, 10]


def test_a_worker_whose_job_another_took_stops_and_touches_nothing(shop: Any) -> None:
    job = shop.submit(["one"] * 200, shard_size=4)
    thread = _in_thread(shop.working(before_batch=lambda _: time.sleep(0.05)))
    _until(lambda: shop.now(job).shards_done >= 1)
    with shop.database.writing() as connection:
        job_rows.change(connection, job.id, {"worker": "w2"})
    thread.join(10)

    assert not thread.is_alive()
    assert (shop.now(job).state, shop.now(job).worker) == ("running", "w2")
    assert job.id + ".json" in _left(shop), "the other one needs its prompts"
    assert job.run_id in _left(shop)


def test_a_database_that_is_gone_for_a_while_does_not_end_a_job(shop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    beat, count = shop.harvests.beat, iter(range(100))

    def failing(*args: Any, **named: Any) -> Any:
        if next(count) < 2:
            raise OSError("the database is gone")
        return beat(*args, **named)

    monkeypatch.setattr(shop.harvests, "beat", failing)
    job = shop.submit(["one"] * 40, shard_size=4)
    shop.working(before_batch=lambda _: time.sleep(0.3)).run()

    assert shop.now(job).state == "done"


def test_a_worker_that_cannot_be_heard_stops_by_itself(shop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_args: Any, **_named: Any) -> Any:
        raise OSError("the database is gone")

    monkeypatch.setattr(shop.harvests, "beat", gone)
    job = shop.submit()
    told = threading.Event()
    with Heart(shop.harvests, job, "w1", lease_seconds=0.3, told_to_stop=told, beat_seconds=0.05) as heart:
        assert not heart.should_stop()
        _until(heart.should_stop, 5)
        assert not heart.is_held
