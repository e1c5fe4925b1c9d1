"""Command lines that start an engine process: our worker, or vLLM's server with vllm-lens."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from streamtap.engines.vllm_flags import option_of

#: A steered prompt's keys and values must not serve another request, and a vector for one position is right only where
#: a prompt runs in one piece.
_CAPTURING = ("--no-enable-prefix-caching", "--no-enable-chunked-prefill")
#: Options of vLLM that cut prompts, or may: a threshold does so without chunked prefill, too.
_CUTTING = ("enable_chunked_prefill", "long_prefill_token_threshold", "prefill_context_parallel_size", "scheduler_cls")


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


@dataclass(frozen=True)
class VllmOptions:
    """What ``vllm serve`` is told beside the model; None and 1 leave a flag out.

    ``distributed_executor`` is what starts the processes of several devices, ``"ray"`` those of several machines.
    ``captures`` is an engine for captures and steering; one that ``parks`` may be put to sleep.
    """

    revision: str | None = None
    dtype: str = "auto"
    max_model_len: int | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    distributed_executor: str | None = None
    captures: bool = True
    parks: bool = False


def vllm_command(model: str, *, name: str, port: int | str, options: VllmOptions) -> list[str]:
    """``vllm serve``, as it stands on the path."""
    given = {
        "--revision": options.revision,
        "--dtype": options.dtype,
        "--max-model-len": options.max_model_len,
        "--tensor-parallel-size": _of_several(options.tensor_parallel_size),
        "--pipeline-parallel-size": _of_several(options.pipeline_parallel_size),
        "--distributed-executor-backend": options.distributed_executor,
    }
    flags = [
        # How many log-probabilities a request may ask for is the gateway's to say.
        "--max-logprobs=-1",
        *(_CAPTURING if options.captures else ()),
        *(("--enable-sleep-mode",) if options.parks else ()),
    ]
    return ["vllm", "serve", model, *_listening(name, port), *_given(given), *flags]


def prefills_whole(arguments: Sequence[str]) -> bool:
    """Whether a ``vllm serve`` of ours that is given ``arguments`` beside its flags runs every prompt in one piece."""
    return not any(option_of(word, _CUTTING) for word in arguments)


def filled_command(words: Sequence[str], *, model: str, name: str, port: int | str) -> list[str]:
    """A command line of one's own with ``{port}``, ``{model}`` and ``{name}`` filled in."""
    return [word.format(port=port, model=model, name=name) for word in words]


def engine_environment(key: str, *, captures: bool, parks: bool = False) -> dict[str, str]:
    """Variables that an engine process gets beside ours.

    They are the key that it asks for, whether vllm-lens is on, and whether vLLM takes the calls that put it to sleep,
    with all its other development endpoints, none of which asks for the key.
    """
    variables = {"STREAMTAP_WORKER_KEY": key, "VLLM_API_KEY": key}
    if not captures:
        variables |= {"VLLM_LENS_DISABLE": "1"}
    return variables | {"VLLM_SERVER_DEV_MODE": "1"} if parks else variables


def _listening(name: str, port: int | str) -> list[str]:
    return ["--served-model-name", name, "--host", "127.0.0.1", "--port", str(port)]


def _of_several(devices: int) -> int | None:
    return devices if devices > 1 else None


def _given(options: dict[str, str | int | None]) -> list[str]:
    return [word for flag, value in options.items() if value is not None for word in (flag, str(value))]
