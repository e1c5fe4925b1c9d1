"""Prompts to token ids: text, chat messages or ids, cut to the context where that was asked for."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamtap.engines.turns import role_positions
from streamtap.errors import EmptyPrompt, InvalidInput, InvalidPositions, InvalidPrompt, PromptTooLong
from streamtap.positions import ROLE, choose_positions, is_own_to_prompt
from streamtap.spec import CaptureSpec, Prompt


@dataclass(frozen=True)
class Tokens:
    """One tokenised prompt.

    ``token_ids`` is int32 [tokens]; ``positions`` are the chosen ones where they are the prompt's
    own (a role's turns, a mask function), else None; ``cut_from`` is the length before
    truncation, 0 if nothing was cut.
    """

    token_ids: NDArray[np.int32]
    positions: NDArray[np.int32] | None = None
    cut_from: int = 0


def check_characters(text: str, index: int) -> None:
    """Refuse text that no tokenizer reads, since UTF-8 cannot write it.

    Raises:
        InvalidPrompt: it holds half a surrogate pair.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidPrompt(
            f"prompt {index} holds half a surrogate pair at character {error.start}; send whole characters.",
            index=index,
        ) from error


class PromptTokenizer:
    """Tokenises prompts for one model; ``tokenizer`` may be None where all prompts are token ids."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        context_length: int | None = None,
        vocabulary: int | None = None,
        special_ids: Sequence[int] = (),
    ) -> None:
        self.tokenizer = tokenizer
        self.context_length = context_length
        self.vocabulary = vocabulary
        known = set(special_ids) | set(getattr(tokenizer, "all_special_ids", ()) or ())
        self.special_ids = np.array(sorted(known), np.int32)

    def encode(
        self, prompts: Sequence[Prompt], spec: CaptureSpec, first_index: int = 0, *, special_tokens: bool = True
    ) -> list[Tokens]:
        """Tokenise ``prompts``; the first one is number ``first_index`` in errors.

        ``special_tokens`` is whether text gets a BOS and the like; a chat's template writes its own.

        Raises:
            EmptyPrompt: a prompt has no token.
            PromptTooLong: one has more than the context and ``spec.truncate`` is None.
            InvalidPrompt: an id is outside the vocabulary, or there is no tokenizer or template.
        """
        ids = self._ids(prompts, spec, first_index, special_tokens)
        self._warn_of_double_bos(prompts, ids, first_index)
        pairs = enumerate(zip(prompts, ids, strict=True), first_index)
        return [self._finish(prompt, each, spec, index) for index, (prompt, each) in pairs]

    def choose(self, tokens: Tokens, spec: CaptureSpec, index: int) -> NDArray[np.int32]:
        """The positions, int32 ascending, that have a row."""
        if tokens.positions is not None:
            return tokens.positions
        excluded = self.special_ids if spec.exclude_special_tokens else None
        return choose_positions(spec.positions, tokens.token_ids, excluded_ids=excluded, index=index)

    def read(self, prompt: str | Sequence[int], index: int, *, special_tokens: bool = True) -> NDArray[np.int32]:
        """Token ids, int32 [tokens], of one text, or of ids as they are.

        Raises:
            EmptyPrompt: there is no token.
            InvalidPrompt: an id is outside the vocabulary, or there is no tokenizer.
        """
        if isinstance(prompt, str):
            check_characters(prompt, index)
        found = self._encoded([prompt], index, special=special_tokens)[0] if isinstance(prompt, str) else prompt
        ids = np.asarray(found, np.int64)
        if not len(ids):
            raise EmptyPrompt(f"prompt {index} has no token; expected at least one.", index=index)
        self._check_vocabulary(ids, index)
        return ids.astype(np.int32)

    def text_of(self, token_ids: NDArray[np.int32], *, special_tokens: bool) -> str:
        """What token ids say, special tokens written out or left out.

        Raises:
            InvalidInput: there is no tokenizer.
        """
        if self.tokenizer is None:
            raise InvalidInput("there is no tokenizer to say what token ids mean; bring the model's.")
        return str(
            self.tokenizer.decode(
                token_ids.tolist(), skip_special_tokens=not special_tokens, clean_up_tokenization_spaces=False
            )
        )

    def _ids(self, prompts: Sequence[Prompt], spec: CaptureSpec, first: int, special: bool) -> list[NDArray[np.int64]]:
        found: list[Any] = [prompt.token_ids for prompt in prompts]
        texts = [i for i, prompt in enumerate(prompts) if prompt.text is not None]
        chats = [i for i, prompt in enumerate(prompts) if prompt.messages is not None]
        for i in texts:
            check_characters(str(prompts[i].text), first + i)
        if texts:
            encoded = self._encoded([str(prompts[i].text) for i in texts], first + texts[0], special=special)
            found = _filled(found, texts, encoded)
        if chats:
            rendered = [self.render(prompts[i], spec, first + i) for i in chats]
            # The template has written its own BOS; adding special tokens again would make it two.
            found = _filled(found, chats, self._encoded(rendered, first + chats[0], special=False))
        return [np.asarray(each, np.int64) for each in found]

    def render(self, prompt: Prompt, spec: CaptureSpec, index: int) -> str:
        """A chat as the template writes it."""
        self._need_tokenizer("chat messages", index)
        if not getattr(self.tokenizer, "chat_template", None):
            raise InvalidPrompt(
                f"prompt {index} is chat messages, but the model's tokenizer has no chat template; send text.",
                index=index,
            )
        messages = [{"role": role, "content": content} for role, content in prompt.messages or ()]
        return str(
            self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=spec.generation_prompt)
        )

    def _encoded(self, texts: list[str], index: int, *, special: bool) -> list[list[int]]:
        self._need_tokenizer("text", index)
        encoded = self.tokenizer(texts, add_special_tokens=special, return_attention_mask=False, verbose=False)
        return list(encoded["input_ids"])

    def _need_tokenizer(self, kind: str, index: int) -> None:
        if self.tokenizer is None:
            raise InvalidPrompt(
                f"prompt {index} is {kind}, but this engine has no tokenizer; send token ids.", index=index
            )

    def _finish(self, prompt: Prompt, ids: NDArray[np.int64], spec: CaptureSpec, index: int) -> Tokens:
        if not len(ids):
            raise EmptyPrompt(f"prompt {index} has no token; expected at least one.", index=index)
        self._check_vocabulary(ids, index)
        kept, start = self._cut(ids, spec, index)
        tokens = Tokens(kept, None, len(ids) if len(kept) < len(ids) else 0)
        positions = self._own_positions(prompt, tokens, start, spec, index)
        return Tokens(tokens.token_ids, positions, tokens.cut_from)

    def _check_vocabulary(self, ids: NDArray[np.int64], index: int) -> None:
        top = self.vocabulary if self.vocabulary is not None else np.iinfo(np.int32).max
        bad = ids[(ids < 0) | (ids >= top)]
        if len(bad):
            raise InvalidPrompt(
                f"prompt {index} holds token id {int(bad[0])}; the vocabulary is 0 to {top - 1}.", index=index
            )

    def _cut(self, ids: NDArray[np.int64], spec: CaptureSpec, index: int) -> tuple[NDArray[np.int32], int]:
        """The tokens kept and the place of the first of them."""
        limit = self.context_length
        if limit is None or len(ids) <= limit:
            return ids.astype(np.int32), 0
        if spec.truncate is None:
            raise PromptTooLong(
                f"prompt {index} has {len(ids)} tokens; there is room for {limit}, which is the model's context, or "
                "one less where the engine draws a token. Shorten it, or pass truncate='left' or 'right'.",
                index=index,
            )
        start = len(ids) - limit if spec.truncate == "left" else 0
        return ids[start : start + limit].astype(np.int32), start

    def _own_positions(
        self, prompt: Prompt, tokens: Tokens, start: int, spec: CaptureSpec, index: int
    ) -> NDArray[np.int32] | None:
        if prompt.positions is not None:
            return choose_positions(prompt.positions, tokens.token_ids, index=index)
        if not is_own_to_prompt(spec.positions):
            return None
        of_role = None
        if isinstance(spec.positions, str):
            if prompt.messages is None:
                raise InvalidPositions(
                    f"prompt {index} is not chat messages, so positions {spec.positions!r} names no turn in it."
                )
            whole = role_positions(self, prompt, spec.positions.removeprefix(ROLE), spec, index)
            of_role = whole[(whole >= start) & (whole < start + len(tokens.token_ids))] - start
        excluded = self.special_ids if spec.exclude_special_tokens else None
        return choose_positions(
            spec.positions, tokens.token_ids, excluded_ids=excluded, role_positions=of_role, index=index
        )

    def _warn_of_double_bos(self, prompts: Sequence[Prompt], ids: Sequence[NDArray[np.int64]], first: int) -> None:
        bos = getattr(self.tokenizer, "bos_token_id", None)
        if bos is None:
            return
        for i, (prompt, each) in enumerate(zip(prompts, ids, strict=True)):
            if prompt.token_ids is None and len(each) > 1 and each[0] == bos and each[1] == bos:
                warnings.warn(
                    f"prompt {first + i} starts with two BOS tokens: its text has one and the tokenizer adds one.",
                    stacklevel=2,
                )
                return


def _filled(found: list[Any], places: Sequence[int], values: Sequence[Any]) -> list[Any]:
    filled = list(found)
    for place, value in zip(places, values, strict=True):
        filled[place] = value
    return filled
