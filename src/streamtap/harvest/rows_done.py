"""How far a run has come in its input, counted in rows, where nobody knows how many prompts they will make."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from streamtap.harvest.plan import Tokenised
from streamtap.harvest.standing import Progress


@dataclass(frozen=True)
class RunProgress(Progress):
    """Also ``rows_done``: how many rows of the input, the first so many, are in whole shards."""

    rows_done: int = 0


class RowsDone:
    """The same prompts, gone through once; it remembers which row of the input those on their way came from."""

    def __init__(self, prompts: Iterable[Tokenised]) -> None:
        self._prompts = prompts
        self._passed: deque[int] = deque()
        self._n_prompts = self._rows = 0

    def __iter__(self) -> Iterator[Tokenised]:
        """Each prompt."""
        for index, each in enumerate(self._prompts):
            row = index if each.segments is None else int(each.segments.documents[-1])
            self._passed.append(row)
            yield each

    def progress(self, progress: Progress) -> RunProgress:
        """With the rows that are done; called of one progress after the other."""
        while self._n_prompts < progress.prompts_done and self._passed:
            self._rows = self._passed.popleft() + 1
            self._n_prompts += 1
        return RunProgress(**vars(progress), rows_done=self._rows)
