"""``create_app``: the gateway as an ASGI application."""

from __future__ import annotations

from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from fastapi import FastAPI
from starlette.routing import Route

import streamtap
from streamtap.server.admission import Admission
from streamtap.server.clock import Clock
from streamtap.server.config import ServerConfig
from streamtap.server.harvests.asking import Asking, NoWorkers, Workers
from streamtap.server.harvests.signing import links_of
from streamtap.server.harvests.storage import HarvestStore
from streamtap.server.ledger import Ledger
from streamtap.server.metrics import Metrics
from streamtap.server.models.catalog import Catalog
from streamtap.server.relaying.upstream import Upstream
from streamtap.server.service import Service
from streamtap.server.stopping import Stopping
from streamtap.server.surface import openapi
from streamtap.server.surface.edge import Edge
from streamtap.server.surface.problems import HANDLERS
from streamtap.server.surface.routes.chat import refuse_chat
from streamtap.server.surface.routes.completions import Completions
from streamtap.server.surface.routes.harvest import HarvestJob, HarvestJobs
from streamtap.server.surface.routes.harvest_files import HarvestFiles
from streamtap.server.surface.routes.health import Health
from streamtap.server.surface.routes.models import Models
from streamtap.server.surface.routes.usage import Usage

if TYPE_CHECKING:
    from streamtap.server.pool.pool import Pool

#: SQLite writes one transaction at a time anyway, and threads that wait for each other only add to it.
_LEDGER_THREADS = {"sqlite": 1}
_MORE_LEDGER_THREADS = 8


def create_app(
    config: ServerConfig,
    *,
    ledger: Ledger,
    pool: Pool,
    catalog: Catalog,
    clock: Clock,
    metrics: Metrics | None = None,
    workers: Workers | None = None,
) -> FastAPI:
    """The application; ``app.state.service`` holds its parts.

    Whoever calls it starts and closes ``pool``, which may tell ``metrics`` of its engines, and calls the ledger's
    ``sweep`` every few seconds. ``workers`` are told of bulk jobs; without them none are taken.
    """
    threads = _LEDGER_THREADS.get(config.database_url.partition(":")[0], _MORE_LEDGER_THREADS)
    books = ThreadPoolExecutor(threads, thread_name_prefix="streamtap-ledger")
    admission = Admission(ledger, books, clock)
    store = HarvestStore(config.harvest_root)
    service = Service(
        config=config,
        admission=admission,
        pool=pool,
        catalog=catalog,
        clock=clock,
        upstream=Upstream(),
        stopping=Stopping(clock),
        metrics=metrics or Metrics(),
        harvests=Asking(ledger.harvests, admission.call, store, workers or NoWorkers()),
    )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()
        books.shutdown(wait=True)

    app = FastAPI(
        title="Streamtap",
        version=streamtap.__version__,
        lifespan=lifespan,
        redoc_url=None,
        redirect_slashes=False,
        exception_handlers=HANDLERS,
    )
    app.state.service = service
    app.openapi = openapi.document  # type: ignore[method-assign]
    completions = Completions(service)
    app.router.routes[:0] = _routes(service, completions)
    app.add_middleware(Edge, clock=clock, metrics=service.metrics, stopping=service.stopping, completions=completions)
    return app


def _routes(service: Service, completions: Completions) -> list[Route]:
    models, health = Models(service), Health(service)
    links = links_of(service.harvests.store.runs)
    files = HarvestFiles(links, clock=service.clock, stopping=service.stopping)
    return [
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", refuse_chat, methods=["POST"]),
        Route("/v1/models", models.every, methods=["GET"]),
        Route("/v1/models/{model_id}/status", models.status, methods=["GET"]),
        Route("/v1/usage", Usage(service).mine, methods=["GET"]),
        Route("/v1/harvest", HarvestJobs(service), methods=["GET", "POST"]),
        Route("/v1/harvest/{job_id}", HarvestJob(service, links), methods=["GET", "DELETE"]),
        Route("/v1/harvest/files/{run_id}/{name}", files, methods=["GET"]),
        Route("/health", health.health, methods=["GET"]),
        Route("/metrics", health.metrics, methods=["GET"]),
    ]
