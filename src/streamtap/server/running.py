"""One gateway from start to stop: database, catalogue, pool, application, signals."""

from __future__ import annotations

import asyncio
import signal
import socket
import uuid
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial

import uvicorn
from fastapi import FastAPI

from streamtap.errors import InvalidInput
from streamtap.server.admission import Admission
from streamtap.server.app import create_app
from streamtap.server.clock import Clock, SystemClock
from streamtap.server.config import ServerConfig
from streamtap.server.data_folder import only_gateway_of
from streamtap.server.db import Database
from streamtap.server.harvests.orders import orders_of
from streamtap.server.harvests.signing import links_of
from streamtap.server.harvests.storage import HarvestStore
from streamtap.server.harvests.supervisor import Supervisor
from streamtap.server.ledger import Ledger
from streamtap.server.ledger.keys import Keys
from streamtap.server.log import log_to_stderr, note
from streamtap.server.metrics import Metrics
from streamtap.server.models.catalog import Catalog, Served
from streamtap.server.models.counting import TokenCounter
from streamtap.server.models.facts import facts_of
from streamtap.server.pool.engine_events import EngineEvent
from streamtap.server.pool.pool import Pool
from streamtap.server.service import Service
from streamtap.server.surface.http_protocol import Protocol
from streamtap.settings import Settings

#: How often this gateway says that it lives and looks for those that do not, in seconds.
_BEAT_SECONDS = 10.0
#: How long an open connection without a request is kept, in seconds; longer than clients keep theirs.
_IDLE_SECONDS = 75
#: How long the connections have to close once their requests are over, in seconds.
_CLOSING_SECONDS = 5
Say = Callable[[str], None]


@dataclass(frozen=True)
class Started:
    """A gateway that listens; ``first_key`` is there the one time that it was made."""

    base_url: str
    config: ServerConfig
    first_key: str | None


class _Server(uvicorn.Server):
    """Leaves signals to us: what runs must be let end before the sockets close."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Nothing."""
        yield


def serve(config: ServerConfig, *, say: Say, started: Callable[[Started], None]) -> None:
    """Serve until SIGINT or SIGTERM; ``say`` is told what takes long, ``started`` is called once requests are taken.

    Raises:
        InvalidInput: a model, database, data folder or port that cannot be used.
    """
    log_to_stderr()
    with (
        # Held first: the ledger takes for granted that nobody else works for this folder.
        only_gateway_of(config.data_dir) as owner,
        closing(_listen(config.host, config.port)) as listening,
        closing(Database.open(config.database_url)) as database,
    ):
        if config.harvest.workers:
            # A folder that cannot be used is to be known now, not with the first job.
            store = HarvestStore(config.harvest_root)
            _ = store.identity
            links_of(store.runs).prepare()
        catalog = _catalog(config, say)
        base_url = _address(config.host, listening)

        def ready() -> None:
            # Made last: a key of a server that then failed to start would never be shown.
            started(Started(base_url, config, Keys(database).first_key()))

        asyncio.run(_run(config, owner, database, catalog, listening, ready, say))


def _catalog(config: ServerConfig, say: Say) -> Catalog:
    settings = Settings.from_environment()
    found: dict[str, Served] = {}
    for model in config.models:
        facts = facts_of(model, settings, say)
        found[model.id] = Served(model, facts, TokenCounter(facts))
    return found


async def _run(
    config: ServerConfig,
    owner: str,
    database: Database,
    catalog: Catalog,
    listening: socket.socket,
    ready: Callable[[], None],
    say: Say,
) -> None:
    clock = SystemClock()
    ledger = Ledger(database, config.limits, gateway=uuid.uuid4().hex, owner=owner, now=clock.now)
    metrics = Metrics()
    pool = Pool(config, clock=clock, on_event=partial(_heard, metrics))
    orders = orders_of(config, catalog.values())
    supervisor = Supervisor(config, orders, ledger.harvests, clock=clock)
    app = create_app(
        config, ledger=ledger, pool=pool, catalog=catalog, clock=clock, metrics=metrics, workers=supervisor
    )
    async with AsyncExitStack() as ending:
        # One that fails must not keep the others from being done.
        ending.callback(ledger.close)
        ending.push_async_callback(pool.close)
        ending.push_async_callback(supervisor.close)
        await pool.start()
        supervising = asyncio.ensure_future(supervisor.run())
        ending.callback(supervising.cancel)
        beating = asyncio.ensure_future(beat(app.state.service.admission, clock))
        ending.callback(beating.cancel)
        await _until_stopped(config, app, listening, ready, say)


async def _until_stopped(
    config: ServerConfig, app: FastAPI, listening: socket.socket, ready: Callable[[], None], say: Say
) -> None:
    service: Service = app.state.service
    told = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop() -> None:
        # Asked twice, it ends what runs at once.
        if told.is_set():
            service.stopping.hurry()
        told.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    server = _Server(_uvicorn_config(app))
    serving = asyncio.ensure_future(server.serve(sockets=[listening]))
    waiting = asyncio.ensure_future(told.wait())
    ready()
    await asyncio.wait([serving, waiting], return_when=asyncio.FIRST_COMPLETED)
    note("stopping", running=service.stopping.running)
    if told.is_set() and (line := service.stopping.waits_for(config.timing.stop_seconds)) is not None:
        # A terminal that is gone must not cost the requests their time.
        with suppress(OSError):
            say(line)
    await service.stopping.drain(config.timing.stop_seconds)
    server.should_exit = True
    waiting.cancel()
    await serving


def _heard(metrics: Metrics, event: EngineEvent) -> None:
    metrics.heard(event)
    note(f"engine_{event.kind}", model=event.model_id, role=event.role, seconds=event.seconds, detail=event.detail)


def _uvicorn_config(app: FastAPI) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        loop="asyncio",
        http=Protocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=_IDLE_SECONDS,
        timeout_graceful_shutdown=_CLOSING_SECONDS,
    )


async def beat(admission: Admission, clock: Clock) -> None:
    """Every ten seconds: keep this gateway's requests, and give back what gateways held that were killed.

    A database that fails must not end it: other gateways would take this one for dead.
    """
    while True:
        await clock.sleep(_BEAT_SECONDS)
        sweeping = asyncio.ensure_future(admission.sweep())
        await asyncio.wait([sweeping])
        if (error := sweeping.exception()) is not None:
            note("sweep_failed", error=type(error).__name__)
        elif given_back := sweeping.result():
            note("gave_back", requests=given_back)


def _listen(host: str, port: int) -> socket.socket:
    # Named as TCP, or asyncio leaves Nagle's algorithm on and each small answer takes 40 ms.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(2048)
        return listening
    except (OSError, OverflowError) as error:
        listening.close()
        raise InvalidInput(f"port {port} of {host} cannot be used ({error}); choose another, or 0 for any.") from error


def _address(host: str, listening: socket.socket) -> str:
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{listening.getsockname()[1]}/v1"
