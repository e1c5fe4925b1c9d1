"""Stop strings in a text that comes in pieces: nothing of a match is shown, and nothing else is withheld."""

from __future__ import annotations

from streamtap.errors import InvalidInput


class StopMatcher:
    """Looks for stop strings in one text, however it is cut.

    The stop string that is complete first, character by character, ends the text; of two that end at the same character
    the longer. Text is released up to the longest suffix that may yet become a stop string.

    Raises:
        InvalidInput: a stop string is empty.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        if "" in stops:
            raise InvalidInput("a stop string is empty; expected at least one character.")
        # The longest first: of two that match at once it begins earlier.
        self._patterns = [_Pattern(stop) for stop in sorted(set(stops), key=len, reverse=True)]
        self._held = ""
        self._matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """What is certain of ``text`` and what was held before, and the stop string once it has matched.

        After a match nothing is released any more.
        """
        if self._matched is not None:
            return "", self._matched
        if not self._patterns:
            return text, None
        whole = self._held + text
        for place, character in enumerate(text, len(self._held) + 1):
            self._matched = self._read(character)
            if self._matched is not None:
                self._held = ""
                return whole[: place - len(self._matched)], self._matched
        certain = len(whole) - max(pattern.reached for pattern in self._patterns)
        self._held = whole[certain:]
        return whole[:certain], None

    def end(self) -> str:
        """What was held back; the text is over."""
        held, self._held = self._held, ""
        return held

    def _read(self, character: str) -> str | None:
        complete = [pattern.stop for pattern in self._patterns if pattern.read(character)]
        return complete[0] if complete else None


class _Pattern:
    """One stop string and how much of it the text ends with (Knuth, Morris and Pratt)."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.reached = 0
        # borders[n]: the longest proper prefix of stop[:n] that also ends it; made only as far as the text has come.
        self._borders = [0, 0]

    def read(self, character: str) -> bool:
        """Whether ``character`` completes the stop string."""
        self.reached = self._after(self.reached, character)
        if self.reached == len(self._borders) and self.reached < len(self.stop):
            self._borders.append(self._after(self._borders[-1], self.stop[self.reached - 1]))
        return self.reached == len(self.stop)

    def _after(self, reached: int, character: str) -> int:
        while reached and self.stop[reached] != character:
            reached = self._borders[reached]
        return reached + 1 if self.stop[reached] == character else 0
