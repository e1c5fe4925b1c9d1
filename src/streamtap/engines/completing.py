"""Completions as one call: submit, wait, and put text and rows together."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from streamtap.activations import Activations, Provenance
from streamtap.completion import (
    CaptureAsk,
    CapturedPositions,
    Choice,
    Completion,
    CompletionRequest,
    Delta,
    Event,
    Failed,
    Finished,
    Sampling,
    SteeringVector,
    WireDtype,
)
from streamtap.engines.base import Completes
from streamtap.errors import InvalidInput
from streamtap.layers import LayerSpec, resolve_layers
from streamtap.ragged import offsets_of
from streamtap.wire.steering import read_vector

PromptsLike = str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]]
Steer = SteeringVector | Mapping[str, Any]
_MOST_TOKENS = 32_000


def request_of(
    engine: Completes,
    prompt: PromptsLike,
    *,
    max_tokens: int | None = None,
    capture: LayerSpec | bool | None = None,
    positions: CapturedPositions | Sequence[int] = "all",
    output_dtype: WireDtype | None = None,
    steer: Sequence[Steer] = (),
    n: int = 1,
    stop: str | Sequence[str] = (),
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    echo: bool = False,
    add_special_tokens: bool = True,
    **sampling: Any,
) -> CompletionRequest:
    """The request that ``TransformersEngine.complete`` runs; see there.

    Raises:
        InvalidInput: a value that means nothing.
    """
    prompts, about = _prompts(prompt), engine.provenance
    if isinstance(steer, SteeringVector | Mapping):
        raise InvalidInput("steer takes a list of steering vectors; got one by itself.")
    vectors = [_vector(item, about) for item in steer]
    ask = None
    if capture is not None and capture is not False:
        layers = resolve_layers("all" if capture is True else capture, about.n_layers)
        ask = CaptureAsk(layers, _positions(positions), output_dtype or _own_dtype(about))
    return CompletionRequest(
        prompts=prompts,
        max_tokens=_max_tokens(engine, prompts, n, ask, add_special_tokens) if max_tokens is None else max_tokens,
        n=n,
        sampling=_sampling(sampling),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        echo=echo,
        add_special_tokens=add_special_tokens,
        capture=ask,
        steering=tuple(vectors),
    )


def run_request(engine: Completes, request: CompletionRequest) -> Completion:
    """Run ``request`` and wait for it.

    Raises:
        StreamtapError: whatever ended it.
    """
    finished = next(event for event in _events(engine, replace(request, stream=False)) if isinstance(event, Finished))
    return completion_of(finished, engine.provenance)


def stream_request(engine: Completes, request: CompletionRequest) -> Iterator[Delta]:
    """Text as it is made; whoever stops iterating stops the work.

    Raises:
        StreamtapError: whatever ended it.
    """
    return (event for event in _events(engine, replace(request, stream=True)) if isinstance(event, Delta))


def completion_of(finished: Finished, provenance: Provenance) -> Completion:
    """Text and rows of a finished request, as a caller holds them."""
    return Completion(
        finished.choices,
        finished.usage,
        provenance.model,
        f"cmpl-{time.time_ns():x}",
        _rows(finished.choices, provenance),
    )


def _events(engine: Completes, request: CompletionRequest) -> Iterator[Event]:
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    cancel = engine.submit(request, events.put)
    try:
        while True:
            event = events.get()
            if isinstance(event, Failed):
                raise event.error
            yield event
            if isinstance(event, Finished):
                return
    finally:
        cancel()


def _rows(choices: Sequence[Choice], provenance: Provenance) -> Activations | None:
    captured = [choice.rows for choice in choices if choice.rows is not None]
    if not captured:
        return None
    return Activations(
        acts={
            layer: np.concatenate([rows.values[place] for rows in captured])
            for place, layer in enumerate(captured[0].layers)
        },
        offsets=offsets_of([len(rows.positions) for rows in captured]),
        token_ids=np.concatenate([rows.token_ids for rows in captured]),
        positions=np.concatenate([rows.positions for rows in captured]),
        provenance=provenance,
        index=np.arange(len(captured), dtype=np.int64),
    )


def _prompts(prompt: Any) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(prompt, str):
        return (prompt,)
    items = list(prompt) if isinstance(prompt, Sequence | np.ndarray) else []
    if items and _are_ids(items):
        return (tuple(int(item) for item in items),)
    if items and all(isinstance(item, str) for item in items):
        return tuple(items)
    if items and all(isinstance(item, Sequence | np.ndarray) and _are_ids(item) for item in items):
        return tuple(tuple(int(token) for token in item) for item in items)
    raise InvalidInput("prompt must be text, token ids, a list of texts, or a list of token-id lists.")


def _are_ids(items: Any) -> bool:
    return all(isinstance(item, int | np.integer) and not isinstance(item, bool) for item in items)


def _positions(positions: CapturedPositions | Sequence[int]) -> CapturedPositions:
    return positions if isinstance(positions, str) else tuple(sorted({int(position) for position in positions}))


def _vector(item: Steer, about: Provenance) -> SteeringVector:
    if isinstance(item, SteeringVector):
        return item
    return read_vector(item, n_layers=about.n_layers, hidden=about.hidden)


def _own_dtype(about: Provenance) -> WireDtype:
    return "bfloat16" if about.dtype == "bfloat16" else "float32"


def _sampling(given: Mapping[str, Any]) -> Sampling:
    unknown = sorted(set(given) - set(Sampling.__dataclass_fields__))
    if unknown:
        known = ", ".join(Sampling.__dataclass_fields__)
        raise InvalidInput(f"complete() knows no argument {unknown[0]!r}; sampling is set by {known}.")
    return Sampling(**given)


def _max_tokens(engine: Completes, prompts: Sequence[Any], n: int, ask: CaptureAsk | None, special_tokens: bool) -> int:
    if ask is not None:
        return 1
    if len(prompts) > 1 or n > 1:
        raise InvalidInput("max_tokens must be given for several prompts or n > 1.")
    context = engine.tokenizer.context_length or _MOST_TOKENS
    held = len(engine.tokenizer.read(prompts[0], 0, special_tokens=special_tokens))
    return max(1, min(_MOST_TOKENS, context - held))
