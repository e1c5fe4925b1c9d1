"""A bulk harvest that is asked for: its fields as JSON has them, and its prompts cut into jobs that a server takes."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from streamtap.client.arrays import as_floats, as_ints
from streamtap.errors import EmptyPrompt, InvalidInput, InvalidPrompt
from streamtap.layers import LayerSpec, resolve_layers
from streamtap.pooling import Pooling, check_pooling
from streamtap.spec import Projection

#: Texts, or token ids of each prompt.
HarvestPrompts = Iterable[str | Sequence[int] | NDArray[np.integer[Any]]]
#: One of them as JSON has it.
JobPrompt = str | list[int]

_MOST_DIRECTIONS = 64
#: Bytes of a text for a token, at least, in nearly all of them; where there are fewer the server says so.
_BYTES_PER_TOKEN = 3
#: What stands around the prompts in a body, ``project_onto`` apart.
AROUND_BYTES = 64 * 1024


class HarvestOptions(TypedDict, total=False):
    """Keyword arguments of ``harvest``; what is left out, or None, is the server's default.

    ``positions`` is ``"all"``, ``"last"`` or numbers; ``pooling`` makes one row a prompt of several; ``project_onto``
    [directions, hidden] keeps each row's products with those directions in float32 instead of the row. ``shard_size``
    is prompts in a file, ``batch_size`` prompts in a pass at most.
    """

    positions: str | Sequence[int] | None
    pooling: Pooling | None
    project_onto: Any
    shard_size: int | None
    batch_size: int | None
    add_special_tokens: bool | None


@dataclass(frozen=True)
class JobLimits:
    """What one job may have; a prompt longer than ``context`` tokens is cut by the server, and counts as so many."""

    prompts: int = 4096
    tokens: int = 2_000_000
    body_bytes: int = 50 * 1024 * 1024
    context: int | None = None

    @classmethod
    def told(cls, capabilities: Mapping[str, Any]) -> JobLimits:
        """Those of a model that ``GET /v1/models`` tells of; the contract's where it does not."""
        names = {"prompts": "max_harvest_prompts", "tokens": "max_harvest_tokens", "context": "max_model_len"}
        found = {own: capabilities.get(name) for own, name in names.items()}
        return cls(**{own: value for own, value in found.items() if isinstance(value, int) and value > 0})


def harvest_prompts(prompts: Any) -> list[JobPrompt]:
    """The prompts as JSON has them: all texts, or all token ids.

    Raises:
        InvalidInput: one prompt by itself, nothing, or texts and token ids together.
        InvalidPrompt: one that is neither or is empty; its index is named.
    """
    listed = prompts.tolist() if hasattr(prompts, "tolist") else prompts
    if isinstance(listed, str):
        raise InvalidInput("prompts must be a list; got one text. Wrap it: [prompt].")
    if isinstance(listed, bytes | Mapping) or not isinstance(listed, Iterable):
        raise InvalidInput(f"prompts must be a list of texts or of lists of token ids; got {type(prompts).__name__}.")
    found = [_prompt(each, index) for index, each in enumerate(listed)]
    if not found:
        raise InvalidInput("a harvest needs at least one prompt; got none.")
    if len({isinstance(each, str) for each in found}) > 1:
        raise InvalidInput("prompts must be all texts or all token ids; the list holds both.")
    return found


def harvest_fields(model: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The body without prompts and layers, and without what was not said.

    Raises:
        InvalidInput: an option that there is not, or a value that cannot be.
    """
    known = HarvestOptions.__optional_keys__
    if unknown := sorted(set(options) - known):
        raise InvalidInput(f"no option {', '.join(unknown)}; there are {', '.join(sorted(known))}.")
    if not isinstance(model, str) or not model:
        raise InvalidInput("a harvest needs the server's id of a model; client.models() lists them.")
    said = {name: _plain(name, value) for name, value in options.items() if value is not None}
    return {"model": model, **said}


def needs_depth(layers: LayerSpec | None) -> bool:
    """Whether ``layers`` says something only of a model whose depth is known."""
    if layers is None or (isinstance(layers, str) and layers == "all"):
        return False
    return isinstance(layers, str) or min([0, *_numbers(layers)]) < 0


def harvest_layers(layers: LayerSpec | None, n_layers: int | None) -> str | list[int] | None:
    """``layers`` as the body has it: ``"all"``, numbers, or None for the server's choice.

    Raises:
        InvalidLayers: they do not fit a model of ``n_layers``.
        InvalidInput: they need the depth, which is None.
    """
    if layers is None or (isinstance(layers, str) and layers == "all"):
        return layers
    if not needs_depth(layers):
        return sorted(set(_numbers(layers)))
    if n_layers is None:
        raise InvalidInput("the server does not tell how deep the model is; name the layers by their numbers.")
    return list(resolve_layers(layers, n_layers))


def cut_into_jobs(
    prompts: Sequence[JobPrompt], limits: JobLimits, around_bytes: int = AROUND_BYTES
) -> list[list[JobPrompt]]:
    """Runs of prompts, in order, each within ``limits`` as far as that shows here; tokens of texts are guessed.

    ``around_bytes`` is what the body holds beside its prompts.
    """
    jobs: list[list[JobPrompt]] = []
    tokens = size = 0
    for prompt in prompts:
        own_bytes, own_tokens = _measured(prompt, limits.context)
        tokens, size = tokens + own_tokens, size + own_bytes
        full = not jobs or len(jobs[-1]) >= limits.prompts or tokens > limits.tokens or size > limits.body_bytes
        if full:
            jobs.append([])
            tokens, size = own_tokens, around_bytes + own_bytes
        jobs[-1].append(prompt)
    return jobs


def halves(prompts: list[JobPrompt]) -> list[list[JobPrompt]]:
    """Two runs of about as many prompts; one alone stays one."""
    middle = len(prompts) // 2
    return [part for part in (prompts[:middle], prompts[middle:]) if part]


def _prompt(value: Any, index: int) -> JobPrompt:
    if isinstance(value, str):
        plain: JobPrompt = value
    elif isinstance(value, Iterable) and not isinstance(value, bytes | Mapping):
        plain = list(as_ints(value, f"the token ids of prompt {index}"))
    else:
        raise InvalidPrompt(
            f"prompt {index} is of type {type(value).__name__}; expected text or a list of token ids.", index=index
        )
    if not plain:
        raise EmptyPrompt(f"prompt {index} is empty; expected text or token ids.", index=index)
    return plain


def _measured(prompt: JobPrompt, context: int | None) -> tuple[int, int]:
    """Bytes in the body, and tokens: those of a text are a guess."""
    size = len(json.dumps(prompt, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")) + 1
    tokens = size // _BYTES_PER_TOKEN + 1 if isinstance(prompt, str) else len(prompt)
    return size, tokens if context is None else min(tokens, context)


def _plain(name: str, value: Any) -> Any:
    if name == "project_onto":
        return _directions(value)
    if name == "positions" and not isinstance(value, str):
        return list(as_ints([value] if np.ndim(value) == 0 else value, name))
    if name == "pooling":
        return check_pooling(value)
    return value.item() if hasattr(value, "item") else value


def _directions(values: Any) -> dict[str, Any]:
    floats = as_floats(values, "project_onto")
    if floats.ndim != 2 or not floats.size or len(floats) > _MOST_DIRECTIONS:
        raise InvalidInput(
            f"project_onto must be [directions, hidden] with 1 to {_MOST_DIRECTIONS} directions; got shape "
            f"{list(floats.shape)}."
        )
    Projection.onto(floats)  # a zero direction is refused here; the server scales them itself
    data = b64encode(floats.astype("<f4").tobytes()).decode("ascii")
    return {"data": data, "dtype": "float32", "shape": list(floats.shape), "compression": "none"}


def _numbers(layers: Any) -> tuple[int, ...]:
    found = as_ints([layers] if np.ndim(layers) == 0 else layers, "layers")
    if not found:
        raise InvalidInput("a harvest needs at least one layer; layers is empty.")
    return found
