"""What may not stand in a model's ``arguments``: what has a key of its own, and what makes rows wrong."""

from __future__ import annotations

from collections.abc import Iterator

from streamtap.engines.vllm_flags import NO_TRUE_ROWS, flag_of, option_of
from streamtap.server.config import ModelConfig

#: Options of either engine by the key that sets them.
_KEYS = {
    "model": "checkpoint",
    "served_model_name": "name",
    "revision": "revision",
    "dtype": "dtype",
    "max_model_len": "max_model_len",
}
_WORKER_KEYS = _KEYS | {"device": "device", "max_batch_tokens": "max_batch_tokens"}
_VLLM_KEYS = _KEYS | {
    "tensor_parallel_size": "tensor_parallel_size",
    "pipeline_parallel_size": "pipeline_parallel_size",
    "distributed_executor_backend": "distributed_executor",
    "enable_sleep_mode": "park",
}
#: What the gateway tells each engine that it starts.
_OURS = ("host", "port", "uds", "api_key")
_NO_TRUE_ROWS = NO_TRUE_ROWS | {
    "disable_log_stats": "its metrics tell of requests that were interrupted, whose rows are wrong"
}


def argument_faults(model: ModelConfig) -> Iterator[str]:
    """What is wrong with the ``arguments`` of a model that is started here."""
    for word in model.arguments:
        if not model.command:
            yield from _set_elsewhere(word, _VLLM_KEYS if model.engine == "vllm" else _WORKER_KEYS)
        if model.engine == "vllm":
            yield from _wrong_for_vllm(word, captures=model.activations)


def _set_elsewhere(word: str, keys: dict[str, str]) -> Iterator[str]:
    if option := option_of(word, keys):
        yield f"{flag_of(option)} has a key of its own, which the gateway reads, too; remove it and set {keys[option]}"
    if option := option_of(word, _OURS):
        yield f"{flag_of(option)} is set by the gateway; remove it"


def _wrong_for_vllm(word: str, *, captures: bool) -> Iterator[str]:
    if option_of(word, ["config"]):
        yield "--config names a file of flags, which are not looked at there; write them here instead"
    if captures and (option := option_of(word, _NO_TRUE_ROWS)):
        yield (
            f"{flag_of(option)} is not taken of a model that captures: {_NO_TRUE_ROWS[option]}; remove it, or set "
            "activations = false"
        )
