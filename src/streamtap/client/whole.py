"""A capture is whole or the answer is refused, whoever served it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streamtap.completion import Completion
from streamtap.errors import CaptureMissed


def check_capture(completion: Completion, body: Mapping[str, Any]) -> Completion:
    """The completion, if it has a row for every position that ``body`` asked to capture.

    That its layers are those that were asked for, and its values finite, was checked when they were read.

    Raises:
        CaptureMissed: it has not; ``layer`` is the first that it holds, since all lack the same.
    """
    if not body.get("output_residual_stream"):
        return completion
    if (found := completion.activations) is None or not found.acts:
        raise CaptureMissed("a capture was asked for, and the answer holds none.", layer=-1)
    rows, most = len(found.token_ids), _rows(completion, body.get("output_positions") or "all")
    # Numbered positions that the generation did not reach have no row.
    fits = rows == most if isinstance(body.get("output_positions") or "all", str) else rows <= most
    if not fits:
        usage = completion.usage
        raise CaptureMissed(
            f"the answer holds {rows} rows a layer; {usage.prompt_tokens} prompt tokens and {usage.completion_tokens} "
            f"generated in {len(completion.choices)} choices make {most}.",
            layer=found.layers[0],
        )
    return completion


def _rows(completion: Completion, positions: str | list[int]) -> int:
    usage, n_choices = completion.usage, len(completion.choices)
    if not isinstance(positions, str):
        return len(set(positions)) * n_choices
    # The last token of each choice is never fed back; with max_tokens 0 there is none.
    generated = max(0, usage.completion_tokens - n_choices)
    counts = {"last": n_choices, "prompt": usage.prompt_tokens, "generated": generated}
    return counts.get(positions, usage.prompt_tokens + generated)
