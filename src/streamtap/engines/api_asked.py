"""A completion that is asked of a service: held against what it told before anything is sent."""

from __future__ import annotations

from dataclasses import dataclass, replace

from streamtap.completion import CompletionRequest
from streamtap.engines.api_told import Told
from streamtap.engines.generation.checks import check_request
from streamtap.engines.tokenizing import PromptTokenizer
from streamtap.errors import PromptTooLong, Unsupported
from streamtap.wire.counted import check_positions, check_steered_positions
from streamtap.wire.steering import check_fits


@dataclass(frozen=True)
class Asked:
    """A request as it is sent, its prompts' token ids, and whether the caller asked for log-probabilities."""

    request: CompletionRequest
    prompt_ids: tuple[tuple[int, ...], ...]
    wants_logs: bool

    def prompt_of(self, choice: int) -> tuple[int, ...]:
        """The prompt that choice number ``choice`` goes on from."""
        return self.prompt_ids[choice // self.request.n]

    @property
    def streams(self) -> bool:
        """Whether it can be asked for as a stream, which ends when it is left."""
        return self.request.capture is None and self.request.prompt_logprobs is None


def asked_of(
    request: CompletionRequest, told: Told, tokenizer: PromptTokenizer, *, n_layers: int, hidden: int
) -> Asked:
    """``request`` as the service gets it: token ids where nothing of the text comes back.

    The tokens of a captured text are told apart by their own texts, so these are asked for beside rows.

    Raises:
        InvalidInput: it cannot be run on a model of that depth and width.
        Unsupported: the service does not know what it asks for.
    """
    check_request(request, n_layers)
    _check_known(request, told)
    ids = tuple(_ids(request, index, told, tokenizer) for index in range(len(request.prompts)))
    check_steered_positions(request.steering, [len(each) for each in ids], request.max_tokens)
    for number, vector in enumerate(request.steering):
        check_fits(vector, n_layers=n_layers, hidden=hidden, at=f"steering[{number}]")
    sent = replace(request, stream=False)
    if not request.echo:
        sent = replace(sent, prompts=ids, add_special_tokens=True)
    if request.capture is not None and request.logprobs is None:
        sent = replace(sent, logprobs=0)
    return Asked(sent, ids, request.logprobs is not None)


def _check_known(request: CompletionRequest, told: Told) -> None:
    if (capture := request.capture) is None:
        return
    if capture.positions != "all" and not told.chooses_rows:
        raise Unsupported(f"this service sends the rows of every position of {told.id}; leave positions at 'all'.")
    if capture.dtype != "bfloat16" and capture.dtype not in told.row_dtypes:
        raise Unsupported(f"this service sends rows of {told.id} in bfloat16 alone; leave output_dtype at that.")


def _ids(request: CompletionRequest, index: int, told: Told, tokenizer: PromptTokenizer) -> tuple[int, ...]:
    read = tokenizer.read(request.prompts[index], index, special_tokens=request.add_special_tokens)
    if told.context is not None and len(read) + request.max_tokens > told.context:
        raise PromptTooLong(
            f"prompt {index} has {len(read)} tokens and max_tokens is {request.max_tokens}; together they may be at "
            f"most the context of {told.id}, {told.context}.",
            index=index,
        )
    if request.capture is not None:
        check_positions(request.capture, len(read), request.max_tokens)
    return tuple(read.tolist())
