"""What a person is told while nothing else moves, on stderr."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import click
from rich.console import Console

from streamtap.settings import Settings


def announce_unpacking(model: str) -> None:
    """Say so where naming ``model`` dequantises the demo model first.

    Raises:
        InvalidInput: the demo model's file is not here; the message says how to get it.
    """
    if model == "demo" and unpacks_demo_model(Settings.from_environment()):
        click.echo("dequantising the demo model once (about half a minute)", err=True)


def unpacks_demo_model(settings: Settings) -> bool:
    """Whether the next use of the demo model dequantises it first.

    Raises:
        InvalidInput: its file is not here; the message says how to get it.
    """
    from streamtap.engines import demo_model

    if demo_model.is_unpacked(settings):
        return False
    demo_model.find_gguf(settings)
    return True


def waiting(what: str) -> AbstractContextManager[Any]:
    """A spinner while the ``with`` lasts, on a terminal only."""
    return Console(stderr=True).status(what)
