"""A progress bar for long runs, off in a pipe."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from streamtap.settings import Settings

Advance = Callable[[int], None]


def is_shown(console: Console, show: bool | None = None) -> bool:
    """Whether a bar is; None follows ``STREAMTAP_PROGRESS``."""
    wanted = Settings.from_environment().progress
    return show if show is not None else wanted == "on" or (wanted == "auto" and console.is_terminal)


@contextmanager
def progress_bar(
    what: str, total: int | None, *, show: bool | None = None, is_bytes: bool = False
) -> Iterator[Advance]:
    """A bar on stderr that counts to ``total``; the ``with`` gives the function that moves it on.

    ``total`` None is a bar without an end; ``is_bytes`` counts in kB, MB and GB. ``show`` None follows
    ``STREAMTAP_PROGRESS``, whose default shows it on a terminal only.
    """
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn() if is_bytes else MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not is_shown(console, show)) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.advance(task, done)
