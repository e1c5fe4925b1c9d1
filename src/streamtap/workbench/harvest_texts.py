"""Texts of a harvest's prompts, which keeps their tokens alone: given again and compared, or read off the tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from streamtap.engines.references import find_model, tokenizer_fingerprint
from streamtap.engines.tokenizing import PromptTokenizer
from streamtap.errors import InvalidInput, InvalidPrompt
from streamtap.settings import Settings
from streamtap.spec import CaptureSpec, Prompt
from streamtap.workbench.harvested_rows import HarvestedRows
from streamtap.workbench.prompt_texts import dataset_texts
from streamtap.workbench.tokenizing_rules import AS_TOKENS, CHAT, may_be_cut, plain_rule

Ints = NDArray[np.int64]

_AT_ONCE = 512
#: Harvests lose the end of what is longer than the context.
_CUT = 1
_HUB_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class HarvestTexts:
    """One text a prompt, and how it became its tokens: int64 [prompts], as ``tokenized_as`` of a dataset."""

    texts: list[str]
    tokenized_as: Ints


def open_tokenizer(rows: HarvestedRows, model: str | Path | None = None) -> PromptTokenizer:
    """The tokenizer of the harvested model, which is called ``model`` on this machine; None takes the harvest's name.

    Raises:
        MissingExtra: transformers is not installed.
        InvalidInput: there is no such model, or it has no tokenizer, or another one.
    """
    about = rows.provenance
    name = str(model or about.model)
    is_commit = _HUB_COMMIT.fullmatch(about.commit) is not None
    reference = find_model(name, settings=Settings.from_environment())
    if reference.is_hub and is_commit:
        reference = find_model(name, about.commit, settings=Settings.from_environment())
    here = tokenizer_fingerprint(reference)
    # Of a Hub commit some files may not be here yet, and the commit says as much.
    if not (reference.is_hub and is_commit) and here != about.tokenizer:
        raise InvalidInput(
            f"the tokenizer of {name} is not the one that {rows.name} was harvested with; name the model that was."
        )
    # The engine's module first: it says what to install where torch is missing.
    import_module("streamtap.engines.transformers")
    from streamtap.engines.tokenizer_files import load_tokenizer

    return PromptTokenizer(load_tokenizer(reference), **rows.limits)


def read_texts(rows: HarvestedRows, tokenizer: PromptTokenizer) -> HarvestTexts:
    """What the tokens say; where a text gives these tokens again, it stands for its prompt, else for its tokens alone.

    Raises:
        InvalidInput: there is no tokenizer.
    """
    texts: list[str] = []
    numbers = np.full(len(rows.harvest), AS_TOKENS, np.int64)
    for start, stop in _stretches(len(rows.harvest)):
        for ids in rows.token_ids(start, stop):
            text = tokenizer.text_of(ids, special_tokens=False)
            if _gives(tokenizer, text, ids):
                numbers[len(texts)] = 0
            else:
                text = tokenizer.text_of(ids, special_tokens=True)
            texts.append(text)
    return HarvestTexts(texts, numbers)


def given_texts(rows: HarvestedRows, prompts: Sequence[Prompt], tokenizer: PromptTokenizer) -> HarvestTexts:
    """Those of ``prompts``, if they are what was harvested, in its order.

    Raises:
        InvalidInput: they are others; the first that differs is named.
    """
    if len(prompts) != len(rows.harvest):
        raise InvalidInput(
            f"{rows.name} is of {len(rows.harvest)} prompts, and {len(prompts)} were given; give those that were "
            "harvested, in their order."
        )
    texts = dataset_texts(prompts)
    numbers = np.zeros(len(prompts), np.int64)
    spec = CaptureSpec(truncate="right")
    for start, stop in _stretches(len(prompts)):
        found = tokenizer.encode(prompts[start:stop], spec, start, special_tokens=rows.add_special_tokens)
        for i, (tokens, ids) in enumerate(zip(found, rows.token_ids(start, stop), strict=True), start):
            if not np.array_equal(tokens.token_ids, ids):
                raise InvalidInput(
                    f"prompt {i} is not the one of {rows.name}: it gives {len(tokens.token_ids)} tokens, and "
                    f"{len(ids)} others were harvested. Give the prompts that were, in their order."
                )
            numbers[i] = _number(rows, prompts[i], tokenizer, ids, is_cut=bool(tokens.cut_from))
    return HarvestTexts(texts, numbers)


def _number(
    rows: HarvestedRows, prompt: Prompt, tokenizer: PromptTokenizer, ids: NDArray[np.int32], *, is_cut: bool
) -> int:
    is_chat = prompt.messages is not None
    if not (is_chat or rows.add_special_tokens or _begins(tokenizer, str(prompt.text), ids, is_cut=is_cut)):
        return AS_TOKENS
    cut = may_be_cut(_CUT, len(ids), tokenizer.context_length)
    return plain_rule(_CUT, is_chat=is_chat, may_be_cut=cut) + CHAT * is_chat


def _gives(tokenizer: PromptTokenizer, text: str, ids: NDArray[np.int32]) -> bool:
    """Whether a text, taken as a prompt in the plain way, is these tokens."""
    return _begins(tokenizer, text, ids, is_cut=False)


def _begins(tokenizer: PromptTokenizer, text: str, ids: NDArray[np.int32], *, is_cut: bool) -> bool:
    if not text:
        return False
    try:
        found = tokenizer.read(text, 0)
    except InvalidPrompt:
        return False
    return np.array_equal(found[: len(ids)] if is_cut else found, ids)


def _stretches(count: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + _AT_ONCE, count)) for start in range(0, count, _AT_ONCE))
