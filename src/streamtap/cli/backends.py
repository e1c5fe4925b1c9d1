"""The options of commands that may run their model elsewhere: ``--backend`` and what goes with it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import click

#: As ``engines.opening.BACKENDS`` has them, which is not imported to show a help text.
BACKENDS = ("local", "nnsight", "vllm", "api")
#: What has no place on a command line, which others on the machine see.
_ELSEWHERE = {
    "api_key": "STREAMTAP_API_KEY in the environment",
    "client": "load_engine in Python",
    "reference": "load_engine in Python",
}


def with_own_options(asked: Mapping[str, Any]) -> dict[str, Any]:
    """``asked`` with what loading has by itself, and the command has not, taken out of ``engine_options``."""
    from streamtap.workbench.load_options import OWN_OPTIONS

    given = asked["engine_options"]
    own = {name: given[name] for name in given if name in OWN_OPTIONS}
    return {**asked, **own, "engine_options": {name: given[name] for name in given if name not in own}}


def _pairs(ctx: click.Context, _parameter: click.Parameter, given: Sequence[str]) -> dict[str, Any]:
    """``NAME=VALUE`` to a mapping; a value that is JSON is what it says, any other is text."""
    found: dict[str, Any] = {}
    for each in given:
        name, equals, text = each.partition("=")
        if not name or not equals:
            raise click.BadParameter(f"NAME=VALUE was expected; got {each!r}.")
        if place := _ELSEWHERE.get(name) or _option_of(ctx.command, name):
            raise click.BadParameter(f"{name} goes with {place}.")
        if name in found:
            raise click.BadParameter(f"{name} is given twice.")
        found[name] = _value(text)
    return found


def _option_of(command: click.Command, name: str) -> str | None:
    """The command's own option for what loading calls ``name``; beside ``--model-dtype`` a ``--dtype`` is of files."""
    from streamtap.workbench.load_options import OWN_OPTIONS

    options = {str(each.name): each.opts[0] for each in command.params}
    return options.get(f"model_{name}", options.get(name)) if name in OWN_OPTIONS else None


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


BACKEND_OPTIONS = (
    click.option(
        "--backend",
        type=click.Choice(BACKENDS),
        default="local",
        show_default=True,
        help="What runs the model; api is a service, whose id --model then is.",
    ),
    click.option("--remote", is_flag=True, help="With --backend nnsight: on NDIF, with NDIF_API_KEY."),
    click.option("--api-base", help="With --backend api: its address; the key comes from STREAMTAP_API_KEY."),
    click.option(
        "--engine-option",
        "engine_options",
        multiple=True,
        metavar="NAME=VALUE",
        callback=_pairs,
        help="One more of the backend's own, such as tensor_parallel_size=4 of vllm; may be repeated.",
    ),
)
