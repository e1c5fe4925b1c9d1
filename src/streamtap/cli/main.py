"""``streamtap``: the group of commands, and the edge where every error becomes one sentence.

Exit codes: 0 done, 1 it failed, 2 what was asked for cannot be.
"""

from __future__ import annotations

import errno
import warnings
from importlib import import_module
from typing import Any

import click

import streamtap
from streamtap.errors import InvalidInput, StreamtapError, Unsupported

#: Where each command lives: the module's attribute of the command's name.
COMMANDS = {
    "cache": "streamtap.cli.cache",
    "complete": "streamtap.cli.complete",
    "check-config": "streamtap.cli.check_config",
    "dataset": "streamtap.cli.dataset",
    "demo": "streamtap.cli.demo",
    "dev": "streamtap.cli.dev",
    "doctor": "streamtap.cli.doctor",
    "extract": "streamtap.cli.extract",
    "harvest": "streamtap.cli.harvest",
    "keys": "streamtap.cli.keys",
    "serve": "streamtap.cli.serve",
}


class Commands(click.Group):
    """A group that imports a command when it is named, and reports errors without a traceback."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of the commands, in alphabetical order."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name, or None."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(import_module(COMMANDS[cmd_name]), cmd_name.replace("-", "_"))
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; what it raises becomes one sentence and an exit code, what it warns of one sentence."""
        try:
            with warnings.catch_warnings():
                warnings.showwarning = _show_warning
                return super().invoke(ctx)
        except (click.ClickException, click.Abort, click.exceptions.Exit):
            raise
        except Exception as error:
            if ctx.params.get("debug") or _is_closed_pipe(error):
                raise
            click.echo(f"error: {_sentence(error)}", err=True)
            ctx.exit(2 if isinstance(error, InvalidInput | Unsupported) else 1)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.version_option(streamtap.__version__, prog_name="streamtap")
def main(debug: bool) -> None:
    """Extract, cache, share and probe the residual stream of language models."""


def _show_warning(message: Warning | str, *_where: Any, **_how: Any) -> None:
    click.echo(f"warning: {' '.join(str(message).split())}", err=True)


def _sentence(error: Exception) -> str:
    if isinstance(error, StreamtapError):
        return " ".join(" ".join([str(error), *getattr(error, "__notes__", ())]).split())
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    # Not one of ours, so it is our fault; its message may hold a prompt, and is shown only when asked for.
    return f"unexpected {type(error).__name__}; run `streamtap --debug …` for the traceback and report it."


def _is_closed_pipe(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno == errno.EPIPE
