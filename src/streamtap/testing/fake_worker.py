"""``python -m streamtap.testing.fake_worker``: the engine process, with a fake in place of the model.

It is what the service starts, but for what it loads: the same application, stages, signals and wire. With
``--enable-sleep-mode`` it also sleeps and wakes as vLLM's server does.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from streamtap.engines.base import Completes
from streamtap.engines.worker.app import Worker, create_app
from streamtap.engines.worker.serving import ServingOptions, WorkerServer, end_process, serve
from streamtap.engines.worker.stages import Enter, Load, Loading
from streamtap.errors import StreamtapError
from streamtap.settings import Settings
from streamtap.testing.fake_completer import FAULTS, FakeCompleter
from streamtap.testing.fake_sleep import SLEEP_FAULTS, FakeSleep


@dataclass(frozen=True)
class FakeLoad:
    """Loads ``engine`` in ``seconds``, or fails at the end of them."""

    engine: FakeCompleter
    seconds: float = 0.0
    fails: bool = False

    def __call__(self, enter: Enter) -> Completes:
        """The engine, after both stages."""
        enter("loading_weights")
        time.sleep(self.seconds / 2)
        enter("warming_up")
        time.sleep(self.seconds / 2)
        if self.fails:
            raise StreamtapError("the fake engine was told not to start.")
        return self.engine


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve a fake model until told to stop; the exit status."""
    given = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    engine = FakeCompleter(
        n_layers=given.n_layers,
        hidden=given.hidden,
        dtype=given.dtype,
        context_tokens=given.max_model_len,
        token_seconds=given.token_seconds,
        fault=given.fault,
        die_after=given.die_after,
        name=given.served_model_name,
    )
    options = ServingOptions(
        name=given.served_model_name,
        host=given.host,
        port=given.port,
        key=Settings.from_environment().worker_key,
        grace_seconds=given.grace_seconds,
        failed_seconds=given.failed_seconds,
        keepalive_seconds=given.keepalive_seconds,
    )
    load = FakeLoad(engine, given.start_seconds, given.fail_start)
    if not given.enable_sleep_mode:
        return serve(load, options)
    return _serve_sleeping(load, options, given.sleep_seconds, given.wake_seconds, given.sleep_fault)


def _serve_sleeping(
    load: Load, options: ServingOptions, sleep_seconds: float, wake_seconds: float, fault: str | None
) -> int:
    loading = Loading()
    worker = Worker(loading, name=options.name, key=options.key, keepalive_seconds=options.keepalive_seconds)
    server = WorkerServer(worker, load, options)
    server.config.app = FakeSleep(create_app(worker), sleep_seconds, wake_seconds, fault)
    server.run()
    return 0 if loading.error is None else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m streamtap.testing.fake_worker", description="A fake engine process."
    )
    parser.add_argument("--served-model-name", default="fake")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--start-seconds", type=float, default=0.0, help="how long it takes to load")
    parser.add_argument("--token-seconds", type=float, default=0.0, help="how long each token takes")
    parser.add_argument("--fail-start", action="store_true", help="fail to load, at the end of --start-seconds")
    parser.add_argument("--fault", choices=FAULTS, help="what goes wrong with every request")
    parser.add_argument("--die-after", type=int, help="end in the middle of the request after so many")
    parser.add_argument("--enable-sleep-mode", action="store_true", help="answer /sleep, /wake_up and /is_sleeping")
    parser.add_argument("--sleep-seconds", type=float, default=0.0, help="how long it takes to fall asleep")
    parser.add_argument("--wake-seconds", type=float, default=0.0, help="how long it takes to wake up")
    parser.add_argument("--sleep-fault", choices=SLEEP_FAULTS, help="what goes wrong when it sleeps or wakes")
    parser.add_argument("--n-layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=8)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--grace-seconds", type=float, default=30.0)
    parser.add_argument("--failed-seconds", type=float, default=3.0)
    parser.add_argument("--keepalive-seconds", type=float, default=5.0)
    return parser


if __name__ == "__main__":
    end_process(main())
