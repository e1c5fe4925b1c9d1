"""How many rows a capture may come to, and which positions it and steering vectors can have."""

from __future__ import annotations

from collections.abc import Sequence

from streamtap.completion import CaptureAsk, SteeringVector
from streamtap.errors import InvalidPositions


def fed_positions(prompt_tokens: int, max_tokens: int) -> int:
    """Positions that go through the model at most: the last token drawn is never fed back."""
    return prompt_tokens + max(0, max_tokens - 1)


def counted_positions(capture: CaptureAsk, prompt_tokens: int, max_tokens: int) -> int:
    """Rows a layer that ``capture`` may return for one prompt, which the cap counts."""
    if isinstance(capture.positions, tuple):
        return len(capture.positions)
    fed = fed_positions(prompt_tokens, max_tokens)
    return {"all": fed, "last": 1, "prompt": prompt_tokens, "generated": fed - prompt_tokens}[capture.positions]


def check_positions(capture: CaptureAsk, prompt_tokens: int, max_tokens: int) -> None:
    """Refuse positions that this prompt cannot come to.

    Raises:
        InvalidPositions: an index lies behind the last position that is fed.
    """
    fed = fed_positions(prompt_tokens, max_tokens)
    if isinstance(capture.positions, tuple) and max(capture.positions, default=0) >= fed:
        raise InvalidPositions(
            f"output_positions names position {max(capture.positions)}, but {prompt_tokens} prompt tokens and "
            f"max_tokens {max_tokens} give positions 0 to {fed - 1} (the last token drawn is never fed back)."
        )


def check_steered_positions(vectors: Sequence[SteeringVector], prompt_tokens: Sequence[int], max_tokens: int) -> None:
    """Refuse a vector for a position that none of the prompts can come to: it would steer nothing, silently.

    A span may end behind the last position.

    Raises:
        InvalidPositions: it names, or begins at, a position behind the last that is fed.
    """
    fed = fed_positions(max(prompt_tokens), max_tokens)
    for number, vector in enumerate(vectors):
        furthest = _furthest(vector)
        if furthest >= fed:
            raise InvalidPositions(
                f"steering vector {number} names position {furthest}, but {max(prompt_tokens)} prompt tokens and "
                f"max_tokens {max_tokens} give positions 0 to {fed - 1} (the last token drawn is never fed back)."
            )


def _furthest(vector: SteeringVector) -> int:
    if vector.spans is not None:
        return max((start for start, _ in vector.spans), default=0)
    if vector.positions is not None:
        return max(vector.positions, default=0)
    return vector.vectors.shape[1] - 1 if vector.vectors.ndim == 3 else 0
