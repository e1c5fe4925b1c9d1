"""``streamtap dev``: services of this machine to try things out with."""

from __future__ import annotations

import threading
from pathlib import Path

import click

from streamtap.cli.text import show


@click.group()
def dev() -> None:
    """Run a service of this machine to try things out with."""


@dev.command()
@click.option(
    "--dir",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    help="Folder of the repositories; it is made, and what is in it is served again the next time.",
)
@click.option("--port", type=click.IntRange(0, 65535), default=8990, show_default=True, help="0 takes a free port.")
@click.option("--token", default="hf_test", show_default=True, help="Whoever sends it may read and write everything.")
@click.option("--xet", is_flag=True, help="Take uploads by Xet also, from programs on this machine.")
def hub(folder: Path, port: int, token: str, xet: bool) -> None:
    """Run a small Hugging Face Hub on 127.0.0.1 until Ctrl-C.

    huggingface_hub and datasets use it once the variables that this prints are set. It keeps models, datasets and
    spaces, private ones too, with commits, branches and tags; it has no pull requests and no web pages. Large files
    come from a second, free port. Whoever is on this machine reaches it, so it is not a place for secrets.
    """
    from streamtap.testing.hub_server import HubServer

    with HubServer(folder, token=token, xet=xet, port=port) as server:
        show(
            [
                f"A Hub listens on {server.endpoint} and keeps its repositories in {server.folder}.",
                "Programs use it when their environment has these; a new shell does not:",
                "",
                f"  export HF_ENDPOINT={server.endpoint}",
                f"  export HF_TOKEN={token}",
                *([] if xet else ["  export HF_HUB_DISABLE_XET=1"]),
                "",
                "Ctrl-C stops it.",
            ]
        )
        _until_interrupted()
    show(["", "Stopped."])


def _until_interrupted() -> None:
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        return
