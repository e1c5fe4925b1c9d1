"""What is asked of an engine: prompts, and which of their rows to keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from streamtap.errors import EmptyPrompt, InvalidInput, InvalidPrompt, UnsupportedSite
from streamtap.layers import LayerSpec
from streamtap.pooling import Pooling, check_pooling
from streamtap.positions import PositionSpec, check_positions

Messages = Sequence[Mapping[str, str]]
Truncate = Literal["left", "right"]

SITES = ("block_output",)


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """One input: text, chat messages, or token ids; exactly one of the three is set.

    ``positions``, with token ids, are those that have a row, whatever the spec says.
    """

    text: str | None = None
    messages: tuple[tuple[str, str], ...] | None = None
    token_ids: Sequence[int] | NDArray[np.integer[Any]] | None = None
    positions: Sequence[int] | NDArray[np.integer[Any]] | None = None

    @classmethod
    def of(cls, value: PromptLike, index: int) -> Prompt:
        """Read ``value`` as a prompt; ``index`` names it in an error.

        Raises:
            EmptyPrompt: there is nothing in it.
            InvalidPrompt: it is neither text, messages nor token ids.
        """
        if isinstance(value, str):
            return _text_prompt(value, index)
        if isinstance(value, Prompt):
            return _checked(value, index)
        items = _items(value, index)
        if not items:
            raise EmptyPrompt(f"prompt {index} is empty; expected text, messages or token ids.", index=index)
        if all(isinstance(item, Mapping) for item in items):
            return cls(messages=tuple(_message(item, index) for item in items))
        if all(isinstance(item, int | np.integer) and not isinstance(item, bool | np.bool_) for item in items):
            return cls(token_ids=tuple(int(item) for item in items))
        held = "/".join(sorted({type(item).__name__ for item in items}))
        raise _not_a_prompt(value, index, f" that holds {held}")


PromptLike = str | Messages | Sequence[int] | NDArray[np.integer[Any]] | Prompt


def _items(value: Any, index: int) -> list[Any]:
    if isinstance(value, bytes | bytearray | Mapping):
        raise _not_a_prompt(value, index)  # lists of ints or of texts to Python, and no prompt to us
    try:
        return list(value)
    except TypeError as error:
        raise _not_a_prompt(value, index) from error


def _not_a_prompt(value: Any, index: int, held: str = "") -> InvalidPrompt:
    return InvalidPrompt(
        f"prompt {index} is of type {type(value).__name__}{held}; expected text, a list of {{'role', 'content'}} "
        "messages, or a list of token ids.",
        index=index,
    )


def _checked(prompt: Prompt, index: int) -> Prompt:
    given = [each for each in (prompt.text, prompt.messages, prompt.token_ids) if each is not None]
    if len(given) != 1:
        raise InvalidPrompt(
            f"prompt {index} sets {len(given)} of text, messages and token_ids; expected exactly one.", index=index
        )
    if not len(given[0]):
        raise EmptyPrompt(f"prompt {index} is empty; expected text, messages or token ids.", index=index)
    return prompt


def _text_prompt(value: str, index: int) -> Prompt:
    if not value:
        raise EmptyPrompt(f"prompt {index} is an empty string; expected at least one character.", index=index)
    return Prompt(text=value)


def _message(item: Mapping[str, Any], index: int) -> tuple[str, str]:
    role, content = item.get("role"), item.get("content")
    if not isinstance(role, str) or not isinstance(content, str) or len(item) != 2:
        raise InvalidPrompt(
            f"prompt {index}: each message needs exactly a 'role' and a 'content', both text; got "
            f"{ {str(key): type(held).__name__ for key, held in item.items()} }.",
            index=index,
        )
    return role, content


def as_prompts(values: Sequence[PromptLike]) -> list[Prompt]:
    """Read every value as a prompt before any work is done.

    Raises:
        InvalidInput: ``values`` is one text or one chat rather than a list of prompts.
        InvalidPrompt: one of them is not a prompt; its index is named.
    """
    if isinstance(values, str):
        raise InvalidInput("prompts must be a list; got one string. Wrap it: [prompt].")
    listed = list(values)
    if listed and isinstance(listed[0], Mapping):
        raise InvalidInput("prompts must be a list of prompts; got the messages of one chat. Wrap it: [messages].")
    return [Prompt.of(value, index) for index, value in enumerate(listed)]


@dataclass(frozen=True, eq=False)
class Projection:
    """Directions, unit length, that rows are multiplied with: float32 [directions, hidden]; the engine does it."""

    directions: NDArray[np.float32]

    @classmethod
    def onto(cls, directions: Any) -> Projection:
        """From directions [directions, hidden] of any length but zero; they are scaled to unit length in float64.

        Raises:
            InvalidInput: not such an array, or a row that is zero or not finite.
        """
        wide = np.asarray(directions, np.float64)
        if wide.ndim != 2 or not wide.size:
            raise InvalidInput(f"directions must be [directions, hidden]; got shape {list(wide.shape)}.")
        lengths = np.linalg.norm(wide, axis=1)
        bad = np.flatnonzero(~np.isfinite(lengths) | (lengths == 0))
        if len(bad):
            raise InvalidInput(f"direction {int(bad[0])} is zero or not finite, so that it has no direction.")
        return cls((wide / lengths[:, None]).astype(np.float32))


@dataclass(frozen=True)
class CaptureSpec:
    """What to keep of each prompt's forward pass.

    Args:
        layers: A layer spec (``16``, ``-1``, ``[8, 16]``, ``"all"``, ``"middle"``, ``"8-20"``), or
            an empty tuple for no rows at all (perplexity or logits only).
        positions: Which real tokens have a row: ``"all"``, ``"last"``, a range in Python's notation
            (``"-5:"``), a list of ints, ``"role:assistant"``, or a function of the token ids
            [tokens] that returns a boolean mask [tokens].
        pooling: ``none`` keeps every chosen row; the others make one row a prompt.
        exclude_special_tokens: Leave BOS, EOS and their like out, by id.
        truncate: Cut prompts longer than the context on this side; None refuses them.
        generation_prompt: End a chat with the template's opening of the assistant's turn.
        exact: Run each prompt alone and whole, so that its values depend on nothing else.
        perplexity: Also mean, minimum and maximum perplexity over each prompt's tokens.
        token_nll: Also each token's negative log-likelihood, in nats.
        logits: ``"last"`` or ``"all"`` positions' logits, or None.
        logit_top_k: Keep only the k largest logits, with their ids.
        site: Only ``"block_output"``: the residual stream after a block, before the final norm.
        dtype: ``"bfloat16"`` or ``"float32"`` of the rows that are handed out; None keeps the model's.
        projection: Hand out each row's products with these directions in float32, instead of the row.

    Raises:
        InvalidInput: a value that means nothing.
        UnsupportedSite: any other site.
    """

    layers: LayerSpec = "all"
    positions: PositionSpec = "all"
    pooling: Pooling = "none"
    exclude_special_tokens: bool = False
    truncate: Truncate | None = None
    generation_prompt: bool = False
    exact: bool = False
    perplexity: bool = False
    token_nll: bool = False
    logits: Literal["last", "all"] | None = None
    logit_top_k: int | None = None
    site: str = "block_output"
    dtype: Literal["bfloat16", "float32"] | None = None
    projection: Projection | None = None

    def __post_init__(self) -> None:
        """Check each value once."""
        check_pooling(self.pooling)
        check_positions(self.positions)
        if self.site not in SITES:
            raise UnsupportedSite(
                f"site {self.site!r} is not offered: it is not the same quantity in every model family. "
                "Streamtap captures 'block_output', the residual stream after a block."
            )
        if self.dtype not in (None, "bfloat16", "float32"):
            raise InvalidInput(f"dtype must be 'bfloat16', 'float32' or None; got {self.dtype!r}.")
        if self.projection is not None and self.dtype == "bfloat16":
            raise InvalidInput("products with directions are float32; leave dtype out.")
        if self.truncate not in (None, "left", "right"):
            raise InvalidInput(f"truncate must be 'left', 'right' or None; got {self.truncate!r}.")
        if self.logits not in (None, "last", "all"):
            raise InvalidInput(f"logits must be 'last', 'all' or None; got {self.logits!r}.")
        if self.logit_top_k is not None and not _is_positive_int(self.logit_top_k):
            raise InvalidInput(f"logit_top_k must be a whole number of at least 1; got {self.logit_top_k!r}.")

    @property
    def needs_head(self) -> bool:
        """Whether the language-model head has to run."""
        return self.perplexity or self.token_nll or self.logits is not None


def _is_positive_int(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and int(value) >= 1
