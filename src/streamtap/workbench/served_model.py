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
from streamtap.engines.opening import load_engine
from streamtap.engines.references import tokenizer_fingerprint
from streamtap.engines.tokenizing import PromptTokenizer, Tokens
from streamtap.errors import InvalidInput, MissingExtra
from streamtap.fingerprint import fingerprint
from streamtap.settings import Settings
from streamtap.spec import CaptureSpec, Prompt
from streamtap.workbench.identity import identity_of
from streamtap.workbench.load_options import LoadOptions
from streamtap.workbench.served_tokenizer import small_files, told_apart_by
from streamtap.workbench.tokenizer_limits import limits_of

_MEMO_LAYOUT = 2


class ServedModel:
    """A ``ModelSource`` for the service's id ``name``. Threads may share it.

    What it knows is the cache's memory of the service at first, and what the service tells once the engine is open.
    """

    is_only_known = False

    def __init__(self, name: str, options: LoadOptions, store: CacheStore, settings: Settings) -> None:
        self._name, self._options, self._store, self._settings = name, options, store, settings
        self._lock = threading.RLock()
        self._engine: Engine | None = None
        self._tokenizer: PromptTokenizer | None = None
        self._known: Mapping[str, Any] | None = None

    @property
    def may_change(self) -> bool:
        """Where the service was not asked yet."""
        with self._lock:
            self._facts()
            return self._engine is None

    @property
    def provenance(self) -> Provenance:
        """As the service told it, now or once before."""
        return Provenance(**self._facts()["provenance"])

    @property
    def tokenizer_limits(self) -> Mapping[str, Any]:
        """As the service told them."""
        return dict(self._facts()["tokenizer"])

    def encode(self, prompts: Sequence[Prompt], spec: CaptureSpec, first_index: int) -> list[Tokens]:
        """Tokenise here; token ids need no tokenizer.

        Raises:
            InvalidInput: the service had to be asked for it, and the tokenizer is another than was remembered.
        """
        with self._lock:
            if all(prompt.token_ids is not None for prompt in prompts):
                return PromptTokenizer(None, **self.tokenizer_limits).encode(prompts, spec, first_index)
            if self._tokenizer is None:
                before = self._of_tokenizing()
                self._tokenizer = self._read_tokenizer()
                if self._of_tokenizing() != before:  # and the caller keeps these tokens under what was told before
                    raise InvalidInput(
                        f"the tokenizer of {self.provenance.model} is another than the cache remembers, since the "
                        "service or the files on this machine have changed; ask again, and the new one is taken."
                    )
            return self._tokenizer.encode(prompts, spec, first_index)

    def engine(self) -> Engine:
        """The engine, which asks the service at the first call."""
        with self._lock:
            if self._engine is None:
                self._engine = load_engine(self._name, **self._options.arguments())
                self._learn(self._engine)
            return self._engine

    def may_be(self, provenance: Provenance) -> bool:
        """Whether rows of ``provenance`` came from there."""
        with self._lock:
            known = self._known or self._recalled()
        if known is None:
            return self._name == provenance.model
        return identity_of(provenance) == identity_of(Provenance(**known["provenance"]))

    def close(self) -> None:
        """Close the engine, if the service was asked."""
        with self._lock:
            opened, self._engine = self._engine, None
        if opened is not None:
            opened.close()

    def _facts(self) -> Mapping[str, Any]:
        with self._lock:
            if self._known is None:
                self._known = self._recalled()
            if self._known is None:
                self.engine()
            assert self._known is not None
            return self._known

    def _learn(self, engine: Engine) -> None:
        told = getattr(engine, "told", None)
        self._tokenizer = engine.tokenizer
        self._known = {
            "provenance": asdict(engine.provenance),
            "tokenizer": dict(limits_of(engine.tokenizer)),
            # Of the tokenizer's files, as the engine read them.
            "revision": self._options.revision or getattr(told, "revision", None),
        }
        if (key := self._key()) is not None:
            self._store.remember(key, self._known)

    def _recalled(self) -> Mapping[str, Any] | None:
        key = self._key()
        return None if key is None else self._store.recall(key)

    def _key(self) -> str | None:
        """What the memory is kept under; None while the files of the tokenizer that was named are not here."""
        options = self._options
        # The engine's other options change how rows come, and not what is remembered.
        tokenizer = told_apart_by(options.engine_options.get("tokenizer"), self._settings)
        if tokenizer is None:
            return None
        base = (options.api_base or self._settings.api_base or "").rstrip("/")
        asked = {"name": self._name, "base": base, "dtype": options.dtype, "revision": options.revision}
        return "served:" + fingerprint({"layout": _MEMO_LAYOUT, **asked, "tokenizer": tokenizer})

    def _of_tokenizing(self) -> tuple[str, Mapping[str, Any]]:
        return self.provenance.tokenizer, self.tokenizer_limits

    def _read_tokenizer(self) -> PromptTokenizer:
        # Without a request where that can be: the service may be away while everything is in the cache.
        if "tokenizer" not in self._options.engine_options:
            with suppress(InvalidInput, MissingExtra):
                if (read := self._from_files()) is not None:
                    return PromptTokenizer(read, **self.tokenizer_limits)
        return self.engine().tokenizer

    def _from_files(self) -> Any:
        """The tokenizer that the rows were made with, where its very files are on this machine."""
        about = self.provenance
        found = small_files(about.model, self._facts()["revision"], self._settings)
        if found is None or tokenizer_fingerprint(found) != about.tokenizer:
            return None
        return kept_tokenizer(found, self._settings)
