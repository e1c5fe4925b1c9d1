"""``python -m streamtap.testing.fake_harvest_worker``: the worker of bulk jobs, with a fake in place of the model.

It is what the service starts, but for what it loads; its own options come first, the worker's after them.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path

from streamtap.engines.base import Engine
from streamtap.errors import InvalidInput
from streamtap.server.harvests.orders import HarvestModel
from streamtap.server.harvests.worker import main as work
from streamtap.testing.fake_engine import FakeEngine


def main(arguments: Sequence[str] | None = None) -> int:
    """Work until idle or told to stop; the exit status."""
    given, rest = _parser().parse_known_args(arguments)

    def before_batch(number: int) -> None:
        time.sleep(given.batch_seconds)
        if given.ran is not None:
            _note(given.ran)
        if given.die_after is not None and number >= given.die_after:
            os._exit(9)

    def load(model: HarvestModel) -> Engine:
        time.sleep(given.load_seconds)
        if given.fail_load:
            raise InvalidInput("the fake model was told not to load from /secret/path.")
        return FakeEngine(context_tokens=model.context, batch_size=given.batch_size, before_batch=before_batch)

    if given.fail_start:
        return 3
    return work(rest, load=load)


def _note(file: Path) -> None:
    """One more line, whoever else writes there."""
    with file.open("ab", buffering=0) as stream:
        stream.write(f"{os.getpid()}\n".encode())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m streamtap.testing.fake_harvest_worker", allow_abbrev=False)
    parser.add_argument("--batch-seconds", type=float, default=0.0, help="how long each batch takes")
    parser.add_argument("--batch-size", type=int, default=4, help="prompts in a batch")
    parser.add_argument("--load-seconds", type=float, default=0.0, help="how long the model takes to load")
    parser.add_argument("--fail-load", action="store_true", help="fail to load the model")
    parser.add_argument("--fail-start", action="store_true", help="end at once, with status 3")
    parser.add_argument("--die-after", type=int, help="end in the middle of the batch of that number")
    parser.add_argument("--ran", type=Path, help="file that gets a line for each batch: the process's id")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
