"""Many sequences of a service's model as one bulk harvest: when it is asked for, what is in it, what comes of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import ml_dtypes
import numpy as np
import pytest

from streamtap.activations import Activations, join
from streamtap.capture.runs import TokenRun
from streamtap.engines.api import ApiEngine
from streamtap.engines.api_bulk import JobRows
from streamtap.engines.by_sequence import Wanted
from streamtap.engines.tokenizing import PromptTokenizer
from streamtap.errors import CaptureMissed, HarvestFailed, HarvestQuotaExceeded, HarvestUnsupported, ScopeDenied
from streamtap.pooling import pool
from streamtap.spec import CaptureSpec, Prompt
from streamtap.testing.characters import VOCABULARY, CharacterTokenizer
from streamtap.testing.fake_text import log_of
from streamtap.testing.stub_service import StubService
from streamtap.wire.errors import error_body

PROMPTS = [[5 + i % 80, 6, 7 + i // 80][: 2 + i % 2] + [8] * (i % 3) for i in range(40)]
Load = Callable[..., ApiEngine]


@pytest.fixture
def service(tmp_path: Path) -> StubService:
    return StubService(tmp_path / "server")


@pytest.fixture
def loading() -> dict[str, Any]:
    return {
        "tokenizer": PromptTokenizer(CharacterTokenizer(), context_length=2048, vocabulary=VOCABULARY),
        "harvest_from": 20,
    }


def capture(engine: ApiEngine, prompts: Any = PROMPTS, **spec: Any) -> Activations:
    return join(list(engine.capture(prompts, CaptureSpec(**spec))))


def rows_of(service: StubService, ids: list[int], layer: int) -> Any:
    return service.engine.rows_engine.rows(ids, layer).astype(ml_dtypes.bfloat16)


def jobs(service: StubService) -> list[Any]:
    return list(service.harvests.requests.values())


def test_many_sequences_come_as_one_job(service: StubService, load: Load, caplog: pytest.LogCaptureFixture) -> None:
    engine = load()

    with caplog.at_level("INFO"):
        acts = capture(engine, layers=[1, 3])

    (job,) = jobs(service)
    assert (job.layers, job.positions, job.pooling, job.add_special_tokens) == ((1, 3), "all", "none", True)
    assert [list(prompt) for prompt in job.prompts] == PROMPTS
    assert service.asked == []
    assert engine.last_way == "harvest: 40 sequences, 20 or more, as bulk job job-0"
    assert f"rows of stub come {engine.last_way}" in caplog.text
    assert "signature" not in caplog.text
    assert acts.provenance == engine.provenance
    assert acts.offsets.tolist() == np.cumsum([0, *map(len, PROMPTS)]).tolist()
    for place, ids in enumerate(PROMPTS):
        for layer, rows in acts.prompt(place).items():
            np.testing.assert_array_equal(rows, rows_of(service, ids, layer))


@pytest.mark.parametrize(
    ("spec", "positions", "pooling"),
    [
        ({"pooling": "last_token"}, "last", "none"),
        ({"positions": "last"}, "last", "none"),
        ({"positions": "last", "pooling": "mean"}, "last", "none"),
        ({"pooling": "mean"}, "all", "mean"),
        ({"pooling": "max"}, "all", "max"),
        ({"pooling": "first_token"}, "all", "first_token"),
    ],
)
def test_one_row_a_prompt_is_all_that_its_files_hold(
    service: StubService, load: Load, spec: dict[str, Any], positions: str, pooling: str
) -> None:
    """V28, in bulk."""
    acts = capture(load(), layers=[2], **spec)

    (job,) = jobs(service)
    assert (job.positions, job.pooling) == (positions, pooling)
    assert [len(rows) for rows in acts.acts.values()] == [len(PROMPTS)]
    kind = "last_token" if positions == "last" else pooling
    stands = "none" if spec.get("pooling") in ("mean", "max") else kind
    for place, ids in enumerate(PROMPTS):
        exact = service.engine.rows_engine.rows(ids, 2)
        expected = pool(exact, np.array([0, len(exact)]), kind).astype(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(acts.prompt(place)[2], expected)
    places = {"last_token": [len(ids) - 1 for ids in PROMPTS], "first_token": [0] * 40, "none": [-1] * 40}
    assert acts.positions.tolist() == places[stands]


def test_files_hold_as_many_prompts_as_fit_into_memory(service: StubService, load: Load) -> None:
    capture(load(), layers=[0])
    service.can = {"hidden_size": 8192}
    bulk = load()._bulk
    long = [TokenRun(np.zeros(100, np.int32), np.arange(100, dtype=np.int32), 0)]

    assert jobs(service)[0].shard_size == 256
    assert bulk._shard_size(long, Wanted((0,), "none"), JobRows("all", "none")) == (32 << 20) // (100 * 8192 * 2)
    assert bulk._shard_size(long, Wanted(tuple(range(100)), "none"), JobRows("all", "none")) == 1
    assert bulk._shard_size(long, Wanted((0,), "mean"), JobRows("all", "mean")) == 256


@pytest.mark.parametrize(
    ("more", "options", "spec"),
    [
        ({}, {"harvest_from": 41}, {}),
        ({}, {"harvest_from": None}, {}),
        ({"harvest": False}, {}, {}),
        ({"harvest": None}, {}, {}),
        ({}, {"dtype": "float32"}, {}),
        ({}, {}, {"positions": "1:"}),
    ],
    ids=["few", "never", "not offered", "not told", "float32", "other positions"],
)
def test_other_sets_come_one_by_one(
    service: StubService, load: Load, more: dict[str, Any], options: dict[str, Any], spec: dict[str, Any]
) -> None:
    service.can = more
    engine = load(**options)

    acts = capture(engine, layers=[1], **spec)

    assert jobs(service) == []
    assert len(service.asked) == 40
    assert engine.last_way.startswith("inline: 40 sequences")
    assert len(acts) == 40


def test_many_with_likelihoods_run_once(service: StubService, load: Load) -> None:
    """No harvest has these, and a job beside them would run every prompt again."""
    engine = load()

    acts = capture(engine, layers=[1], pooling="mean", token_nll=True)

    assert jobs(service) == []
    assert all("output_residual_stream" in body and "prompt_logprobs" in body for body in service.asked)
    assert len(service.asked) == 40
    assert engine.last_way == "inline: 40 sequences, whose token costs no harvest has"
    assert acts.token_nll is not None
    for ids, costs in zip(PROMPTS, acts.token_nll, strict=True):
        expected = [-(log_of(token, ids[:place], 0, 0).logprob or 0) for place, token in enumerate(ids)][1:]
        np.testing.assert_allclose(costs, expected, rtol=1e-6)


def test_likelihoods_alone_are_no_harvest(service: StubService, load: Load) -> None:
    capture(load(), layers=(), perplexity=True)

    assert jobs(service) == []


def test_more_than_one_job_may_have_are_several(service: StubService, load: Load) -> None:
    service.harvests.most_prompts, service.harvests.slots = 16, 1

    acts = capture(load(), layers=[1])

    assert [len(job.prompts) for job in jobs(service)] == [10, 10, 10, 10]
    for place, ids in enumerate(PROMPTS):
        np.testing.assert_array_equal(acts.prompt(place)[1], rows_of(service, ids, 1))


@pytest.mark.parametrize("refusal", [ScopeDenied, HarvestUnsupported, HarvestQuotaExceeded])
def test_a_key_that_may_not_harvest_gets_its_rows_one_by_one(
    service: StubService, load: Load, refusal: Any, caplog: pytest.LogCaptureFixture
) -> None:
    status = {ScopeDenied: 403, HarvestQuotaExceeded: 429}.get(refusal, 400)
    posts = _refuse_jobs(service, refusal("no."), status)
    engine = load()

    with caplog.at_level("INFO"):
        acts = capture(engine, layers=[1])
    again = capture(engine, layers=[1])

    assert len(posts) == 1, "it is not asked for twice"
    assert len(service.asked) == 80
    assert engine.last_way.startswith("inline: 40 sequences")
    assert refusal.code in caplog.text
    np.testing.assert_array_equal(acts.acts[1], again.acts[1])


def test_a_quota_that_is_used_up_by_a_part_of_it_gives_the_rows_one_by_one(service: StubService, load: Load) -> None:
    service.harvests.most_prompts, service.harvests.slots = 20, 1
    posts: list[int] = []

    def before(request: httpx2.Request) -> httpx2.Response | None:
        if request.url.path != "/v1/harvest":
            return None
        posts.append(1)
        if len(posts) < 4:  # too large, taken, no slot; then that of the second half
            return None
        refusal = error_body(HarvestQuotaExceeded("used 3/3."), "r")
        return httpx2.Response(429, content=refusal, headers={"content-type": "application/json"})

    service.before = before
    engine = load()

    acts = capture(engine, layers=[1])

    assert len(jobs(service)) == 1
    assert len(service.asked) == 40
    assert "harvest_quota_exceeded" in engine.last_way
    assert acts.offsets.tolist() == np.cumsum([0, *map(len, PROMPTS)]).tolist()


def _refuse_jobs(service: StubService, error: Any, status: int) -> list[str]:
    posts: list[str] = []

    def before(request: httpx2.Request) -> httpx2.Response | None:
        if request.url.path != "/v1/harvest":
            return None
        posts.append(request.method)
        return httpx2.Response(status, content=error_body(error, "r"), headers={"content-type": "application/json"})

    service.before = before
    return posts


def test_a_job_that_fails_is_an_error(service: StubService, load: Load) -> None:
    service.harvests.broken = "the engine could not be loaded"

    with pytest.raises(HarvestFailed, match="could not be loaded"):
        capture(load(), layers=[1])


def test_a_job_that_nobody_will_fetch_is_ended(service: StubService, load: Load) -> None:
    """The key does not hold any more, say."""
    service.harvests.looks = 1000

    def before(request: httpx2.Request) -> httpx2.Response | None:
        if request.method != "GET" or not request.url.path.startswith("/v1/harvest/"):
            return None
        refusal = error_body(ScopeDenied("not any more."), "r")
        return httpx2.Response(403, content=refusal, headers={"content-type": "application/json"})

    service.before = before

    with pytest.raises(ScopeDenied, match="not any more"):
        capture(load(), layers=[1])

    assert [job.status for job in service.harvests.jobs.values()] == ["cancelled"]


def test_the_rows_of_other_tokens_are_refused(service: StubService, load: Load) -> None:
    engine = load()
    ask = engine._client.harvest

    def other(prompts: Any, **options: Any) -> Any:
        return ask([*prompts[1:], prompts[0]], **options)

    engine._client.harvest = other  # type: ignore[method-assign]
    with pytest.raises(CaptureMissed, match="other tokens than were sent"):
        capture(engine, layers=[1], pooling="mean")


def test_other_layers_are_refused(service: StubService, load: Load) -> None:
    engine = load()
    ask = engine._client.harvest
    engine._client.harvest = lambda prompts, **options: ask(prompts, **{**options, "layers": [0]})  # type: ignore[method-assign]

    with pytest.raises(CaptureMissed, match=r"holds layers \[0\]; \[1\] were asked for"):
        capture(engine, layers=[1])


def test_prompts_that_bring_all_their_positions_are_harvested(service: StubService, load: Load) -> None:
    prompts = [Prompt(token_ids=ids, positions=range(len(ids))) for ids in PROMPTS]

    capture(load(), prompts, layers=[1])

    assert jobs(service)[0].positions == "all"
