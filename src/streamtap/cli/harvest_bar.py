"""The bar of a harvest: how far it is, how fast, and how long it will take."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from streamtap.cli.text import counted
from streamtap.workbench.progress import is_shown

if TYPE_CHECKING:
    from streamtap.harvest.rows_done import RunProgress


class HarvestBar:
    """``tell`` moves it on, from any thread; ``n_rows`` and ``max_tokens`` are what the run ends at, if known."""

    def __init__(self, bar: Progress, n_rows: int | None, max_tokens: int | None) -> None:
        self._bar, self._n_rows, self._max_tokens = bar, n_rows, max_tokens
        self._began = self._ran_from = time.monotonic()
        self._found = 0.0
        self._task: TaskID = bar.add_task("harvesting", total=1 if n_rows or max_tokens else None, said="")
        self.last: RunProgress | None = None

    def tell(self, progress: RunProgress) -> None:
        """That much is whole."""
        fraction = self._fraction(progress)
        if progress.tokens_found > (self.last.tokens_found if self.last else 0):
            # What was there already took no time, and says nothing of what is left.
            self._found, self._ran_from = fraction, time.monotonic()
        self.last = progress
        said = (
            f"{counted(progress.prompts_done, 'prompt')}, {self.tokens_per_second:.0f} tokens/s{self._left(fraction)}"
        )
        self._bar.update(self._task, completed=fraction, said=said)

    @property
    def tokens_run(self) -> int:
        """Tokens that ran since it began, and not before."""
        return 0 if self.last is None else self.last.tokens_done - self.last.tokens_found

    @property
    def tokens_found(self) -> int:
        """Tokens that were whole when it began."""
        return 0 if self.last is None else self.last.tokens_found

    @property
    def rows_done(self) -> int:
        """Rows of the input, the first so many, that are in whole shards."""
        return 0 if self.last is None else self.last.rows_done

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self._began

    @property
    def tokens_per_second(self) -> float:
        """Of the tokens that ran."""
        return self.tokens_run / max(self.seconds, 1e-9)

    def _left(self, fraction: float) -> str:
        if not self._found < fraction < 1:
            return ""
        seconds = (time.monotonic() - self._ran_from) * (1 - fraction) / (fraction - self._found)
        return f", {timedelta(seconds=round(seconds))} left"

    def _fraction(self, progress: RunProgress) -> float:
        rows = progress.rows_done / self._n_rows if self._n_rows else 0
        tokens = progress.tokens_done / self._max_tokens if self._max_tokens else 0
        return max(rows, tokens)


@contextmanager
def harvest_bar(n_rows: int | None, max_tokens: int | None) -> Iterator[HarvestBar]:
    """A bar on stderr, on a terminal only unless the settings say otherwise."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[said]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, disable=not is_shown(console)) as bar:
        yield HarvestBar(bar, n_rows, max_tokens)
