"""What vllm-lens answers wrongly without a word, and is therefore never asked."""

from __future__ import annotations

from collections import Counter
from itertools import chain

from streamtap.completion import CompletionRequest
from streamtap.errors import SteeringUnsupported, Unsupported


def check_vllm_can(request: CompletionRequest) -> None:
    """Refuse what a ``vllm serve`` with vllm-lens would drop, or do another way.

    Raises:
        Unsupported: a capture, or no new token, in a form that it does not have.
        SteeringUnsupported: vectors that it would apply elsewhere, or at another strength.
    """
    if request.max_tokens == 0 and not (request.echo and request.capture is None and request.prompt_logprobs is None):
        raise Unsupported("this model's engine (vLLM) draws at least one token; send max_tokens 1.")
    if request.capture is not None or request.steering:
        _check_one_sequence(request)
    if request.capture is not None and request.capture.positions != "all":
        raise Unsupported("this model's engine (vLLM) captures every position; leave output_positions out.")
    _check_vectors(request)


def _check_one_sequence(request: CompletionRequest) -> None:
    """It captures and steers the first prompt's first sample only."""
    if len(request.prompts) * request.n > 1:
        kind = Unsupported if request.capture is not None else SteeringUnsupported
        raise kind("this model's engine (vLLM) captures and steers one prompt with n 1; send one request for each.")


def _check_vectors(request: CompletionRequest) -> None:
    if any(vector.spans is not None for vector in request.steering):
        raise SteeringUnsupported("this model's engine (vLLM) has no position_spans; send one vector a position.")
    # At every decode step position 0's vector would be added again, and positions behind the prompt never.
    if request.max_tokens > 1 and any(vector.positions is not None for vector in request.steering):
        raise SteeringUnsupported("this model's engine (vLLM) steers single positions with max_tokens 1 only.")
    per_layer = Counter(chain.from_iterable(vector.layers for vector in request.steering))
    normed = chain.from_iterable(vector.layers for vector in request.steering if vector.norm_match)
    if any(per_layer[layer] > 1 for layer in normed):
        raise SteeringUnsupported("this model's engine (vLLM) takes norm_match with one vector a layer only.")
