"""``streamtap check-config``: what the service would do with a configuration; nothing is started or fetched."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from streamtap.cli.text import show
from streamtap.settings import Settings


@click.command("check-config")
@click.argument("file", required=False, type=click.Path(path_type=Path))
@click.option(
    "--config", "config_file", type=click.Path(path_type=Path), help="The same, as `streamtap serve` takes it."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def check_config(file: Path | None, config_file: Path | None, as_json: bool) -> None:
    """Say what `streamtap serve` would do with FILE (else ./streamtap.toml, else the defaults)."""
    from streamtap.server.toml.config_file import find_config, read_config

    path = find_config(file or config_file)
    told = described(read_config(path), path, Settings.from_environment())
    show([json.dumps(told, indent=2)] if as_json else _lines(told))


def described(config: Any, path: Path | None, settings: Settings) -> dict[str, Any]:
    """Everything that the command prints, as plain JSON values; no password is among them."""
    from streamtap.server.toml.masked import masked_url

    return {
        "file": None if path is None else str(path),
        "address": f"http://{config.host}:{config.port}/v1",
        "data_dir": str(config.data_dir.absolute()),
        "database": masked_url(config.database_url),
        "engines": config.engines,
        "max_engines": config.max_engines,
        "default_model": config.default.id,
        "models": [_model(config, model, settings) for model in config.models],
        "limits": asdict(config.limits),
        "timing": asdict(config.timing),
        "harvest": {**asdict(config.harvest), "store": config.harvest_root},
    }


def _model(config: Any, model: Any, settings: Settings) -> dict[str, Any]:
    from streamtap.server.models.facts import facts_of, waits_for

    waits = waits_for(model, settings)
    facts = None if waits else facts_of(model, settings, exact=False)
    return {
        "id": model.id,
        "checkpoint": model.checkpoint,
        "name": model.served_name,
        "engine": model.engine,
        "size": model.size,
        "idle_seconds": model.idle_seconds,
        "park": model.park,
        "self_check": model.self_check,
        "max_activation_prompt_tokens": model.max_activation_prompt_tokens if model.activations else None,
        "n_layers": facts and facts.n_layers,
        "hidden_size": facts and facts.hidden,
        "max_model_len": facts and facts.max_model_len,
        "vocabulary": facts and facts.vocabulary,
        "dtype": facts and facts.dtype,
        "tokenizer": str(facts.tokenizer_file) if facts and facts.tokenizer_file else None,
        "not_yet": waits,
        "engines": {role: _engine(config, model, role) for role in config.roles(model)},
    }


def _engine(config: Any, model: Any, role: Any) -> dict[str, str]:
    from streamtap.server.pool.command_line import command_of
    from streamtap.server.pool.launching import address_of, log_path
    from streamtap.server.toml.masked import masked_url

    if model.engine == "url":
        return {"url": masked_url(address_of(model, role))}
    log = str(log_path(config, model.id, role).absolute())
    return {"command": shlex.join(command_of(model, "PORT", role)), "log": log}


def _lines(told: dict[str, Any]) -> Iterator[str]:
    yield f"{told['file'] or 'no configuration file: every default'}"
    yield ""
    names = {"address": "address", "database": "database", "data_dir": "data folder", "default_model": "default model"}
    for key, name in names.items():
        yield f"  {name:<14} {told[key]}"
    apart = "one for completions, one for activations" if told["engines"] == "separate" else "one for both"
    yield f"  {'engines':<14} {apart}; at most {told['max_engines']} processes at a time"
    for model in told["models"]:
        yield from _model_lines(model)
    for table in ("limits", "timing", "harvest"):
        yield from ("", table)
        yield from (f"  {key:<28} {_number(value)}" for key, value in told[table].items())


def _model_lines(model: dict[str, Any]) -> Iterator[str]:
    yield from ("", f"model {model['id']}")
    called = "" if model["name"] == model["checkpoint"] else f" (answers call it {model['name']})"
    yield f"  {'checkpoint':<14} {model['checkpoint']}{called}"
    if model["not_yet"]:
        yield f"  {'facts':<14} {model['not_yet']}"
    else:
        yield f"  {'facts':<14} {_facts(model)}"
        yield f"  {'tokenizer':<14} {model['tokenizer'] or 'none: prompts have to be token ids'}"
    cap = model["max_activation_prompt_tokens"]
    yield f"  {'capture':<14} {f'up to {cap} positions of every layer' if cap else 'no'}"
    yield f"  {'when idle':<14} {_idle(model)}"
    if model["self_check"]:
        yield f"  {'self-check':<14} at each start, against the plain model in float32"
    for role, engine in model["engines"].items():
        if "url" in engine:
            yield f"  {role:<14} runs at {engine['url']}"
        else:
            yield f"  {role:<14} {engine['command']}"
            yield f"  {'':<14} writes {engine['log']}"


def _facts(model: dict[str, Any]) -> str:
    return (
        f"{model['n_layers']} layers of {model['hidden_size']}, context {model['max_model_len']} tokens, "
        f"vocabulary {model['vocabulary']}, {model['dtype'] or 'dtype as the engine decides'}"
    )


def _idle(model: dict[str, Any]) -> str:
    if model["engine"] == "url":
        return "is not stopped from here"
    seconds = model["idle_seconds"]
    if not seconds:
        return "never stops"
    return (
        f"sleeps after {seconds:g} s, while the host has the memory" if model["park"] else f"stops after {seconds:g} s"
    )


def _number(value: float) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
