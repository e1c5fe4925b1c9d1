"""Tokens of a prompt, counted before any engine sees it, as the engine's own tokenizer counts them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from streamtap.engines.tokenizing import check_characters
from streamtap.errors import EmptyPrompt, InvalidPrompt, SettingsError
from streamtap.server.models.facts import ModelFacts

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_MORE = ("extra_special_tokens", "additional_special_tokens")


class TokenCounter:
    """Turns prompts of one model to token ids; may be used from many threads at once.

    Raises:
        SettingsError: the tokenizer's files cannot be read.
    """

    def __init__(self, facts: ModelFacts) -> None:
        self._facts = facts
        self._tokenizer = None if facts.tokenizer_file is None else _load(facts.tokenizer_file)

    def count(self, prompt: str | tuple[int, ...], add_special_tokens: bool = True, *, index: int = 0) -> int:
        """Tokens of ``prompt``, a BOS that is added among them.

        Raises:
            InvalidPrompt: as ``encode`` does.
        """
        return len(self.encode(prompt, add_special_tokens, index=index))

    def encode(self, prompt: str | tuple[int, ...], add_special_tokens: bool = True, *, index: int = 0) -> list[int]:
        """Token ids of ``prompt``, which is number ``index`` of its request; ids are taken as they are.

        Raises:
            InvalidPrompt: an id outside the vocabulary, text that is not Unicode, or text without a tokenizer.
            EmptyPrompt: it has no token.
        """
        if isinstance(prompt, str):
            ids = self._encoded(prompt, add_special_tokens, index)
        else:
            ids = list(prompt)
            self._check_vocabulary(ids, index)
        if not ids:
            raise EmptyPrompt(f"prompt {index} has no token; expected at least one.", index=index)
        return ids

    def _encoded(self, text: str, add_special_tokens: bool, index: int) -> list[int]:
        if self._tokenizer is None:
            raise InvalidPrompt(
                f"prompt {index} is text, but there is no tokenizer of {self._facts.checkpoint} here; send token ids.",
                index=index,
            )
        check_characters(text, index)
        # Unlike `encode` it lets other threads run meanwhile, which a text of megabytes would halt for seconds.
        (encoded,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoded.ids)

    def _check_vocabulary(self, ids: list[int], index: int) -> None:
        top = self._facts.vocabulary
        bad = next((each for each in ids if not 0 <= each < top), None)
        if bad is not None:
            raise InvalidPrompt(f"prompt {index} holds token id {bad}; the vocabulary is 0 to {top - 1}.", index=index)


def _load(file: Path) -> Tokenizer:
    text = file.read_text(encoding="utf-8", errors="replace")
    if "model" not in _object(text, file):
        raise SettingsError(f"{file} describes no tokenizer; expected the tokenizer.json of a model.")
    tokenizer: Tokenizer = Tokenizer.from_str(text)
    # What is written there is for batches; a prompt is neither cut nor padded.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    named = [AddedToken(each, special=True, normalized=False) for each in _special_tokens(_beside(file))]
    tokenizer.add_special_tokens([token for token in named if token.content not in known])
    return tokenizer


def _beside(file: Path) -> Mapping[str, Any]:
    """The tokenizer_config.json in the same folder, which may name special tokens that tokenizer.json lacks.

    Its switches for BOS and EOS count for nothing beside a tokenizer.json, to transformers as well.
    """
    config = file.with_name("tokenizer_config.json")
    return _object(config.read_text(encoding="utf-8", errors="replace"), config) if config.is_file() else {}


def _object(text: str, file: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise SettingsError(f"{file} cannot be read as JSON; is the checkpoint whole?") from error
    if not isinstance(found, dict):
        raise SettingsError(f"{file} holds no JSON object; is the checkpoint whole?")
    return found


def _special_tokens(config: Mapping[str, Any]) -> Iterator[str]:
    more = [config.get(name) for name in _MORE]
    listed = [each for values in more if isinstance(values, list) for each in values]
    for token in [*(config.get(name) for name in _NAMED), *listed]:
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str) and content:
            yield content
