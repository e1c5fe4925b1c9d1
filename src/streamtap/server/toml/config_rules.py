"""What must hold between the values of a ``streamtap.toml`` that are right one by one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from string import Formatter
from urllib.parse import urlsplit

from streamtap.blobs import BlobStore
from streamtap.errors import InvalidInput
from streamtap.server.config import ModelConfig, ServerConfig
from streamtap.server.toml.argument_rules import argument_faults
from streamtap.server.toml.config_lines import KeyPath
from streamtap.server.toml.masked import masked_url

#: Where the fault stands, and what is wrong.
Fault = tuple[KeyPath, str]

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DATABASE = re.compile(r"(sqlite|postgresql)(\+\w+)?://")
_DTYPES = ("auto", "float32", "bfloat16", "float16")
_PLACEHOLDERS = {"port", "model", "name"}


def faults(config: ServerConfig) -> Iterator[Fault]:
    """What is wrong with ``config``, first things first."""
    ids = [model.id for model in config.models]
    for place, model in enumerate(config.models):
        for key, reason in _model_faults(model):
            yield ("models", place, key), reason
        if model.id in ids[:place]:
            first = ids.index(model.id) + 1
            yield ("models", place, "id"), f"{model.id!r} is the id of model {first} already; give each its own"
        if config.engines == "shared" and model.activations_url is not None:
            yield ("models", place, "activations_url"), "engines = 'shared' asks url for everything; remove one of them"
    if config.default_model is not None and config.default_model not in ids:
        yield ("default_model",), f"no model has the id {config.default_model!r}; there are {', '.join(ids)}"
    if config.database and not _DATABASE.match(config.database):
        expected = "'sqlite:///FILE' or 'postgresql+psycopg://USER:PASSWORD@HOST/NAME'"
        yield ("database",), f"expected {expected}, got {masked_url(config.database)!r}"
    if config.harvest.store is not None and "://" in config.harvest.store:
        yield from _store_faults(config.harvest.store)


def _store_faults(store: str) -> Iterator[Fault]:
    try:
        BlobStore(store)
    except InvalidInput as error:
        yield ("harvest", "store"), str(error).rstrip(".")


def _model_faults(model: ModelConfig) -> Iterator[tuple[str, str]]:
    if not _ID.fullmatch(model.id):
        yield "id", f"expected 1 to 64 of A-Z a-z 0-9 . _ - that begin with a letter or digit, got {model.id!r}"
    if model.dtype not in _DTYPES:
        yield "dtype", f"expected {', '.join(_DTYPES[:-1])} or {_DTYPES[-1]}, got {model.dtype!r}"
    yield from _file_faults(model)
    if model.self_check and not model.activations:
        yield "self_check", "it looks at captured rows, and activations = false has none; remove one of them"
    yield from _vllm_faults(model)
    yield from (_remote_faults(model) if model.engine == "url" else _process_faults(model))


def _file_faults(model: ModelConfig) -> Iterator[tuple[str, str]]:
    if model.tokenizer is not None and not (
        model.tokenizer.is_file() or (model.tokenizer / "tokenizer.json").is_file()
    ):
        yield "tokenizer", f"expected a tokenizer.json or a folder with one; there is none at {model.tokenizer}"
    if model.api_key_file is not None and not model.api_key_file.is_file():
        yield "api_key_file", f"expected a file that holds the engine's key; there is none at {model.api_key_file}"


def _remote_faults(model: ModelConfig) -> Iterator[tuple[str, str]]:
    if model.url is None:
        yield "engine", "engine 'url' needs url, the address of the running engine, such as 'http://10.0.0.5:8000'"
    for key in ("url", "activations_url"):
        address = getattr(model, key)
        if address is not None and not _is_address(address):
            yield key, f"expected http:// or https://, a host, and perhaps a port and path, got {masked_url(address)!r}"
        elif address is not None and "@" in urlsplit(address).netloc:
            yield key, "expected an address without user and password; put the engine's key in a file for api_key_file"
    if model.activations_url is not None and not model.activations:
        yield "activations_url", "activations = false leaves no use for activations_url; remove one of them"
    for key in ("command", "arguments", "max_batch_tokens"):
        if getattr(model, key):
            yield key, "this is for engines that are started here; remove it, or remove engine = 'url'"


def _is_address(text: str) -> bool:
    """Whether requests can be sent there."""
    try:
        parts = urlsplit(text)
        has_host = bool(parts.hostname) and parts.port != 0
    except ValueError:  # of a port that is none, or half an IPv6 address
        return False
    is_plain = text.isascii() and not re.search(r"[\s?#]", text)
    return parts.scheme in ("http", "https") and has_host and is_plain


def _process_faults(model: ModelConfig) -> Iterator[tuple[str, str]]:
    for key in ("url", "activations_url", "api_key_file"):
        if getattr(model, key) is not None:
            yield key, "this is for engine = 'url'; remove it, or set engine to that"
    if model.command:
        yield from _command_faults(model)
    for reason in argument_faults(model):
        yield "arguments", reason
    if model.engine == "vllm" and model.device != "auto":
        yield "device", "vLLM chooses its device itself; remove device, or pass what it takes in arguments"
    if model.engine == "vllm" and model.max_batch_tokens is not None:
        yield "max_batch_tokens", "vLLM's own flag is --max-num-batched-tokens; pass it in arguments instead"


def _vllm_faults(model: ModelConfig) -> Iterator[tuple[str, str]]:
    if model.park and model.distributed_executor == "ray":
        yield "park", "an engine over Ray is never parked, since other machines have weights of it, too; remove park"
    for key in ("tensor_parallel_size", "pipeline_parallel_size", "distributed_executor", "park"):
        is_told = getattr(model, key) != getattr(ModelConfig, key)
        if is_told and (model.engine != "vllm" or model.command):
            yield key, "this is for engine = 'vllm' without a command of one's own; remove it, or set engine to that"


def _command_faults(model: ModelConfig) -> Iterator[tuple[str, str]]:
    try:
        named = {name for word in model.command for _, name, _, _ in Formatter().parse(word) if name is not None}
    except ValueError as error:
        yield "command", f"{error}; a brace that is meant as such is written twice, as {{{{ or }}}}"
        return
    if unknown := sorted(named - _PLACEHOLDERS):
        yield "command", f"unknown placeholder {{{unknown[0]}}}; there are {{port}}, {{model}} and {{name}}"
    elif "port" not in named:
        yield "command", "expected {port} in it, where the port goes that the engine is to listen on"
