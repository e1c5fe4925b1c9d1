"""What shapes the captures of an answer must declare, so that none passes that is not whole."""

from __future__ import annotations

from collections.abc import Sequence

from streamtap.completion import CaptureAsk, Usage
from streamtap.errors import CaptureMissed
from streamtap.server.checks import Plan
from streamtap.wire.counted import fed_positions

Shape = tuple[int, int, int]


class ExpectedRows:
    """Holds the envelopes of one answer, in order, against what was asked and what the engine says it ran."""

    def __init__(self, plan: Plan, capture: CaptureAsk) -> None:
        self._capture = capture
        self._prompts = plan.prompt_tokens
        self._max_tokens = plan.request.max_tokens
        self._hidden = plan.served.facts.hidden
        self._checked = 0

    def so_far(self, shapes: Sequence[Shape], usage: Usage | None) -> None:
        """Check the envelopes that came since the last call; nothing is checked before usage is known.

        Raises:
            CaptureMissed: a shape that cannot be that of a whole capture.
        """
        if usage is None:
            return
        for index in range(self._checked, len(shapes)):
            self._check(index, shapes[index], usage)
        self._checked = len(shapes)

    def whole(self, shapes: Sequence[Shape], usage: Usage | None) -> None:
        """Check that no envelope is missing, now that the answer is over.

        Raises:
            CaptureMissed: one is, or has another shape.
        """
        if usage is None:
            self._miss("the engine's answer does not say how many tokens it ran")
        self.so_far(shapes, usage)
        if len(shapes) != len(self._prompts):
            self._miss(f"the engine's answer holds {len(shapes)} captures for {len(self._prompts)} prompts")
        if self._capture.positions == "all" and usage is not None:
            self._check_total(sum(shape[1] for shape in shapes), usage)

    def layers(self, told: Sequence[tuple[int, ...] | None]) -> None:
        """Check the lists of layers, where the engine sent any.

        Raises:
            CaptureMissed: other layers than those asked for.
        """
        for layers in told:
            if layers is not None and layers != self._capture.layers:
                self._miss(f"the engine captured layers {list(layers)}; asked were {list(self._capture.layers)}")

    def _check(self, index: int, shape: Shape, usage: Usage) -> None:
        if index >= len(self._prompts):
            self._miss(f"the engine's answer holds more captures than the {len(self._prompts)} prompts")
        least, most = self._rows(index, usage)
        layers, rows, hidden = shape
        if layers != len(self._capture.layers) or hidden != self._hidden or not least <= rows <= most:
            wanted = f"{least}" if least == most else f"{least} to {most}"
            self._miss(
                f"the engine declared a capture of shape {list(shape)} for prompt {index}; expected "
                f"[{len(self._capture.layers)}, {wanted}, {self._hidden}]"
            )

    def _rows(self, index: int, usage: Usage) -> tuple[int, int]:
        """Fewest and most rows of a prompt's capture; usage fixes them where there is one prompt."""
        if len(self._prompts) == 1:
            prompt, fed = usage.prompt_tokens, fed_positions(usage.prompt_tokens, usage.completion_tokens)
            return self._chosen(prompt, fed), self._chosen(prompt, fed)
        prompt = self._prompts[index]
        return self._chosen(prompt, prompt), self._chosen(prompt, fed_positions(prompt, self._max_tokens))

    def _chosen(self, prompt: int, fed: int) -> int:
        positions = self._capture.positions
        if isinstance(positions, tuple):
            return sum(position < fed for position in positions)
        return {"all": fed, "last": 1, "prompt": prompt, "generated": fed - prompt}[positions]

    def _check_total(self, rows: int, usage: Usage) -> None:
        texts = min(len(self._prompts), usage.completion_tokens)
        expected = usage.prompt_tokens + usage.completion_tokens - texts
        if rows != expected:
            self._miss(
                f"the engine's captures hold {rows} positions in all; its usage says {expected} went through the model"
            )

    def _miss(self, what: str) -> None:
        raise CaptureMissed(f"{what}; nothing of it is passed on as data.", layer=self._capture.layers[0])
