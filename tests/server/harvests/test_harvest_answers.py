"""What a job's owner is told of it, and until when."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from streamtap.harvested.manifest import NAME, STATS_NAME
from streamtap.server.config import HarvestConfig
from streamtap.server.harvests.answers import Kept, brief, full
from streamtap.server.harvests.jobs import Job, JobError
from streamtap.wire.harvest_jobs import Accounting

NOW = datetime(2026, 11, 30, 12, 0, 0, tzinfo=UTC)
JOB = Job(
    id="j",
    key_id=1,
    model="m",
    lane="small",
    state="done",
    run_id="r",
    n_prompts=3,
    n_tokens=9,
    n_shards=2,
    layer_indices=(1, 2),
    created_at=NOW - timedelta(seconds=20),
    started_at=NOW - timedelta(seconds=12),
    completed_at=NOW,
    prompts_done=3,
    shards_done=2,
    worked_seconds=11.25,
    timings={"harvest_s": 10.0},
)
KEPT = Kept(timedelta(days=7), timedelta(days=30))


class TellingLinks:
    """Signs with words, and knows until when it was asked to."""

    def __init__(self) -> None:
        self.until: datetime | None = None

    def prepare(self) -> None:
        pass

    def sign(self, run_id: str, names: Iterable[str], *, expires_at: datetime, now: datetime, base: str) -> list[str]:
        self.until = expires_at
        return [f"{base}/{run_id}/{name}" for name in names]


def test_a_job_that_is_done_has_links_to_each_file() -> None:
    links = TellingLinks()
    told = full(JOB, links, KEPT, now=NOW, base="http://g")

    assert told.result is not None
    assert (told.result.manifest_url, told.result.stats_url) == (f"http://g/r/{NAME}", f"http://g/r/{STATS_NAME}")
    assert told.result.shard_urls == ("http://g/r/shard_00000.safetensors", "http://g/r/shard_00001.safetensors")
    assert (told.result.n_shards, told.result.layer_indices, told.result.timings) == (2, (1, 2), {"harvest_s": 10.0})
    assert told.urls_expire_at == links.until == NOW + timedelta(days=7)
    assert told.accounting == Accounting(20.0, 11.25, 8.75)


@pytest.mark.parametrize("state", ["pending", "running", "failed", "cancelled"])
def test_any_other_has_none(state: str) -> None:
    told = full(replace(JOB, state=state), TellingLinks(), KEPT, now=NOW, base="")  # type: ignore[arg-type]

    assert (told.status, told.result, told.urls_expire_at) == (state, None, None)


def test_a_job_that_failed_says_why() -> None:
    told = brief(replace(JOB, state="failed", error=JobError("capture_failed", "block 3 was silent.")))

    assert told.error is not None
    assert (told.error.code, str(told.error)) == ("capture_failed", "block 3 was silent.")


def test_links_end_with_the_files() -> None:
    assert KEPT.until(JOB, NOW + timedelta(days=29)) == NOW + timedelta(days=30)
    assert KEPT.until(JOB, NOW + timedelta(days=30)) is None
    assert KEPT.until(replace(JOB, files_kept=False), NOW) is None
    assert Kept(timedelta(days=7), None).until(JOB, NOW + timedelta(days=999)) == NOW + timedelta(days=1006)


def test_how_long_is_what_the_configuration_says() -> None:
    assert Kept.of(HarvestConfig(link_days=0.5, keep_days=2)) == Kept(timedelta(hours=12), timedelta(days=2))


def test_time_is_accounted_for_once_it_is_over_and_never_more_than_there_was() -> None:
    assert brief(replace(JOB, state="running", completed_at=None)).accounting is None
    assert brief(replace(JOB, worked_seconds=99.0)).accounting == Accounting(20.0, 20.0, 0.0)
    assert brief(replace(JOB, completed_at=JOB.created_at - timedelta(seconds=1))).accounting == Accounting(
        0.0, 0.0, 0.0
    )
