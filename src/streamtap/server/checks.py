"""What a completion request must pass before an engine hears of it, in the contract's order.

Each check costs nothing but time: a refused request has used no quota.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from streamtap.completion import CompletionRequest
from streamtap.engines.vllm_limits import check_vectors, check_vllm_can, for_vllm
from streamtap.errors import (
    ActivationsUnsupported,
    CapturePromptTooLong,
    FullVocabularyTooLong,
    InvalidInput,
    PromptTooLong,
)
from streamtap.server.config import Limits, Role
from streamtap.server.models.catalog import Catalog, Served, served
from streamtap.server.pool.command_line import runs_prompts_whole
from streamtap.wire.counted import check_positions, check_steered_positions, counted_positions
from streamtap.wire.requests import CompletionBody


@dataclass(frozen=True)
class Plan:
    """A request that passed, with what it comes to: ``prompt_tokens`` of each prompt."""

    served: Served
    request: CompletionRequest
    prompt_tokens: tuple[int, ...]
    include_usage: bool = False

    @property
    def role(self) -> Role:
        """Which of the model's engines answers."""
        return "activations" if self.request.capture or self.request.steering else "completions"

    @property
    def sequences(self) -> int:
        """Texts that will be written."""
        return len(self.request.prompts) * self.request.n

    @property
    def output_tokens(self) -> int:
        """Tokens that will be written at most."""
        return self.sequences * self.request.max_tokens

    def lowered(self, output_tokens: int) -> Plan:
        """The plan with what ``output_tokens`` leaves for each text.

        Raises:
            InvalidPositions: the capture names a position that it now cannot come to.
        """
        made = replace(self, request=replace(self.request, max_tokens=output_tokens // self.sequences))
        if (capture := made.request.capture) is not None:
            for count in made.prompt_tokens:
                check_positions(capture, count, made.request.max_tokens)
        return made


def choose_model(body: CompletionBody, catalog: Catalog, default: str) -> Served:
    """The model that the request names, or the default, if it can do what is asked.

    Raises:
        ModelNotFound: there is no such model.
        ActivationsUnsupported: it has no engine for captures and steering.
    """
    found = served(catalog, default if body.model is None else body.model)
    if (body.captures or body.steers) and not found.config.activations:
        able = ", ".join(each.config.id for each in catalog.values() if each.config.activations) or "none"
        raise ActivationsUnsupported(
            f"the model {found.config.id} has no engine for activations and steering; these have one: {able}."
        )
    return found


def read_request(body: CompletionBody, found: Served, limits: Limits) -> CompletionRequest:
    """The request as engines know it; ``max_tokens`` is not final where the caller gave none.

    Raises:
        InvalidInput: a layer, token id or vector that does not fit the model, or too much of something.
    """
    if len(body.prompts) > limits.max_prompts:
        raise InvalidInput(f"prompt has {len(body.prompts)} prompts; at most {limits.max_prompts} go into one request.")
    facts = found.facts
    request = body.to_request(
        max_tokens=1 if body.max_tokens is None else body.max_tokens,
        n_layers=facts.n_layers,
        hidden=facts.hidden,
        vocabulary=facts.vocabulary,
    )
    if len(request.steering) > limits.max_steering_vectors:
        raise InvalidInput(
            f"apply_steering_vectors has {len(request.steering)} vectors; at most {limits.max_steering_vectors}."
        )
    if max(request.logprobs or 0, request.prompt_logprobs or 0) > limits.max_logprobs:
        raise InvalidInput(f"logprobs and prompt_logprobs are at most {limits.max_logprobs} here.")
    return request


def count_prompts(request: CompletionRequest, found: Served) -> tuple[int, ...]:
    """Tokens of each prompt, as the engine will count them.

    Raises:
        InvalidPrompt: text that is not Unicode, or that the model has no tokenizer for.
        EmptyPrompt: a prompt without a token.
    """
    count, special = found.counter.count, request.add_special_tokens
    return tuple(count(prompt, special, index=index) for index, prompt in enumerate(request.prompts))


def plan(
    body: CompletionBody, request: CompletionRequest, found: Served, counts: tuple[int, ...], limits: Limits
) -> Plan:
    """The request with its final ``max_tokens``, checked against context, caps and the work of one request.

    Raises:
        InvalidInput: it comes to more work than one request may be.
        InvalidPositions: a capture or steering vector names a position that cannot be.
        PromptTooLong: prompt and ``max_tokens`` together pass the context.
        FullVocabularyTooLong: a prompt is too long for the whole vocabulary at each token.
        CapturePromptTooLong: the capture would have more positions than one may have.
        Unsupported: the model's kind of engine would answer it wrongly.
        SteeringNotFinite: a vector is out of that engine's range.
    """
    max_tokens = _max_tokens(body, counts, found, limits)
    whole = replace(request, max_tokens=max_tokens)
    is_vllm = found.config.engine == "vllm"
    if is_vllm:
        check_vllm_can(whole, runs_whole=runs_prompts_whole(found.config))
    _check_context(whole, counts, found)
    _check_full_vocabulary(whole, counts, limits)
    _check_capture(whole, counts, found, is_vllm=is_vllm)
    check_steered_positions(whole.steering, counts, max_tokens)
    if is_vllm:
        check_vectors(whole, counts, found.facts.dtype)
    made = Plan(found, whole, counts, body.include_usage)
    if made.output_tokens > limits.max_output_work_tokens:
        raise InvalidInput(
            f"prompts × n × max_tokens is {len(request.prompts)} × {request.n} × {max_tokens} = {made.output_tokens}; "
            f"one request writes at most {limits.max_output_work_tokens}. Lower max_tokens or send fewer prompts."
        )
    return made


def _max_tokens(body: CompletionBody, counts: tuple[int, ...], found: Served, limits: Limits) -> int:
    if body.max_tokens is not None:
        return body.max_tokens
    longest = max(counts)
    return min(
        limits.max_output_work_tokens, body.default_max_tokens(prompt_tokens=longest, context=found.facts.max_model_len)
    )


def _check_context(request: CompletionRequest, counts: tuple[int, ...], found: Served) -> None:
    context = found.facts.max_model_len
    for index, count in enumerate(counts):
        if count + request.max_tokens > context:
            raise PromptTooLong(
                f"prompt {index} has {count} tokens and max_tokens is {request.max_tokens}, which is "
                f"{count + request.max_tokens} in all; the context of {found.config.id} is {context}. "
                "Shorten the prompt or lower max_tokens.",
                index=index,
            )


def _check_full_vocabulary(request: CompletionRequest, counts: tuple[int, ...], limits: Limits) -> None:
    # The engine holds a number for each token of the vocabulary at each position of all prompts of the request.
    if request.prompt_logprobs == -1 and sum(counts) > limits.full_vocab_max_prompt_tokens:
        index = counts.index(max(counts))
        many = f"; all {len(counts)} together {sum(counts)}" if len(counts) > 1 else ""
        raise FullVocabularyTooLong(
            f"prompt {index} has {counts[index]} tokens{many}; prompt_logprobs -1 takes at most "
            f"{limits.full_vocab_max_prompt_tokens} in one request. Shorten it, or ask for the likeliest 0 to "
            f"{limits.max_logprobs}.",
            index=index,
        )


def for_the_vllm_behind(made: Plan) -> CompletionRequest:
    """What the model's vLLM is asked in place of ``made``'s request; refused is what it would answer wrongly.

    Raises:
        CapturePromptTooLong: at every position, as it captures, there would be more than one capture may have.
        Unsupported: it has no such capture; ``SteeringUnsupported`` alike.
        SteeringNotFinite: a vector is out of its range.
    """
    found, request, counts = made.served, made.request, made.prompt_tokens
    if found.config.engine != "vllm":
        # Of one that runs elsewhere, or is started by a command, it shows only now what it is.
        check_vllm_can(request, runs_whole=False)
        _check_capture(request, counts, found, is_vllm=True)
    return for_vllm(request, counts, found.facts.dtype)


def capture_cap(found: Served, layers: int) -> int:
    """Positions that a capture of so many layers may have."""
    base, depth = found.config.max_activation_prompt_tokens, found.facts.n_layers
    return base if layers >= depth else min(base * depth // layers, found.facts.max_model_len)


def _check_capture(request: CompletionRequest, counts: tuple[int, ...], found: Served, *, is_vllm: bool) -> None:
    if (capture := request.capture) is None:
        return
    for count in counts:
        check_positions(capture, count, request.max_tokens)
    if is_vllm:  # which captures every position, whatever goes on from here
        capture = replace(capture, positions="all")
    positions = sum(counted_positions(capture, count, request.max_tokens) for count in counts)
    cap = capture_cap(found, len(capture.layers))
    if positions > cap:
        raise CapturePromptTooLong(
            f"this capture comes to {positions} positions ({sum(counts)} prompt tokens, max_tokens "
            f"{request.max_tokens}); of {len(capture.layers)} of {found.facts.n_layers} layers at most {cap} are "
            "captured. Ask for fewer layers or positions, or shorten the prompt.",
            index=0,
        )
