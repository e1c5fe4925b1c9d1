"""``python -m streamtap.engines.worker``: one engine process."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence

from streamtap.engines.worker.model import ModelOptions
from streamtap.engines.worker.serving import ServingOptions, end_process, serve
from streamtap.settings import Settings


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve one model until told to stop; the exit status."""
    given = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    model = ModelOptions(
        model=given.model,
        revision=given.revision,
        dtype=given.dtype,
        device=given.device,
        max_model_len=given.max_model_len,
        max_batch_tokens=given.max_batch_tokens,
    )
    options = ServingOptions(
        name=given.served_model_name or given.model,
        host=given.host,
        port=given.port,
        key=Settings.from_environment().worker_key,
        grace_seconds=given.grace_seconds,
    )
    return serve(model.load, options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m streamtap.engines.worker", description="One engine process.")
    parser.add_argument("--model", required=True, help="'demo', a folder, a GGUF file, or a Hub id")
    parser.add_argument("--served-model-name", help="what answers call it (else the model)")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--revision")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--max-model-len", type=int, help="longest prompt with its completion, in tokens")
    parser.add_argument("--max-batch-tokens", type=int, help="tokens in one pass")
    parser.add_argument("--grace-seconds", type=float, default=30.0, help="how long requests may run on after SIGTERM")
    return parser


if __name__ == "__main__":
    end_process(main())
