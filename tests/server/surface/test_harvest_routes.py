"""/v1/harvest as a client sees it; a test is the worker."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from sqlalchemy import select

from streamtap.errors import NotEnoughSpace, TransferFailed
from streamtap.server.config import Limits, ModelConfig
from streamtap.server.db import tables
from streamtap.server.harvests import checks
from streamtap.server.ledger.keys import KeyLimits
from streamtap.server.service import Service
from streamtap.testing.stub_gateway import CONTEXT, MODEL, MUTE, CharacterCounter

GOOD = {"model": "stub", "prompts": ["ab", "c"]}
UPSTREAM = ModelConfig(id="remote", checkpoint="org/remote", engine="url", url="http://127.0.0.1:9/v1")
With = Callable[..., None]


def onto(width: int) -> dict[str, Any]:
    data = base64.b64encode(np.ones((1, width), np.float32).tobytes()).decode()
    return {"data": data, "dtype": "float32", "shape": [1, width], "compression": "none"}


def check_untouched(gateway: Any) -> None:
    assert gateway.harvests.under_way(store=gateway.store.identity) == []
    assert gateway.store.input_ids() == set()
    assert gateway.workers.woken == 0
    assert all(quota["used"] == 0 for quota in gateway.usage["usage"].values())
    assert gateway.usage["requests"]["active"]["now"] == 0


def check_shape(answer: Any, status: int, code: str) -> None:
    assert answer.status == status, answer.body
    error = answer.json["error"]
    assert error["code"] == code
    assert {"message", "type", "code", "retryable"} <= set(error)
    assert answer.json["request_id"] == answer.headers["x-request-id"]
    if error["retryable"]:
        assert int(answer.headers["retry-after"]) == error["retry_after_seconds"] > 0


def test_a_job_on_its_way(with_gateway: With) -> None:
    async def act(gateway: Any) -> None:
        answer = await gateway.submit({**GOOD, "shard_size": 1})
        assert answer.status == 202
        job_id = answer.json["job_id"]
        assert answer.json == {"job_id": job_id, "status": "pending", "model": "stub", "n_prompts": 2}
        assert gateway.workers.woken == 1
        assert gateway.store.input_ids() == {job_id}
        # BOS and two letters, BOS and one.
        assert gateway.usage["usage"]["monthly_input_tokens"]["used"] == 5
        assert gateway.usage["usage"]["monthly_harvests"]["used"] == 1

        pending = (await gateway.get(f"/v1/harvest/{job_id}")).json
        assert pending["status"] == "pending"
        assert pending["progress"] == {"prompts_done": 0, "shards_done": 0}
        assert {"result", "accounting", "error"}.isdisjoint(pending)

        gateway.claim()
        gateway.harvests.beat(job_id, "hand", 1, 1, seconds=0.25)
        running = (await gateway.get(f"/v1/harvest/{job_id}")).json
        assert (running["status"], running["progress"]) == ("running", {"prompts_done": 1, "shards_done": 1})
        assert running["run_id"] == pending["run_id"]

    with_gateway(act)


def test_a_job_that_is_done(with_gateway: With) -> None:
    async def act(gateway: Any) -> None:
        job_id = await gateway.new_job(shard_size=1, layers=[3, 0])
        job = gateway.done()

        told = await gateway.get(f"/v1/harvest/{job_id}", host="harvests.example:8443", x_forwarded_proto="https")
        done = told.json
        assert (done["status"], done["run_id"]) == ("done", job.run_id)
        assert done["progress"] == {"prompts_done": 2, "shards_done": 2}
        result = done["result"]
        assert (result["n_shards"], result["layer_indices"]) == (2, [0, 3])
        assert result["timings"] == {"harvest_s": 1.5}
        names = [urlsplit(url).path for url in (result["manifest_url"], result["stats_url"], *result["shard_urls"])]
        files = ["manifest.json", "stats.safetensors", "shard_00000.safetensors", "shard_00001.safetensors"]
        assert names == [f"/v1/harvest/files/{job.run_id}/{name}" for name in files]
        assert result["manifest_url"].startswith("https://harvests.example:8443/")
        spent = done["accounting"]
        assert spent["wall_clock_s"] == pytest.approx(spent["in_container_s"] + spent["unaccounted_s"], abs=0.002)
        assert done["urls_expire_at"] > done["completed_at"] > done["created_at"]

        listed = (await gateway.get("/v1/harvest")).json
        assert [job["job_id"] for job in listed["data"]] == [job_id]
        assert "result" not in listed["data"][0]

    with_gateway(act)


def test_tokens_are_charged_once_and_given_back_where_the_server_failed(with_gateway: With) -> None:
    async def act(gateway: Any) -> None:
        await gateway.new_job()
        job = gateway.failed("engine_dead", "it ended.")

        told = (await gateway.get(f"/v1/harvest/{job.id}")).json
        assert told["status"] == "failed"
        assert (told["error"]["code"], told["error"]["message"]) == ("engine_dead", "it ended.")
        assert "result" not in told
        assert gateway.usage["usage"]["monthly_input_tokens"]["used"] == 0

    with_gateway(act)


BODIES: dict[str, tuple[Any, int, str]] = {
    "not json": (b"{", 400, "bad_json"),
    "a list": ([], 400, "invalid_request"),
    "no prompts": ({"model": "stub"}, 400, "invalid_request"),
    "no model": ({"prompts": ["a"]}, 400, "invalid_request"),
    "unknown field": (GOOD | {"compression": "zstd"}, 400, "invalid_request"),
    "unknown model": (GOOD | {"model": "gpt-4"}, 400, "model_not_found"),
    "a model without activations": (GOOD | {"model": "mute"}, 400, "harvest_unsupported"),
    "an engine that runs elsewhere": (GOOD | {"model": "remote"}, 400, "harvest_unsupported"),
    "a layer too high": (GOOD | {"layers": [4]}, 400, "invalid_request"),
    "directions of another width": (GOOD | {"project_onto": onto(7)}, 400, "invalid_request"),
    "a zero direction": (
        GOOD | {"project_onto": {**onto(8), "data": base64.b64encode(bytes(32)).decode()}},
        400,
        "invalid_request",
    ),
    "an id outside the vocabulary": (GOOD | {"prompts": [[97]]}, 400, "invalid_request"),
    "a position that a prompt lacks": (GOOD | {"positions": [2]}, 400, "invalid_request"),
    "a position before a prompt": (GOOD | {"positions": [-3]}, 400, "invalid_request"),
    "one token named twice": (GOOD | {"positions": [0, -2]}, 400, "invalid_request"),
    "too many prompts": (GOOD | {"prompts": ["a"] * 6}, 413, "request_too_large"),
    "too many tokens": (GOOD | {"prompts": ["a" * 40, "b" * 20]}, 413, "request_too_large"),
    "a body too large": (GOOD | {"prompts": ["a" * 70_000]}, 413, "request_too_large"),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_wrong_body_is_refused_before_any_worker_hears_of_it(name: str, with_gateway: With) -> None:
    body, status, code = BODIES[name]
    limits = Limits(max_harvest_prompts=5, max_harvest_tokens=60, max_body_bytes=65_536)

    async def act(gateway: Any) -> None:
        check_shape(await gateway.submit(body), status, code)
        check_untouched(gateway)

    with_gateway(act, limits=limits, models=(MODEL, MUTE, UPSTREAM))


def test_the_bounds_themselves_are_taken(with_gateway: With) -> None:
    async def act(gateway: Any) -> None:
        # With its BOS each is 10 tokens.
        await gateway.new_job(prompts=["a" * 9] * 5, positions=[9, -10], layers=[3])
        assert gateway.usage["usage"]["monthly_input_tokens"]["used"] == 50

    with_gateway(act, limits=Limits(max_harvest_prompts=5, max_harvest_tokens=50))


def test_a_prompt_longer_than_the_context_counts_as_it_will_run(with_gateway: With) -> None:
    async def act(gateway: Any) -> None:
        await gateway.new_job(prompts=["a" * (3 * CONTEXT)], positions=[CONTEXT - 1])
        assert gateway.usage["usage"]["monthly_input_tokens"]["used"] == CONTEXT
        check_shape(
            await gateway.submit({"model": "stub", "prompts": ["a" * (3 * CONTEXT)], "positions": [CONTEXT]}),
            400,
            "invalid_request",
        )

    with_gateway(act)


def test_special_tokens_are_counted_only_where_they_are_added(with_gateway: With) -> None:
    async def act(gateway: Any) -> None:
        await gateway.new_job(add_special_tokens=False)
        assert gateway.usage["usage"]["monthly_input_tokens"]["used"] == 3

    with_gateway(act)


def test_keys_that_are_not_taken(with_gateway: With) -> None:
    async def act(gateway: Any) -> None:
        job_id = await gateway.new_job()
        completions = gateway.keys.create("completions", scopes=["completions"]).secret
        gateway.keys.pause(gateway.keys.create("paused", scopes=["harvest"]).record.name)
        expected = {None: (401, "missing_authorization"), "stp_x": (401, "invalid_api_key")}
        expected |= {completions: (403, "scope_denied")}
        for key, (status, code) in expected.items():
            check_shape(await gateway.submit(key=key), status, code)
            for method in ("GET", "DELETE"):
                check_shape(await gateway.get(f"/v1/harvest/{job_id}", method=method, key=key), status, code)
            check_shape(await gateway.get("/v1/harvest", key=key), status, code)
        assert (await gateway.get(f"/v1/harvest/{job_id}")).json["status"] == "pending"

    with_gateway(act)


def test_jobs_of_another_key_are_as_if_they_were_not_there(with_gateway: With) -> None:
    async def act(gateway: Any) -> None:
        job_id = await gateway.new_job()
        other = gateway.keys.create("other", scopes=["harvest"]).secret
        for unknown in (job_id, "nothing", "a" * 65, "%00", "ä", "a b"):
            for method in ("GET", "DELETE"):
                answer = await gateway.get(f"/v1/harvest/{unknown}", method=method, key=other)
                check_shape(answer, 404, "harvest_job_not_found")
        assert (await gateway.get("/v1/harvest", key=other)).json == {"object": "list", "data": []}
        assert (await gateway.get(f"/v1/harvest/{job_id}")).json["status"] == "pending"

    with_gateway(act)


def test_cancelling_in_each_state(with_gateway: With) -> None:
    async def act(gateway: Any) -> None:
        pending = await gateway.new_job()
        answer = await gateway.get(f"/v1/harvest/{pending}", method="DELETE")
        assert (answer.status, answer.json["status"]) == (200, "cancelled")
        assert gateway.store.input_ids() == set()

        running = await gateway.new_job()
        gateway.claim()
        assert (await gateway.get(f"/v1/harvest/{running}", method="DELETE")).json["status"] == "cancelled"
        assert gateway.harvests.beat(running, "hand") == "cancel"

        await gateway.new_job()
        done = gateway.done().id
        for job_id in (pending, running, done):
            check_shape(await gateway.get(f"/v1/harvest/{job_id}", method="DELETE"), 409, "harvest_not_cancellable")
        assert (await gateway.get(f"/v1/harvest/{done}")).json["status"] == "done"

    with_gateway(act, limits=Limits(small_harvests_per_key=1))


def test_limits_of_jobs(with_gateway: With) -> None:
    models = (MODEL, replace(MODEL, id="other", size="large"))

    async def act(gateway: Any) -> None:
        first = await gateway.new_job()
        refused = await gateway.submit()
        check_shape(refused, 429, "harvest_concurrency_exceeded")
        assert "small" in refused.json["error"]["message"]
        assert refused.headers["retry-after"] == "30"
        assert len(gateway.store.input_ids()) == 1

        await gateway.new_job(model="other")
        another = gateway.keys.create("another", scopes=["harvest"]).secret
        full = await gateway.submit({**GOOD, "model": "other"}, key=another)
        check_shape(full, 429, "harvest_capacity_exceeded")
        assert full.headers["retry-after"] == "30"

        await gateway.get(f"/v1/harvest/{first}", method="DELETE")
        await gateway.new_job()
        check_shape(await gateway.submit(), 429, "harvest_quota_exceeded")

    limits = Limits(small_harvests_per_key=1, large_harvests=1)
    with_gateway(act, models=models, limits=limits, key_limits=KeyLimits(monthly_harvests=3))


def test_a_client_that_left_before_its_job_was_taken_has_none(with_gateway: With) -> None:
    async def act(gateway: Any) -> None:
        call = gateway.call("/v1/harvest", method="POST", body=GOOD)
        call.leave()
        assert (await call.answer()).status == 0
        check_untouched(gateway)

    with_gateway(act)


@pytest.mark.parametrize("what", ["a slot", "the month", "workers"])
def test_prompts_are_not_counted_where_the_job_is_refused_anyway(
    what: str, with_gateway: With, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act(gateway: Any) -> None:
        await gateway.new_job()
        gateway.workers.is_there = what != "workers"
        monkeypatch.setattr(CharacterCounter, "count", lambda *_, **__: pytest.fail("counted"))
        refused = await gateway.submit()
        code = {"a slot": "harvest_concurrency_exceeded", "the month": "harvest_quota_exceeded"}
        check_shape(refused, 503 if what == "workers" else 429, code.get(what, "harvest_unavailable"))

    limits = Limits(small_harvests_per_key=1 if what == "a slot" else 3)
    with_gateway(act, limits=limits, key_limits=KeyLimits(monthly_harvests=1 if what == "the month" else 0))


def test_large_bodies_are_read_one_at_a_time(with_gateway: With, monkeypatch: pytest.MonkeyPatch) -> None:
    counting: list[int] = []
    at_once: list[int] = []

    def counted(*given: Any) -> Any:
        counting.append(1)
        at_once.append(len(counting))
        time.sleep(0.02)
        counting.pop()
        return count(*given)

    count = checks.count
    monkeypatch.setattr(checks, "count", counted)

    async def act(gateway: Any) -> None:
        # Threads enough for all of them, so that nothing else holds them back.
        monkeypatch.setattr(Service, "read", lambda _self, _size, function, *args: asyncio.to_thread(function, *args))
        bodies = [{**GOOD, "prompts": [*GOOD["prompts"], "a" * (1 << 20)]}] * 8
        answers = await asyncio.gather(*(gateway.submit(body) for body in bodies))
        assert {answer.status for answer in answers} == {202}

    with_gateway(act, limits=Limits(small_harvests_per_key=8))
    assert max(at_once) == 1


def test_starts_are_counted_as_those_of_any_request(with_gateway: With) -> None:
    async def act(gateway: Any) -> None:
        check_shape(await gateway.submit({}), 400, "invalid_request")
        check_shape(await gateway.submit({}), 429, "rate_limited")
        assert gateway.usage["requests"]["active"]["now"] == 0

    with_gateway(act, key_limits=KeyLimits(rate_per_minute=1))


def test_without_workers_nothing_is_taken(with_gateway: With) -> None:
    async def act(gateway: Any) -> None:
        gateway.workers.is_there = False
        refused = await gateway.submit()
        check_shape(refused, 503, "harvest_unavailable")
        assert refused.headers["retry-after"] == "30"
        check_untouched(gateway)

    with_gateway(act)


@pytest.mark.parametrize("error", [TransferFailed("s3://secret-bucket failed"), NotEnoughSpace("/secret is full")])
def test_a_store_that_fails_is_told_without_its_address(error: Exception, with_gateway: With) -> None:
    async def act(gateway: Any) -> None:
        def fails(*_: Any) -> None:
            raise error

        gateway.store.put_input = fails
        refused = await gateway.submit()
        check_shape(refused, 503, "harvest_unavailable")
        assert b"secret" not in refused.body
        check_untouched(gateway)

    with_gateway(act)


def test_a_job_is_cancelled_and_refused_though_its_store_fails(with_gateway: With) -> None:
    async def act(gateway: Any) -> None:
        def fails(*_: Any) -> None:
            raise TransferFailed("the store failed")

        job_id = await gateway.new_job()
        gateway.store.remove_input = fails
        check_shape(await gateway.submit(), 429, "harvest_concurrency_exceeded")
        assert (await gateway.get(f"/v1/harvest/{job_id}", method="DELETE")).json["status"] == "cancelled"

    with_gateway(act, limits=Limits(small_harvests_per_key=1))


def test_a_submission_is_recorded_as_metadata_with_its_model(with_gateway: With) -> None:
    async def act(gateway: Any) -> None:
        await gateway.new_job(prompts=["a secret of mine"])
        await gateway.submit({"model": "stub", "prompts": ["ab"], "positions": [99]})
        await gateway.submit({"model": "gpt-4", "prompts": ["ab"]})
        with gateway.database.reading() as connection:
            rows = connection.execute(select(tables.requests_log).order_by(tables.requests_log.c.id)).all()
        told = [(row.endpoint, row.model, row.status, row.code, row.input_tokens) for row in rows]
        assert told == [
            ("/v1/harvest", "stub", 202, None, 17),
            ("/v1/harvest", "stub", 400, "invalid_request", 0),
            ("/v1/harvest", None, 400, "model_not_found", 0),
        ]
        with gateway.database.reading() as connection:
            held = [str(connection.execute(select(table)).all()) for table in tables.metadata.sorted_tables]
        assert "secret" not in "".join(held)

    with_gateway(act)


def test_nothing_of_a_prompt_is_logged(with_gateway: With, caplog: pytest.LogCaptureFixture) -> None:
    async def act(gateway: Any) -> None:
        await gateway.new_job(prompts=["a secret of mine"])
        await gateway.submit({"model": "stub", "prompts": ["a secret of mine", 1]})
        await gateway.submit({"model": "stub", "prompts": ["a secret of mine"], "positions": [99]})
        job = gateway.done()
        told = (await gateway.get(f"/v1/harvest/{job.id}")).json
        await gateway.get(told["result"]["manifest_url"].partition("127.0.0.1:2")[2], key=None)

    with caplog.at_level("DEBUG"):
        with_gateway(act)
    logged = str([vars(record) for record in caplog.records])
    assert "/v1/harvest/{id}" in logged
    assert "secret" not in logged
    assert "signature" not in logged
