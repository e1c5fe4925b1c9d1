"""A gateway that takes bulk jobs which a test does by hand, by what the ledger has for workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from streamtap.server.harvests.jobs import Job, JobError
from streamtap.testing.stub_engine import StubPool
from streamtap.testing.stub_gateway import StubGateway

GOOD = {"model": "stub", "prompts": ["ab", "c"]}


class HandWorkers:
    """Counts the times that it was woken."""

    def __init__(self) -> None:
        self.is_there = True
        self.woken = 0

    def available(self, lane: str) -> bool:
        return self.is_there

    def wake(self) -> None:
        self.woken += 1


class HarvestGateway(StubGateway):
    """With a test in the place of the workers."""

    def __init__(self, folder: Path, **more: Any) -> None:
        self.workers = HandWorkers()
        super().__init__(folder, StubPool(), workers=self.workers, **more)
        self.store = self.app.state.service.harvests.store
        self.harvests = self.ledger.harvests

    async def submit(self, body: Any = None, **more: Any) -> Any:
        return await self.get("/v1/harvest", method="POST", body=GOOD if body is None else body, **more)

    async def new_job(self, **fields: Any) -> str:
        answer = await self.submit({**GOOD, **fields})
        assert answer.status == 202, answer.body
        return str(answer.json["job_id"])

    def claim(self) -> Job:
        job = self.harvests.claim("hand", ["stub", "other"], store=self.store.identity)
        assert job is not None
        return job

    def done(self, **files: bytes) -> Job:
        """The oldest job, taken and done, with these files (``_`` for the dot in names)."""
        job = self.claim()
        place = self.store.run(job.run_id)
        for name, data in files.items():
            place.put(name, data)
        assert self.harvests.done(job.id, "hand", {"harvest_s": 1.5})
        return job

    def failed(self, code: str, message: str) -> Job:
        job = self.claim()
        assert self.harvests.failed(job.id, "hand", JobError(code, message), refund=True)
        return job


Act = Callable[[HarvestGateway], Coroutine[Any, Any, None]]


@pytest.fixture
def with_gateway(tmp_path: Path) -> Callable[..., None]:
    """Run a test's coroutine on such a gateway."""

    def run(act: Act, **more: Any) -> None:
        async def main() -> None:
            gateway = HarvestGateway(tmp_path, **more)
            try:
                await act(gateway)
            finally:
                await gateway.close()

        asyncio.run(main())

    return run
