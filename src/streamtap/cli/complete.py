"""``streamtap complete``: a text's continuation from a server or from a model here, with rows and steering."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from streamtap.cli.notice import announce_unpacking
from streamtap.cli.options import with_options
from streamtap.cli.text import counted
from streamtap.errors import InvalidInput

if TYPE_CHECKING:
    from streamtap.completion import Completion

_DEFAULT_TOKENS = 64
_LAYER_LIST = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*", re.ASCII)
#: A list of numbers needs no model to be understood; the server says how many layers there are.
_MOST_LAYERS = 100_000

_WHERE = (
    click.option("--model", help="The server's id of a model; else its default one."),
    click.option("--api-base", help="The server, such as http://127.0.0.1:8000/v1; else what the environment says."),
    click.option("--local", metavar="MODEL", help="No server: run 'demo', a folder or a Hub id in this process."),
    click.option("--stream", is_flag=True, help="Write the text as it is made."),
)
_SAMPLING = (
    click.option("--max-tokens", type=click.IntRange(min=0), help="New tokens; else 64, or 1 with --out."),
    click.option("--temperature", type=click.FloatRange(min=0), help="0 takes the likeliest token each time."),
    click.option("--seed", type=click.IntRange(min=0), help="Draw the same tokens again."),
    click.option("--stop", multiple=True, help="Stop before this text; may be given again."),
)
_ROWS = (
    click.option("--layers", help="Capture these layers: all, or 8,16,20-24. Needs --out; without it --out takes all."),
    click.option(
        "--positions",
        type=click.Choice(("all", "last", "prompt", "generated")),
        default="all",
        show_default=True,
        help="Which tokens have a row.",
    ),
    click.option("--out", type=click.Path(path_type=Path), help="Write rows and token ids to .safetensors or .npz."),
    click.option("--overwrite", is_flag=True, help="With --out: replace the file."),
)
_STEERING = (
    click.option("--steer", type=click.Path(path_type=Path), help="A direction [hidden] in an .npy file, to be added."),
    click.option("--layer", type=click.IntRange(min=0), help="With --steer: the layer to whose output it is added."),
    click.option("--scale", type=float, default=1.0, show_default=True, help="With --steer: times this much."),
    click.option("--norm-match", is_flag=True, help="With --steer: in units of each row's own length."),
)


@click.command()
@click.argument("text")
@with_options(_WHERE, _SAMPLING, _ROWS, _STEERING)
def complete(
    text: str,
    stream: bool,
    layers: str | None,
    positions: str,
    out: Path | None,
    overwrite: bool,
    **asked: Any,
) -> None:
    """Complete TEXT and write what the model says; - reads TEXT from standard input, as it is.

    The server and its key come from STREAMTAP_API_BASE and STREAMTAP_API_KEY, or from ACS_API_BASE and ACS_API_KEY.
    With --out, the rows of the residual stream go to a file, and with --steer a direction is added to it.
    """
    if layers is not None and out is None:
        raise click.UsageError("--layers needs --out, the file for the rows.")
    if stream and out is not None:
        raise click.UsageError("--stream cannot be had with --out: rows come when the text is whole.")
    if out is not None:
        _check_file(out, overwrite)
    prompt = sys.stdin.read() if text == "-" else text
    capture = None if out is None else _layers(layers or "all")
    with _asking(asked, capture, positions) as (server, options):
        if stream:
            for delta in server.stream(prompt, **options):
                click.echo(delta.text, nl=False)
            click.echo()
            return
        completion = server.complete(prompt, **options)
    click.echo(completion.text)
    if out is not None:
        _write(completion, out)


@contextmanager
def _asking(asked: dict[str, Any], capture: bool | list[int] | None, positions: str) -> Iterator[tuple[Any, Any]]:
    """A client, or an engine in its place, and what it is to be asked, by its own names."""
    sampling = {name: asked[name] for name in ("temperature", "seed") if asked[name] is not None}
    sampling["max_tokens"] = asked["max_tokens"] if asked["max_tokens"] is not None else _tokens(capture)
    vectors = _vectors(asked)
    if asked["local"] is not None:
        from streamtap.engines.opening import load_engine

        if asked["api_base"] or asked["model"]:
            raise click.UsageError("--local runs a model here; --api-base and --model are for a server.")
        announce_unpacking(asked["local"])
        rows = {"capture": capture, "positions": positions}
        with closing(load_engine(asked["local"])) as engine:
            yield engine, {**sampling, **rows, "steer": vectors, "stop": asked["stop"]}
        return
    with _client(asked["api_base"]) as client:
        rows = {"output_residual_stream": capture, "output_positions": None if positions == "all" else positions}
        steering = {"apply_steering_vectors": vectors or None, "stop": list(asked["stop"]) or None}
        yield client, {**sampling, **rows, **steering, "model": asked["model"]}


def _client(api_base: str | None) -> Any:
    from streamtap.client.sync import Client
    from streamtap.settings import Settings

    if not (api_base or Settings.from_environment().api_base):
        raise click.UsageError(
            "no server was named: give --api-base or set STREAMTAP_API_BASE (or ACS_API_BASE) to an address such as "
            "http://127.0.0.1:8000/v1, or run a model here with --local demo."
        )
    return Client(api_base)


def _tokens(capture: bool | list[int] | None) -> int:
    return _DEFAULT_TOKENS if capture is None else 1


def _layers(text: str) -> bool | list[int]:
    from streamtap.layers import resolve_layers

    plain = text.replace(" ", "")
    if plain == "all":
        return True
    if not _LAYER_LIST.fullmatch(plain):
        raise click.UsageError(f"--layers must be all, or numbers and ranges such as 8,16,20-24; got {text!r}.")
    return list(resolve_layers(plain, _MOST_LAYERS))


def _vectors(asked: dict[str, Any]) -> list[dict[str, Any]]:
    import numpy as np

    from streamtap.client.steering import steering_vector

    file, layer = asked["steer"], asked["layer"]
    if file is None:
        if layer is not None or asked["norm_match"]:
            raise click.UsageError("--layer and --norm-match need --steer, the file of a direction.")
        return []
    if layer is None:
        raise click.UsageError("--steer needs --layer, the layer to whose output the direction is added.")
    try:
        direction = np.load(file, allow_pickle=False)
    except OSError as error:
        raise InvalidInput(f"--steer needs an .npy file; {file} cannot be read ({error.strerror}).") from error
    except (EOFError, ValueError) as error:
        raise click.UsageError(f"{file} is not an .npy file of numbers.") from error
    return [steering_vector(direction, layer, asked["scale"], norm_match=asked["norm_match"])]


def _check_file(out: Path, overwrite: bool) -> None:
    if out.suffix not in (".safetensors", ".npz"):
        raise click.UsageError(f"--out must end in .safetensors or .npz; got {out.name!r}.")
    if not out.parent.is_dir():
        raise click.UsageError(f"--out: there is no folder {out.parent}.")
    if out.exists() and not overwrite:
        raise click.UsageError(f"{out} is there already; name another file, or add --overwrite.")


def _write(completion: Completion, out: Path) -> None:
    from streamtap.workbench.export import write_rows

    rows = completion.activations
    assert rows is not None  # it was asked for, and a capture is whole or an error
    write_rows(rows, out)
    shape = f"{counted(len(rows.layers), 'layer')} of {counted(len(rows.token_ids), 'row')}"
    click.echo(f"wrote {shape} to {out}", err=True)
