"""Prompts to the keys under which the cache holds them, tokenising only what it has not seen."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamtap.activations import Provenance
from streamtap.cache import CacheStore, PromptKey
from streamtap.engines.tokenizing import Tokens
from streamtap.errors import MissingExtra, NotCached
from streamtap.fingerprint import fingerprint, text_digest, tokens_digest
from streamtap.positions import canonical_positions, choose_positions, is_own_to_prompt
from streamtap.spec import CaptureSpec, Prompt
from streamtap.workbench.identity import identity_of
from streamtap.workbench.model_source import ModelSource

#: Under this context lie texts whose rows were pulled without their tokens.
BY_TEXT = text_digest("rows by text alone")


@dataclass(frozen=True)
class Keyed:
    """Keys of prompts, in the caller's order.

    ``rows[i]`` finds prompt i's rows, ``tokens[i]`` what depends on its tokens alone, ``texts[i]`` rows that were
    pulled by text alone; ``cut_from`` is its length before truncation, else 0. ``fresh`` are the keys that were not in
    the store.
    """

    rows: list[bytes]
    tokens: list[bytes]
    cut_from: list[int]
    fresh: dict[bytes, PromptKey]
    texts: list[bytes] = field(default_factory=list)

    def by(self, kind: str) -> list[bytes]:
        """The keys of one kind: ``rows``, ``tokens`` or ``texts``."""
        return {"rows": self.rows, "tokens": self.tokens, "texts": self.texts or self.rows}[kind]


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
        keyed = self._find(prompts)
        # Also where every text is known already, of another dtype of the same model.
        remember_limits(self._store, self._source)
        # No prompt but a bare text has a name under which rows without token ids could lie.
        pairs = zip(prompts, keyed.rows, strict=True)
        return replace(keyed, texts=[prompt_name(each) if _is_bare_text(each) else own for each, own in pairs])

    def _find(self, prompts: Sequence[Prompt]) -> Keyed:
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

    def seen(self, prompts: Sequence[Prompt]) -> list[bytes | None]:
        """Digests of the texts and chats that were tokenised before, None for any other prompt."""
        found: list[bytes | None] = [None] * len(prompts)
        for i, (_, known) in self._recalled(prompts)[1].items():
            found[i] = known[0] if known else None
        return found

    def remember(self, prompts: Sequence[Prompt], keys: Sequence[PromptKey]) -> None:
        """Keep which key each text or chat has, though it was tokenised elsewhere."""
        remember_limits(self._store, self._source)
        names = [prompt_name(prompt) for prompt in prompts]
        self._store.remember_texts(self._context(), names, keys, [0] * len(keys))

    def _recalled(self, prompts: Sequence[Prompt]) -> tuple[bytes, dict[int, tuple[bytes, tuple[bytes, int] | None]]]:
        """The context, and for each text or chat, by its place, its name and what is known of it."""
        # A text with positions of its own is another prompt than the text alone, under the same name.
        named = [i for i, prompt in enumerate(prompts) if prompt.token_ids is None and prompt.positions is None]
        if not named:
            return b"", {}
        texts = [prompt_name(prompts[i]) for i in named]
        context = self._context()
        known = self._store.recall_texts(context, texts)
        return context, dict(zip(named, zip(texts, known, strict=True), strict=True))

    def _by_text(self, prompts: Sequence[Prompt]) -> tuple[list[bytes], list[int], dict[bytes, PromptKey]]:
        digests: list[Any] = [None] * len(prompts)
        cut_from, fresh = [0] * len(prompts), dict[bytes, PromptKey]()
        context, named = self._recalled(prompts)
        for i, (_, known) in named.items():
            if known is not None:
                digests[i], cut_from[i] = known
        bare = [i for i in named if digests[i] is None and prompts[i].text is not None]
        if bare and self._may_go_by_text:
            # There may be no tokenizer, and rows of these need none.
            for i, known in zip(bare, self._store.recall_texts(BY_TEXT, [named[i][0] for i in bare]), strict=True):
                digests[i] = known[0] if known else None
        unseen = [i for i, digest in enumerate(digests) if digest is None]
        for run in _runs(unseen):
            for i, tokens in zip(run, self._encoded([prompts[i] for i in run], run[0]), strict=True):
                key = PromptKey(tokens_digest(tokens.token_ids, tokens.positions), tokens.token_ids, tokens.positions)
                digests[i], cut_from[i], fresh[key.digest] = key.digest, tokens.cut_from, key
        new = [i for i in unseen if i in named]
        if new:
            texts = [named[i][0] for i in new]
            self._store.remember_texts(context, texts, [fresh[digests[i]] for i in new], [cut_from[i] for i in new])
        return digests, cut_from, fresh

    @property
    def _may_go_by_text(self) -> bool:
        asked = self._spec
        is_plain = not (asked.exclude_special_tokens or asked.exact or callable(asked.positions))
        return is_plain and canonical_positions(asked.positions) == "all" and self._source.is_only_known

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


def remember_limits(store: CacheStore, source: ModelSource) -> None:
    """Keep what tokenising depends on beside the files, so that texts are found again without the model."""
    key, limits = _limits_key(source.provenance), dict(source.tokenizer_limits)
    if store.recall(key) != limits:
        store.remember(key, limits)


def recall_limits(store: CacheStore, provenance: Provenance) -> dict[str, Any] | None:
    """What was kept of a model's tokenizer, None where nothing was."""
    return store.recall(_limits_key(provenance))


def _limits_key(provenance: Provenance) -> str:
    return "limits:" + fingerprint(identity_of(provenance))


def prompt_name(prompt: Prompt) -> bytes:
    """16 bytes by which a text or chat is found before it is tokenised."""
    if prompt.text is not None:
        return text_digest("text:" + prompt.text)
    return text_digest("chat:" + json.dumps(prompt.messages, ensure_ascii=True))


def _is_bare_text(prompt: Prompt) -> bool:
    return prompt.text is not None and prompt.positions is None


def _runs(places: Sequence[int]) -> list[list[int]]:
    """Neighbouring places together, so that an error names the right prompt."""
    runs: list[list[int]] = []
    for place in places:
        if runs and runs[-1][-1] == place - 1:
            runs[-1].append(place)
        else:
            runs.append([place])
    return runs
