"""A capture is whole or the request fails: the second look at an engine's rows, before a byte of them is sent."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from streamtap.codec import is_finite
from streamtap.completion import CaptureAsk, CapturedPositions, Choice, CompletionRequest, Finished, Rows
from streamtap.errors import CaptureMissed, SteeringNotFinite


def check_whole(request: CompletionRequest, finished: Finished, *, hidden: int) -> None:
    """Check every choice's rows: all layers, all positions, ``hidden`` wide, of the asked dtype, finite.

    Raises:
        CaptureMissed: something is missing or not finite; the layer is named.
        SteeringNotFinite: a value is not finite, and the request steers.
    """
    ask = request.capture
    if ask is None:
        return
    wanted = len(request.prompts) * request.n
    if len(finished.choices) != wanted:
        raise _missed(ask, f"{len(finished.choices)} of {wanted} choices came back", ask.layers[0])
    for choice in finished.choices:
        _check_shape(ask, choice, hidden)
    for choice in finished.choices:
        if choice.rows is not None:
            _check_finite(choice.rows, choice.index, steered=bool(request.steering))


def expected_positions(asked: CapturedPositions, n_prompt: int, n_new: int) -> NDArray[np.int32]:
    """The positions, int32 ascending, that must have a row; the last of ``n_new`` tokens was never fed back."""
    places = np.arange(n_prompt + max(0, n_new - 1), dtype=np.int32)
    if asked == "all":
        return places
    if asked == "last":
        return places[-1:]
    if asked == "prompt":
        return places[:n_prompt]
    if asked == "generated":
        return places[n_prompt:]
    return places[np.isin(places, np.array(asked, np.int64))]


def _check_shape(ask: CaptureAsk, choice: Choice, hidden: int) -> None:
    rows = choice.rows
    if rows is None:
        raise _missed(ask, f"choice {choice.index} has no rows", ask.layers[0])
    if rows.layers != ask.layers or len(rows.values) != len(ask.layers):
        came = set(rows.layers[: len(rows.values)])
        lacking = next((layer for layer in ask.layers if layer not in came), ask.layers[0])
        raise _missed(ask, f"choice {choice.index} lacks layer {lacking}", lacking)
    places = expected_positions(ask.positions, len(choice.prompt_ids), len(choice.token_ids))
    if rows.values.shape[1:] != (len(places), hidden):
        raise _missed(
            ask,
            f"choice {choice.index} has rows of shape {list(rows.values.shape[1:])} from layer {ask.layers[0]} on; "
            f"expected {[len(places), hidden]}",
            ask.layers[0],
        )
    if rows.values.dtype.name != ask.dtype:
        raise _missed(ask, f"rows came as {rows.values.dtype.name}; expected {ask.dtype}", ask.layers[0])
    tokens = np.array([*choice.prompt_ids, *choice.token_ids], np.int32)[places]
    if not np.array_equal(rows.positions, places) or not np.array_equal(rows.token_ids, tokens):
        raise _missed(ask, f"choice {choice.index} has rows of other positions or tokens", ask.layers[0])


def _check_finite(rows: Rows, choice: int, *, steered: bool) -> None:
    for layer, values in zip(rows.layers, rows.values, strict=True):
        if is_finite(values):
            continue
        if steered:
            raise SteeringNotFinite(
                f"the steering vectors drove layer {layer} of choice {choice} out of the range of its dtype; "
                "use a smaller scale."
            )
        raise CaptureMissed(f"layer {layer} of choice {choice} holds a value that is not finite.", layer=layer)


def _missed(ask: CaptureAsk, what: str, layer: int) -> CaptureMissed:
    return CaptureMissed(f"the capture of {len(ask.layers)} layers is not whole: {what}.", layer=layer)
