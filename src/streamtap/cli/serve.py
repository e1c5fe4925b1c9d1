"""``streamtap serve``: the service, until it is told to stop."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from streamtap.cli.text import show
from streamtap.errors import InvalidInput, MissingExtra

if TYPE_CHECKING:
    from streamtap.server.config import ModelConfig
    from streamtap.server.running import Started


@click.command()
@click.option(
    "--config",
    "config_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="What is served and to whom how much; by default streamtap.toml here, else the demo model.",
)
@click.option("--host", help="Address to listen on.  [default: 127.0.0.1]")
@click.option("--port", type=click.IntRange(0, 65535), help="0 takes a free port.  [default: 8000]")
@click.option(
    "--data-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of the database and the engines' logs.  [default: streamtap-data]",
)
@click.option(
    "--model", "checkpoints", multiple=True, metavar="CHECKPOINT", help="Serve this instead; may be given again."
)
@click.option("--as", "ids", multiple=True, metavar="ID", help="What clients call the --model at the same place.")
def serve(
    config_file: Path | None,
    host: str | None,
    port: int | None,
    data_dir: Path | None,
    checkpoints: tuple[str, ...],
    ids: tuple[str, ...],
) -> None:
    """Serve completions with activation capture and steering, until Ctrl-C.

    Engines start when a request needs them and stop when idle. The first start prints a key, once.
    """
    try:
        from streamtap.server.running import serve as run
        from streamtap.server.toml.config_file import find_config, read_config
    except ModuleNotFoundError as error:
        raise MissingExtra("the service needs its libraries: pip install 'streamtap[serve,local]'.") from error
    models = _models(checkpoints, ids)
    config = read_config(find_config(config_file), host=host, port=port, data_dir=data_dir, models=models)
    run(config, say=lambda message: show([message]), started=_show)
    show(["Stopped."])


def _models(checkpoints: tuple[str, ...], ids: tuple[str, ...]) -> tuple[ModelConfig, ...] | None:
    from streamtap.server.config import ModelConfig

    if len(ids) > len(checkpoints):
        raise InvalidInput(
            f"--as was given {len(ids)} times and --model {len(checkpoints)} times; each --as names a --model."
        )
    if not checkpoints:
        return None
    names = [*ids, *(_short(checkpoint) for checkpoint in checkpoints[len(ids) :])]
    return tuple(
        ModelConfig(id=name, checkpoint=checkpoint) for name, checkpoint in zip(names, checkpoints, strict=True)
    )


def _short(checkpoint: str) -> str:
    return Path(checkpoint).name


def _show(started: Started) -> None:
    ids = ", ".join(model.id for model in started.config.models)
    lines = [f"Serving {ids} at {started.base_url}", ""]
    if started.first_key is not None:
        lines += ["This is your first key; it is shown once and kept as a hash:", ""]
    key = started.first_key or "…"
    lines += [f"  export ACS_API_BASE={started.base_url}", f"  export ACS_API_KEY={key}", ""]
    if started.first_key is None:
        lines += ["`streamtap keys create --name NAME` makes a key.", ""]
    show([*lines, "Ctrl-C stops it."])
