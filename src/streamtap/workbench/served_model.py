"""A model that a running service has: what it told is kept, so that a cache which holds everything asks nothing."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from streamtap.activations import Provenance
from streamtap.cache import CacheStore
from streamtap.engines.api_tokenizer import kept_tokenizer
from streamtap.engines.base import Engine
from streamtap.engines.demo_model import DEMO, is_unpacked
from streamtap.engines.opening import load_engine
from streamtap.engines.references import ModelReference, find_model
from streamtap.engines.tokenizing import PromptTokenizer, Tokens
from streamtap.errors import InvalidInput, MissingExtra
from streamtap.fingerprint import fingerprint
from streamtap.settings import Settings
from streamtap.spec import CaptureSpec, Prompt
from streamtap.workbench.identity import identity_of
from streamtap.workbench.load_options import LoadOptions
from streamtap.workbench.tokenizer_limits import limits_of

_MEMO_LAYOUT = 1


class ServedModel:
    """A ``ModelSource`` for the service's id ``name``. Threads may share it."""

    is_only_known = False

    def __init__(self, name: str, options: LoadOptions, store: CacheStore, settings: Settings) -> None:
        self._name, self._options, self._store, self._settings = name, options, store, settings
        base = (options.api_base or settings.api_base or "").rstrip("/")
        asked = {"name": name, "base": base, "dtype": options.dtype, "revision": options.revision}
        self._key = "served:" + fingerprint({"layout": _MEMO_LAYOUT, **asked})
        self._lock = threading.RLock()
        self._engine: Engine | None = None
        self._tokenizer: PromptTokenizer | None = None

    @property
    def provenance(self) -> Provenance:
        """As the service told it, now or once before."""
        return Provenance(**self._facts()["provenance"])

    @property
    def tokenizer_limits(self) -> Mapping[str, Any]:
        """As the service told them."""
        return dict(self._facts()["tokenizer"])

    def encode(self, prompts: Sequence[Prompt], spec: CaptureSpec, first_index: int) -> list[Tokens]:
        """Tokenise here; token ids need no tokenizer."""
        with self._lock:
            if all(prompt.token_ids is not None for prompt in prompts):
                return PromptTokenizer(None, **self.tokenizer_limits).encode(prompts, spec, first_index)
            if self._tokenizer is None:
                self._tokenizer = self._read_tokenizer()
            return self._tokenizer.encode(prompts, spec, first_index)

    def engine(self) -> Engine:
        """The engine, which asks the service at the first call."""
        with self._lock:
            if self._engine is None:
                self._engine = load_engine(self._name, **self._options.arguments())
                about = {"provenance": asdict(self._engine.provenance), "tokenizer": limits_of(self._engine.tokenizer)}
                self._store.remember(self._key, about)
            return self._engine

    def may_be(self, provenance: Provenance) -> bool:
        """Whether rows of ``provenance`` came from there."""
        known = self._store.recall(self._key)
        if known is None:
            return self._name == provenance.model
        return identity_of(provenance) == identity_of(Provenance(**known["provenance"]))

    def _facts(self) -> Mapping[str, Any]:
        with self._lock:
            known = self._store.recall(self._key)
            if known is None:
                self.engine()
                known = self._store.recall(self._key)
            assert known is not None
            return known

    def _read_tokenizer(self) -> PromptTokenizer:
        # Without a request where that can be: the service may be away while everything is in the cache.
        if "tokenizer" not in self._options.engine_options:
            with suppress(InvalidInput, MissingExtra):
                if (found := self._files()) is not None and (read := kept_tokenizer(found, self._settings)) is not None:
                    return PromptTokenizer(read, **self.tokenizer_limits)
        return self.engine().tokenizer

    def _files(self) -> ModelReference | None:
        """The small files of the model that is served, where they are on this machine."""
        name = self.provenance.model
        if name == DEMO and not is_unpacked(self._settings):
            return None
        store = self._store
        found = find_model(
            name, self._options.revision, settings=self._settings, recall=store.recall, remember=store.remember
        )
        return None if found.folder is None else found
