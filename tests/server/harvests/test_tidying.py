"""What bulk jobs leave behind is removed, and nothing else."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from streamtap.errors import AccessDenied, TransferFailed
from streamtap.server.db import job_rows
from streamtap.server.harvests.jobs import Job
from streamtap.server.harvests.tidying import Tidying


def _tidying(shop: Any) -> Tidying:
    return Tidying(shop.harvests, shop.store, Path(shop.orders.spools), keep_days=30)


def _age(shop: Any, job: Job, by: timedelta) -> None:
    with shop.database.writing() as connection:
        job_rows.change(connection, job.id, {"completed_at": job.created_at - by})


def _runs(shop: Any) -> set[str]:
    return {path.name for path in (shop.folder / "harvest").iterdir()}


def test_files_go_after_their_time(shop: Any) -> None:
    old, new = shop.submit(), shop.submit()
    shop.working().run()
    _age(shop, old, timedelta(days=31))
    _age(shop, new, timedelta(days=29))

    _tidying(shop).once()

    assert _runs(shop) == {new.run_id}
    assert (shop.now(old).state, shop.now(old).files_kept, shop.now(new).files_kept) == ("done", False, True)


def test_what_came_to_nothing_goes_once_its_worker_must_have_stopped(shop: Any) -> None:
    jobs = [shop.submit() for _ in range(2)]
    for job in jobs:
        shop.store.run(job.run_id).put("shard_00000.safetensors", b"x")
        shop.harvests.cancel(shop.key, job.id)
    _age(shop, jobs[0], timedelta(minutes=5))

    _tidying(shop).once()

    assert _runs(shop) == {jobs[1].run_id}


def test_a_run_that_the_store_does_not_let_go_of_keeps_no_other(shop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    locked, other = shop.submit(), shop.submit()
    shop.working().run()
    _age(shop, locked, timedelta(days=40))
    _age(shop, other, timedelta(days=31))
    remove = shop.store.remove_run

    def removed(run_id: str) -> None:
        if run_id == locked.run_id:
            raise AccessDenied("the store refuses it (403).")
        remove(run_id)

    monkeypatch.setattr(shop.store, "remove_run", removed)
    _tidying(shop).once()

    assert _runs(shop) == {locked.run_id}
    assert (shop.now(locked).files_kept, shop.now(other).files_kept) == (True, False)


def test_the_end_of_the_gateway_waits_for_one_run_at_most(shop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [shop.submit() for _ in range(3)]
    shop.working().run()
    for job in jobs:
        _age(shop, job, timedelta(days=31))
    tidying, remove = _tidying(shop), shop.store.remove_run

    def removed(run_id: str) -> None:
        remove(run_id)
        tidying.stop()

    monkeypatch.setattr(shop.store, "remove_run", removed)
    tidying.once()

    assert len(_runs(shop)) == 2
    assert sorted(shop.now(job).files_kept for job in jobs) == [False, True, True]


def test_a_store_that_fails_is_asked_again(shop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    job = shop.submit()
    shop.working().run()
    _age(shop, job, timedelta(days=31))
    tidying = _tidying(shop)

    def failing(_run_id: str) -> None:
        raise TransferFailed("the store answered 500.")

    with monkeypatch.context() as patch:
        patch.setattr(shop.store, "remove_run", failing)
        with pytest.raises(TransferFailed):
            tidying.once()
    assert shop.now(job).files_kept
    tidying.once()
    assert _runs(shop) == set()


def test_spools_and_requests_without_a_job_go_and_others_stay(shop: Any) -> None:
    job = shop.submit()
    shop.harvests.claim("w1", ["tiny"], store=shop.store.identity)
    spools = Path(shop.orders.spools)
    for name in (job.run_id, "left-over"):
        (spools / name).mkdir(parents=True)
    shop.store.put_input("left-over", b"{}")
    tidying = _tidying(shop)

    tidying.once()
    assert shop.store.input_ids() == {job.id, "left-over"}, "its job may be on the way"
    shop.store.put_input("just-now", b"{}")
    tidying.once()

    assert {path.name for path in spools.iterdir()} == {job.run_id}
    assert shop.store.input_ids() == {job.id, "just-now"}
