"""Command lines that start an engine process: our worker, or vLLM's server with vllm-lens."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def worker_command(
    model: str,
    *,
    name: str,
    port: int | str,
    revision: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    max_model_len: int | None = None,
    max_batch_tokens: int | None = None,
) -> list[str]:
    """Our own worker, which runs ``model`` with transformers."""
    options = {
        "--revision": revision,
        "--dtype": dtype,
        "--device": device,
        "--max-model-len": max_model_len,
        "--max-batch-tokens": max_batch_tokens,
    }
    command = [sys.executable, "-m", "streamtap.engines.worker", "--model", model]
    return [*command, *_listening(name, port), *_given(options)]


def vllm_command(
    model: str,
    *,
    name: str,
    port: int | str,
    revision: str | None = None,
    dtype: str = "auto",
    max_model_len: int | None = None,
) -> list[str]:
    """``vllm serve``, as it stands on the path."""
    options = {"--revision": revision, "--dtype": dtype, "--max-model-len": max_model_len}
    return ["vllm", "serve", model, *_listening(name, port), *_given(options)]


def filled_command(words: Sequence[str], *, model: str, name: str, port: int | str) -> list[str]:
    """A command line of one's own with ``{port}``, ``{model}`` and ``{name}`` filled in."""
    return [word.format(port=port, model=model, name=name) for word in words]


def engine_environment(key: str, *, captures: bool) -> dict[str, str]:
    """Variables that an engine process gets beside ours: the key that it asks for, and whether vllm-lens is on."""
    variables = {"STREAMTAP_WORKER_KEY": key, "VLLM_API_KEY": key}
    return variables if captures else variables | {"VLLM_LENS_DISABLE": "1"}


def _listening(name: str, port: int | str) -> list[str]:
    return ["--served-model-name", name, "--host", "127.0.0.1", "--port", str(port)]


def _given(options: dict[str, str | int | None]) -> list[str]:
    return [word for flag, value in options.items() if value is not None for word in (flag, str(value))]
