"""From a request to a job, as the routes ask for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from streamtap.errors import (
    HarvestConcurrencyExceeded,
    HarvestNotCancellable,
    HarvestNotFound,
    HarvestUnavailable,
    InvalidInput,
    NotEnoughSpace,
    TransferFailed,
)
from streamtap.server.config import Limits
from streamtap.server.harvests.asking import Asking, NoWorkers, ask_of
from streamtap.server.harvests.jobs import JobAsked
from streamtap.server.ledger.harvests import Harvests
from streamtap.server.ledger.keys import Keys
from streamtap.spec import Projection
from streamtap.wire.harvest import HarvestRequest


class Woken:
    """Workers that only count how often they are told."""

    def __init__(self) -> None:
        self.times = 0

    def available(self, _lane: str) -> bool:
        return True

    def wake(self) -> None:
        self.times += 1


async def _call(function: Callable[..., Any], *args: Any, **named: Any) -> Any:
    return await asyncio.to_thread(function, *args, **named)


def _asked(**named: Any) -> JobAsked:
    return JobAsked("tiny", "small", n_prompts=1, n_tokens=3, n_shards=1, layer_indices=(0,), **named)


def test_a_job_that_is_taken_has_its_request_stored_and_wakes_the_workers(shop: Any) -> None:
    workers = Woken()
    asking = Asking(shop.harvests, _call, shop.store, workers)

    async def main() -> None:
        job = await asking.submit(shop.key, _asked(), b'{"prompts": ["x"]}')
        assert (job.state, workers.times) == ("pending", 1)
        assert shop.store.get_input(job.id) == b'{"prompts": ["x"]}'
        assert await asking.job(shop.key, job.id) == job
        assert await asking.jobs(shop.key) == [job]
        assert (await asking.cancel(shop.key, job.id)).state == "cancelled"
        assert shop.store.input_ids() == set()
        with pytest.raises(HarvestNotCancellable):
            await asking.cancel(shop.key, job.id)
        stranger = Keys(shop.database).create("bo").record
        with pytest.raises(HarvestNotFound):
            await asking.job(stranger, job.id)

    asyncio.run(main())


def test_nothing_is_kept_of_a_job_that_is_refused(shop: Any) -> None:
    workers = Woken()
    full = Harvests(shop.database, Limits(small_harvests_per_key=1))
    asking = Asking(full, _call, shop.store, workers)

    async def main() -> None:
        await asking.submit(shop.key, _asked(), b"{}")
        with pytest.raises(HarvestConcurrencyExceeded):
            await asking.submit(shop.key, _asked(id="refused"), b"{}")

    asyncio.run(main())
    assert "refused" not in shop.store.input_ids()
    assert workers.times == 1


def test_where_nothing_takes_jobs_none_is_stored(shop: Any) -> None:
    asking = Asking(shop.harvests, _call, shop.store, NoWorkers())

    with pytest.raises(HarvestUnavailable, match="nothing here takes harvest jobs just now") as raised:
        asyncio.run(asking.submit(shop.key, _asked(), b"{}"))

    assert raised.value.retry_after_seconds == 30
    assert shop.store.input_ids() == set()
    assert shop.harvests.jobs(shop.key) == []


@pytest.mark.parametrize("error", [TransferFailed("500"), NotEnoughSpace("full"), InvalidInput("no bucket /secret")])
def test_a_store_that_fails_is_no_mistake_of_the_caller_s(
    shop: Any, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(_job_id: str, _body: bytes) -> None:
        raise error

    monkeypatch.setattr(shop.store, "put_input", failing)
    asking = Asking(shop.harvests, _call, shop.store, Woken())

    with pytest.raises(HarvestUnavailable) as raised:
        asyncio.run(asking.submit(shop.key, _asked(), b"{}"))
    assert "secret" not in str(raised.value)
    assert shop.harvests.jobs(shop.key) == []


def test_a_request_keeps_of_its_prompts_what_it_says() -> None:
    plain = ask_of(HarvestRequest("tiny", ("x",)))
    assert (plain.layer_indices(32), plain.positions, plain.pooling, plain.shard_size) == (
        (8, 16, 24),
        "all",
        "none",
        32,
    )
    assert (plain.batch_size, plain.projection, plain.add_special_tokens) == (None, None, True)
    assert (plain.dtype, plain.compression) == ("bfloat16", "none")

    onto = Projection.onto(np.eye(2, 8, dtype=np.float32))
    told = HarvestRequest("tiny", ("x",), (1, 3), 4, 2, False, (0, -1), "mean", onto)
    ask = ask_of(told)
    assert (ask.layer_indices(4), ask.positions, ask.pooling, ask.shard_size) == ((1, 3), [0, -1], "mean", 4)
    assert (ask.batch_size, ask.projection, ask.add_special_tokens) == (2, onto, False)
    assert ask_of(HarvestRequest("tiny", ("x",), "all")).layer_indices(4) == (0, 1, 2, 3)
