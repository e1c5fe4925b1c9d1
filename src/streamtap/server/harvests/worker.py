"""``python -m streamtap.server.harvests.worker``: one worker process, which a gateway starts and ends."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import threading
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from types import FrameType

from streamtap.errors import StreamtapError
from streamtap.server.config import Limits
from streamtap.server.db import Database
from streamtap.server.harvests.engines import Load, LoadedEngine, load_for_harvest
from streamtap.server.harvests.jobs import LANES
from streamtap.server.harvests.orders import read_orders
from streamtap.server.harvests.working import Working
from streamtap.server.ledger.harvests import Harvests
from streamtap.server.log import log_to_stderr, note

_UNUSABLE = 2


def main(arguments: Sequence[str] | None = None, *, load: Load = load_for_harvest) -> int:
    """Work until idle or told to stop; the exit status, 2 where orders, database or store cannot be used."""
    given = _parser().parse_args(arguments)
    log_to_stderr()
    told_to_stop = _stop_on_signals()
    try:
        return _work(given, load, told_to_stop)
    except StreamtapError as error:
        note("harvest_worker_failed", code=error.code, detail=str(error))
        return _UNUSABLE


def _work(given: argparse.Namespace, load: Load, told_to_stop: threading.Event) -> int:
    orders = read_orders(given.orders)
    engine = LoadedEngine(load)
    with closing(Database.open(orders.database)) as database:
        # What a worker does holds to no limits; those were kept when the job was taken on.
        harvests = Harvests(database, Limits(), lease_seconds=orders.lease_seconds)
        working = Working(orders, harvests, engine, name=given.name, lane=given.lane, told_to_stop=told_to_stop)
        return working.run()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m streamtap.server.harvests.worker", description=__doc__)
    parser.add_argument("--orders", type=Path, required=True, help="the file that the gateway wrote")
    parser.add_argument("--name", required=True, help="unlike that of any other worker")
    parser.add_argument("--lane", choices=LANES, required=True)
    return parser


def _stop_on_signals() -> threading.Event:
    told = threading.Event()

    def stop(_number: int, _frame: FrameType | None) -> None:
        # Asked twice, it ends at once: the lease runs out, and another worker goes on.
        if told.is_set():
            os._exit(128 + signal.SIGTERM)
        told.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    return told


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    # At once: what libraries do at the end of a process may take longer than the gateway waits.
    os._exit(status)
