"""The body of a completion request: every field with its bounds, and what it asks of an engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, Field, ValidationError, model_validator

from streamtap.completion import CaptureAsk, CapturedPositions, CompletionRequest, Sampling, SteeringVector
from streamtap.errors import InvalidInput, InvalidLayers, InvalidPrompt
from streamtap.wire.fields import LayersField, PositionsField, PromptField, StopField, TopKField
from streamtap.wire.problems import StrictModel, kind_of, refusal
from streamtap.wire.reading import read_json
from streamtap.wire.steering import MOST_DATA_BYTES, Envelope, SteeringItem, check_fits, unpack

#: New tokens of a request that does not say how many, where the context holds as many.
MOST_DEFAULT_TOKENS = 32_000
MOST_STEERING_VECTORS = 8
_MOST_SEED = 2**63 - 1

_Logprobs = Annotated[int, Field(ge=0, le=100)]
_Penalty = Annotated[float, Field(ge=-2, le=2)]
_Items = Annotated[list[SteeringItem], Field(min_length=1, max_length=MOST_STEERING_VECTORS)]


class StreamOptions(StrictModel):
    """What a stream holds beside the text."""

    include_usage: bool | None = Field(None, description="true or false")


class CompletionBody(StrictModel):
    """POST /v1/completions. A field that is null is as if it were not there."""

    model: str | None = Field(None, description="a model's id as a string; GET /v1/models lists them")
    prompt: PromptField = Field(description="a string, a list of strings, a list of token ids or a list of such lists")
    max_tokens: Annotated[int, Field(ge=0, le=1_000_000)] | None = Field(
        None, description="a whole number from 0 to 1000000"
    )
    n: Annotated[int, Field(ge=1, le=16)] | None = Field(None, description="a whole number from 1 to 16")
    temperature: Annotated[float, Field(ge=0, le=100)] | None = Field(None, description="a number from 0 to 100")
    top_p: Annotated[float, Field(gt=0, le=1)] | None = Field(None, description="a number above 0, at most 1")
    top_k: TopKField = Field(None, description="-1 (off) or a whole number from 1")
    min_p: Annotated[float, Field(ge=0, le=1)] | None = Field(None, description="a number from 0 to 1")
    presence_penalty: _Penalty | None = Field(None, description="a number from -2 to 2")
    frequency_penalty: _Penalty | None = Field(None, description="a number from -2 to 2")
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] | None = Field(
        None, description="a number above 0, at most 2"
    )
    seed: Annotated[int, Field(ge=0, le=_MOST_SEED)] | None = Field(
        None, description=f"a whole number from 0 to {_MOST_SEED}"
    )
    stop: StopField = Field(None, description="a string or a list of up to 4 strings, none of them empty")
    logprobs: _Logprobs | None = Field(None, description="a whole number from 0 to 100")
    prompt_logprobs: Annotated[int, Field(ge=-1, le=100)] | None = Field(
        None, description="-1 (the whole vocabulary) or a whole number from 0 to 100"
    )
    echo: bool | None = Field(None, description="true or false")
    stream: bool | None = Field(None, description="true or false")
    stream_options: StreamOptions | None = Field(None, description="an object with include_usage")
    user: str | None = Field(None, description="a string")
    add_special_tokens: bool | None = Field(None, description="true or false")
    output_residual_stream: LayersField = Field(None, description="true, false or a list of layer numbers")
    output_positions: PositionsField = Field(None, description="'all', 'last', 'prompt', 'generated' or positions")
    output_dtype: Literal["bfloat16", "float32"] | None = Field(None, description="'bfloat16' or 'float32'")
    apply_steering_vectors: _Items | None = Field(
        None, description=f"a list of 1 to {MOST_STEERING_VECTORS} steering vectors"
    )

    @model_validator(mode="after")
    def _fits_together(self) -> CompletionBody:
        if problems := list(_contradictions(self)):
            raise ValueError(f"cannot be served: {' '.join(problems)}")
        return self

    @property
    def prompts(self) -> tuple[str | tuple[int, ...], ...]:
        """Every prompt, as text or token ids, in order."""
        if isinstance(self.prompt, str):
            return (self.prompt,)
        if isinstance(self.prompt[0], int):
            return (tuple(self.prompt),)
        return tuple(
            item if isinstance(item, str) else tuple(item) for item in cast(list[str | list[int]], self.prompt)
        )

    @property
    def samples(self) -> int:
        """Completions of each prompt."""
        return 1 if self.n is None else self.n

    @property
    def captures(self) -> bool:
        """Whether rows of the residual stream are asked for."""
        return self.output_residual_stream not in (None, False)

    @property
    def steers(self) -> bool:
        """Whether steering vectors are applied."""
        return self.apply_steering_vectors is not None

    @property
    def streams(self) -> bool:
        """Whether the text comes as server-sent events."""
        return bool(self.stream)

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def adds_special_tokens(self) -> bool:
        """Whether text gets the tokenizer's BOS."""
        return self.add_special_tokens is not False

    def default_max_tokens(self, *, prompt_tokens: int, context: int) -> int:
        """``max_tokens`` as asked, else what a request without it gets; ``prompt_tokens`` is its longest prompt's."""
        if self.max_tokens is not None:
            return self.max_tokens
        return 1 if self.captures else max(1, min(MOST_DEFAULT_TOKENS, context - prompt_tokens))

    def layers(self, n_layers: int | None) -> tuple[int, ...]:
        """Blocks that are captured, ascending, each once; none without a capture.

        Raises:
            InvalidLayers: a layer that a model of ``n_layers`` blocks lacks, or every layer of an unknown number.
        """
        asked = self.output_residual_stream
        if not isinstance(asked, list):
            return _every_layer(n_layers) if asked else ()
        if n_layers is not None and max(asked) >= n_layers:
            raise InvalidLayers(
                f"output_residual_stream names layer {max(asked)}; the model has layers 0 to {n_layers - 1}."
            )
        return tuple(sorted(set(asked)))

    def steering(self, *, n_layers: int | None = None, hidden: int | None = None) -> tuple[SteeringVector, ...]:
        """The steering vectors, in order.

        Raises:
            InvalidInput: one does not fit a model of ``n_layers`` blocks and width ``hidden``.
        """
        vectors = []
        for place, item in enumerate(self.apply_steering_vectors or ()):
            at = f"apply_steering_vectors[{place}]"
            vectors.append(unpack(item, at))
            check_fits(vectors[-1], n_layers=n_layers, hidden=hidden, at=at)
        return tuple(vectors)

    def to_request(
        self,
        *,
        max_tokens: int,
        n_layers: int | None = None,
        hidden: int | None = None,
        vocabulary: int | None = None,
    ) -> CompletionRequest:
        """What the body asks of an engine; ``stream`` as the body says.

        Raises:
            InvalidInput: layers, vectors or token ids that do not fit the model.
        """
        self.check_vocabulary(vocabulary)
        return CompletionRequest(
            prompts=self.prompts,
            max_tokens=max_tokens,
            n=self.samples,
            sampling=self._sampling(),
            stop=tuple(self.stop or ()),
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            echo=bool(self.echo),
            add_special_tokens=self.adds_special_tokens,
            capture=self.capture(n_layers),
            steering=self.steering(n_layers=n_layers, hidden=hidden),
            stream=self.streams,
        )

    def capture(self, n_layers: int | None) -> CaptureAsk | None:
        """Which rows are asked for; None without a capture.

        Raises:
            InvalidLayers: as ``layers``.
        """
        if not self.captures:
            return None
        asked = self.output_positions
        places = tuple(sorted(set(asked))) if isinstance(asked, list) else asked or "all"
        return CaptureAsk(self.layers(n_layers), cast(CapturedPositions, places), self.output_dtype or "bfloat16")

    def check_vocabulary(self, vocabulary: int | None) -> None:
        """Refuse token ids that a model with ``vocabulary`` tokens lacks.

        Raises:
            InvalidPrompt: an id is outside the vocabulary.
        """
        if vocabulary is None:
            return
        for index, prompt in enumerate(self.prompts):
            if not isinstance(prompt, str) and max(prompt) >= vocabulary:
                raise InvalidPrompt(
                    f"prompt {index} holds token id {max(prompt)}; the model's ids are 0 to {vocabulary - 1}.",
                    index=index,
                )

    def _sampling(self) -> Sampling:
        given = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": None if self.top_k == -1 else self.top_k,
            "min_p": self.min_p,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "seed": self.seed,
        }
        return Sampling(**{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]


_NESTED: dict[str, type[BaseModel]] = {
    "stream_options": StreamOptions,
    "apply_steering_vectors": SteeringItem,
    "activations": Envelope,
}


def read_body(raw: bytes) -> CompletionBody:
    """The body of a request, checked as far as that needs no model; steering vectors are unpacked.

    Raises:
        BadJson: it is not JSON.
        InvalidInput: at most five problems in one message, each naming its field; no text of the caller's.
    """
    return read_mapping(read_json(raw))


def read_mapping(body: Any, *, most_data_bytes: int | None = MOST_DATA_BYTES) -> CompletionBody:
    """As ``read_body``, of a body that is parsed; ``most_data_bytes`` bounds the base64 of one steering vector.

    Raises:
        InvalidInput: as ``read_body``.
    """
    if not isinstance(body, Mapping):
        raise InvalidInput(f"the body must be a JSON object; got {kind_of(body)}.")
    try:
        checked = CompletionBody.model_validate(dict(body))
    except ValidationError as error:
        raise refusal(error, CompletionBody, _NESTED) from None
    for place, item in enumerate(checked.apply_steering_vectors or ()):
        unpack(item, f"apply_steering_vectors[{place}]", most_data_bytes=most_data_bytes)
    return checked


def _contradictions(body: CompletionBody) -> Iterator[str]:
    """What no server could do at once, each as a sentence."""
    if body.max_tokens == 0 and not (body.echo or body.captures or body.prompt_logprobs is not None):
        yield "max_tokens 0 needs echo, prompt_logprobs or output_residual_stream; send 1 or more to have a completion."
    if body.max_tokens is None and not body.captures and (len(body.prompts) > 1 or body.samples > 1):
        yield "max_tokens is required with several prompts or n > 1."
    if body.captures and body.samples > 1:
        yield "output_residual_stream needs n to be 1; send one request for each sample."
    if body.captures and body.streams:
        yield "output_residual_stream needs stream to be false; rows come with the whole answer."
    if body.prompt_logprobs is not None and body.streams:
        yield "prompt_logprobs needs stream to be false; they come with the whole answer."
    for name in ("output_positions", "output_dtype"):
        if getattr(body, name) is not None and not body.captures:
            yield f"{name} needs output_residual_stream; without a capture there are no rows."
    if body.stream_options is not None and not body.streams:
        yield "stream_options needs stream to be true."


def _every_layer(n_layers: int | None) -> tuple[int, ...]:
    if n_layers is None:
        raise InvalidLayers(
            "output_residual_stream is true, but how many layers the model has is not known; list them."
        )
    return tuple(range(n_layers))
