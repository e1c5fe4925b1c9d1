"""Prompts to the keys under which the cache holds them, tokenising only what it has not seen."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamtap.cache import CacheStore, PromptKey
from streamtap.engines.tokenizing import Tokens
from streamtap.errors import MissingExtra, NotCached
from streamtap.fingerprint import fingerprint, text_digest, tokens_digest
from streamtap.positions import canonical_positions, choose_positions, is_own_to_prompt
from streamtap.spec import CaptureSpec, Prompt
from streamtap.workbench.model_source import ModelSource


@dataclass(frozen=True)
class Keyed:
    """Keys of prompts, in the caller's order.

    ``rows[i]`` finds prompt i's rows, ``tokens[i]`` what depends on its tokens alone; ``cut_from``
    its length before truncation, else 0. ``fresh`` are the keys that were not in the store.
    """

    rows: list[bytes]
    tokens: list[bytes]
    cut_from: list[int]
    fresh: dict[bytes, PromptKey]


class PromptKeys:
    """Finds the keys of prompts for one model and spec."""

    def __init__(self, store: CacheStore, source: ModelSource, spec: CaptureSpec) -> None:
        self._store, self._source, self._spec = store, source, spec
        # A mask function cannot be named, so what it chose is not remembered by text.
        self._asked = replace(spec, positions="all") if callable(spec.positions) else spec

    def find(self, prompts: Sequence[Prompt]) -> Keyed:
        """Keys of ``prompts``.

        Raises:
            InvalidPrompt: one of them cannot be run; its index is named.
            NotCached: one was never seen, and what would tokenise it is not installed.
        """
        digests, cut_from, fresh = self._by_text(prompts)
        if callable(self._spec.positions):
            return self._with_mask(digests, cut_from, fresh)
        if is_own_to_prompt(self._spec.positions) or any(prompt.positions is not None for prompt in prompts):
            keys = self.keys(digests, fresh)
            return Keyed(digests, [tokens_digest(key.token_ids) for key in keys], cut_from, fresh)
        return Keyed(digests, digests, cut_from, fresh)

    def keys(self, digests: Sequence[bytes], fresh: dict[bytes, PromptKey]) -> list[PromptKey]:
        """Whole keys, with token ids, from ``fresh`` or the store."""
        stored = [digest for digest in digests if digest not in fresh]
        known = dict(fresh)
        if stored:
            ids, positions = self._store.token_ids(stored), self._store.own_positions(stored)
            known.update({d: PromptKey(d, i, p) for d, i, p in zip(stored, ids, positions, strict=True)})
        return [known[digest] for digest in digests]

    def check_positions(self, keys: Sequence[PromptKey], places: Sequence[int]) -> None:
        """Refuse positions that a prompt does not have, before anything is run.

        ``places`` are the indices of the keys' prompts in the list that the caller gave.

        Raises:
            InvalidPositions: a prompt's index and what it lacks.
        """
        spec = self._spec
        if canonical_positions(spec.positions) == "all" and not spec.exclude_special_tokens:
            return
        for key, place in zip(keys, places, strict=True):
            if key.positions is None:
                self._chosen(key, place)

    def _by_text(self, prompts: Sequence[Prompt]) -> tuple[list[bytes], list[int], dict[bytes, PromptKey]]:
        digests: list[Any] = [None] * len(prompts)
        cut_from, fresh = [0] * len(prompts), dict[bytes, PromptKey]()
        # A text with positions of its own is another prompt than the text alone, under the same name.
        named = [i for i, prompt in enumerate(prompts) if prompt.token_ids is None and prompt.positions is None]
        texts = [_named(prompts[i]) for i in named]
        context = self._context() if named else b""
        for i, found in zip(named, self._store.recall_texts(context, texts) if named else [], strict=True):
            if found is not None:
                digests[i], cut_from[i] = found
        unseen = [i for i, digest in enumerate(digests) if digest is None]
        for run in _runs(unseen):
            for i, tokens in zip(run, self._encoded([prompts[i] for i in run], run[0]), strict=True):
                key = PromptKey(tokens_digest(tokens.token_ids, tokens.positions), tokens.token_ids, tokens.positions)
                digests[i], cut_from[i], fresh[key.digest] = key.digest, tokens.cut_from, key
        of_text = dict(zip(named, texts, strict=True))
        new = [i for i in unseen if i in of_text]
        if new:
            self._store.remember_texts(
                context, [of_text[i] for i in new], [fresh[digests[i]] for i in new], [cut_from[i] for i in new]
            )
        return digests, cut_from, fresh

    def _encoded(self, prompts: Sequence[Prompt], first_index: int) -> list[Tokens]:
        try:
            return self._source.encode(prompts, self._asked, first_index)
        except MissingExtra as error:
            raise NotCached(f"prompt {first_index} and maybe others are not in the cache, and {error}") from error

    def _with_mask(self, digests: list[bytes], cut_from: list[int], fresh: dict[bytes, PromptKey]) -> Keyed:
        rows, tokens, masked = [], [], dict(fresh)
        for i, key in enumerate(self.keys(digests, fresh)):
            bare = key.digest
            if key.positions is None:
                positions = self._chosen(key, i)
                key = PromptKey(tokens_digest(key.token_ids, positions), key.token_ids, positions)
            else:  # the prompt's own go before the mask
                bare = tokens_digest(key.token_ids)
            masked[key.digest] = key
            rows.append(key.digest)
            tokens.append(bare)
        return Keyed(rows, tokens, cut_from, masked)

    def _chosen(self, key: PromptKey, index: int) -> NDArray[np.int32]:
        excluded = self._special_ids if self._spec.exclude_special_tokens else None
        return choose_positions(self._spec.positions, key.token_ids, excluded_ids=excluded, index=index)

    @cached_property
    def _special_ids(self) -> NDArray[np.int32]:
        return np.asarray(self._source.tokenizer_limits["special_ids"], np.int32)

    def _context(self) -> bytes:
        own = self._asked.positions if is_own_to_prompt(self._asked.positions) else None
        rules = {
            "tokenizer": self._source.provenance.tokenizer,
            "limits": dict(self._source.tokenizer_limits),
            "truncate": self._asked.truncate,
            "generation_prompt": self._asked.generation_prompt,
            "own_positions": own,
            "exclude_special_tokens": self._asked.exclude_special_tokens if own else None,
        }
        return text_digest(fingerprint(rules))


def _named(prompt: Prompt) -> bytes:
    if prompt.text is not None:
        return text_digest("text:" + prompt.text)
    return text_digest("chat:" + json.dumps(prompt.messages, ensure_ascii=True))


def _runs(places: Sequence[int]) -> list[list[int]]:
    """Neighbouring places together, so that an error names the right prompt."""
    runs: list[list[int]] = []
    for place in places:
        if runs and runs[-1][-1] == place - 1:
            runs[-1].append(place)
        else:
            runs.append([place])
    return runs
