"""Where a cache's values come from: a named model, loaded only when it must run, or an engine at hand."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from streamtap.activations import Provenance
from streamtap.cache import CacheStore
from streamtap.engines.base import IN_MEMORY, Engine, HoldsWeights
from streamtap.engines.demo_model import DEMO, is_unpacked
from streamtap.engines.opening import load_engine
from streamtap.engines.references import ModelReference, find_model, tokenizer_fingerprint
from streamtap.engines.tokenizing import PromptTokenizer, Tokens
from streamtap.errors import InvalidInput, MissingExtra, NotCached
from streamtap.fingerprint import fingerprint
from streamtap.settings import Settings
from streamtap.spec import CaptureSpec, Prompt
from streamtap.workbench.identity import identity_of
from streamtap.workbench.load_options import LoadOptions
from streamtap.workbench.pulled import PulledModel, find_pulled, pulled_models
from streamtap.workbench.served_model import ServedModel
from streamtap.workbench.tokenizer_limits import limits_of

# Raised when what is remembered of a model changes its form; old memos are then not believed.
_MEMO_LAYOUT = 1


class ModelSource(Protocol):
    """A model as the cache sees it: who it is, how it tokenises, and an engine when rows must be made."""

    @property
    def provenance(self) -> Provenance:
        """Where its rows come from."""
        ...

    @property
    def tokenizer_limits(self) -> Mapping[str, Any]:
        """``context_length``, ``vocabulary`` and ``special_ids``: what tokenising depends on beside the files."""
        ...

    def encode(self, prompts: Sequence[Prompt], spec: CaptureSpec, first_index: int) -> list[Tokens]:
        """Tokenise prompts."""
        ...

    def engine(self) -> Engine:
        """The engine, loaded at the first call."""
        ...

    @property
    def is_only_known(self) -> bool:
        """Whether the model itself was not found."""
        ...

    @property
    def may_change(self) -> bool:
        """Whether what is known of it may be otherwise once its engine is open."""
        ...

    def may_be(self, provenance: Provenance) -> bool:
        """Whether rows of ``provenance`` are this model's, as far as can be told without loading it."""
        ...

    def close(self) -> None:
        """Close the engine that it opened, if any; the next ``engine`` opens it anew. One that was given stays open."""
        ...


_HUB_COMMIT = re.compile(r"[0-9a-f]{40}")


def model_source(
    model: str | Path | Engine, options: LoadOptions, store: CacheStore, settings: Settings
) -> ModelSource:
    """The source that ``model`` means.

    Raises:
        InvalidInput: neither a name nor an engine, or an engine with options that only loading has.
    """
    if isinstance(model, str | Path):
        if options.backend == "api":
            return ServedModel(str(model), options, store, settings)
        return NamedModel(str(model), options, store, settings)
    if not isinstance(model, Engine):
        raise InvalidInput(
            f"model must be a name, a path or an engine; got {type(model).__name__}. "
            "Wrap a loaded model: TransformersEngine(model, tokenizer)."
        )
    if asked := options.asked():
        raise InvalidInput(f"{', '.join(asked)} cannot be set for an engine, which is loaded already; set it there.")
    return GivenEngine(model)


class GivenEngine:
    """An engine that the caller made; a model without a commit is told by its weights, as they are now."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self.provenance: Provenance = engine.provenance
        if self.provenance.commit == IN_MEMORY:
            if not isinstance(engine, HoldsWeights):
                raise InvalidInput(
                    f"{type(engine).__name__} names no commit of its model, so its rows have no identity."
                )
            self.provenance = replace(self.provenance, commit=engine.weights_hash())

    @property
    def tokenizer_limits(self) -> Mapping[str, Any]:
        """The engine's tokenizer's."""
        return limits_of(self._engine.tokenizer)

    def encode(self, prompts: Sequence[Prompt], spec: CaptureSpec, first_index: int) -> list[Tokens]:
        """Tokenise with the engine's tokenizer."""
        with self._lock:
            return self._engine.tokenizer.encode(prompts, spec, first_index)

    def engine(self) -> Engine:
        """The engine itself."""
        return self._engine

    @property
    def is_only_known(self) -> bool:
        """Never."""
        return False

    @property
    def may_change(self) -> bool:
        """Never."""
        return False

    def may_be(self, provenance: Provenance) -> bool:
        """Whether it is the engine's model."""
        return identity_of(provenance) == identity_of(self.provenance)

    def close(self) -> None:
        """Leave the engine to whom it belongs."""


class NamedModel:
    """A model by name; what was once learnt by loading it is kept in the store.

    So a process that finds everything in the cache loads neither model nor torch. Threads may share it.
    """

    def __init__(self, name: str, options: LoadOptions, store: CacheStore, settings: Settings) -> None:
        self._name, self._options, self._store, self._settings = name, options, store, settings
        self._lock = threading.RLock()
        self._loaded: Engine | None = None
        self._tokenizer: PromptTokenizer | None = None
        self._known: dict[str, Any] | None = None
        self._pulled: PulledModel | None = None
        self._is_needed = False

    @property
    def is_only_known(self) -> bool:
        """Whether the model is known from datasets alone, and is not on this machine."""
        with self._lock:
            self._facts()
            return self._pulled is not None

    @property
    def may_change(self) -> bool:
        """Where datasets alone tell of it."""
        return self.is_only_known

    @property
    def provenance(self) -> Provenance:
        """From the store, or from the model once it is loaded."""
        return Provenance(**self._facts()["provenance"])

    @property
    def tokenizer_limits(self) -> Mapping[str, Any]:
        """From the store, or from the model once it is loaded."""
        return dict(self._facts()["tokenizer"])

    def encode(self, prompts: Sequence[Prompt], spec: CaptureSpec, first_index: int) -> list[Tokens]:
        """Tokenise with the model's tokenizer, which does not load the model; token ids do not need even that."""
        if all(prompt.token_ids is not None for prompt in prompts):
            return PromptTokenizer(None, **self.tokenizer_limits).encode(prompts, spec, first_index)
        with self._lock:
            if self.is_only_known:
                self.engine()
            if self._tokenizer is None:
                self._tokenizer = self._open_tokenizer()
            return self._tokenizer.encode(prompts, spec, first_index)

    def may_be(self, provenance: Provenance) -> bool:
        """By what is remembered of it; else by its name and the commit that is on this machine."""
        with self._lock:
            try:
                reference = self._reference
            except InvalidInput:  # a path of the machine that made the rows
                return self._name == provenance.model
            key = self._key(reference)
            known = self._known or (self._store.recall(key) if key else None)
            if known is not None:
                return identity_of(provenance) == identity_of(Provenance(**known["provenance"]))
            here = reference.commit
            return self._name == provenance.model if here is None else here == provenance.commit

    def engine(self) -> Engine:
        """Load the model, at the first call."""
        with self._lock:
            if self._loaded is None:
                self._pin()
                try:
                    self._loaded = self._load()
                except (MissingExtra, InvalidInput, OSError) as error:
                    if self._pulled is None:
                        self._refuse_other_quantisation(error)
                        raise
                    raise NotCached(
                        f"of {self._name} only rows that were pulled are here; others were asked for, and the model "
                        f"cannot be loaded ({type(error).__name__}). Pull what lacks, or bring the model to this "
                        "machine."
                    ) from error
            return self._loaded

    def close(self) -> None:
        """Close the engine, if it was loaded."""
        with self._lock:
            loaded, self._loaded = self._loaded, None
        if loaded is not None:
            loaded.close()

    def _refuse_other_quantisation(self, error: Exception) -> None:
        kinds = {each.provenance.quantization for each in pulled_models(self._store, self._name)} - {None}
        if kinds and self._options.quantization is None:
            raise NotCached(
                f"of {self._name} only rows of the quantised model were pulled "
                f"(quantization={' or '.join(map(repr, sorted(map(str, kinds))))}), and the model cannot be loaded "
                f"({type(error).__name__}). Ask for them with quantization=, or bring the model to this machine."
            ) from error

    def _load(self) -> Engine:
        key = self._key(self._reference)
        loaded: Engine = load_engine(self._name, reference=self._reference, **self._options.arguments())
        self._learn(loaded, key)
        return loaded

    @cached_property
    def _reference(self) -> ModelReference:
        # Looking for it would unpack it, which takes half a minute, and pulled rows do without.
        is_packed = self._name == DEMO and not self._is_needed and not is_unpacked(self._settings)
        if is_packed and self._options.backend == "local" and pulled_models(self._store, DEMO):
            return ModelReference(DEMO, None)
        try:
            return find_model(
                self._name,
                self._options.revision,
                settings=self._settings,
                recall=self._store.recall,
                remember=self._store.remember,
            )
        except InvalidInput:
            # A path of the machine that published.
            if not pulled_models(self._store, self._name):
                raise
            return ModelReference(self._name, None, revision=self._options.revision)

    def _pin(self) -> None:
        """Load the commit that the pulled rows are of, and not what the Hub has by now."""
        self._is_needed = True
        if self._pulled is None:
            return
        commit = self._pulled.provenance.commit
        if self._options.revision is None and _HUB_COMMIT.fullmatch(commit):
            self._options = replace(self._options, revision=commit)
        self.__dict__.pop("_reference", None)

    def _facts(self) -> dict[str, Any]:
        with self._lock:
            if self._known is None and (key := self._key(self._reference)):
                self._known = self._store.recall(key)
            if self._known is None:
                self._pulled = self._find_pulled()
                if self._pulled is not None:
                    about = self._pulled
                    self._known = {"provenance": asdict(about.provenance), "tokenizer": dict(about.limits)}
            if self._known is None:
                self.engine()
            assert self._known is not None
            return self._known

    def _find_pulled(self) -> PulledModel | None:
        """What was pulled of this model, as long as it was never loaded here; other backends make rows of their own."""
        if self._options.backend != "local":
            return None
        here = self._reference.commit
        asked = self._options.revision if here is None else here
        return find_pulled(self._store, self._name, asked, self._options.dtype, self._options.quantization)

    def _learn(self, engine: Engine, key: str | None) -> None:
        self._pulled = None
        self._known = {"provenance": asdict(engine.provenance), "tokenizer": dict(limits_of(engine.tokenizer))}
        if key is None:  # downloaded just now
            self.__dict__.pop("_reference")
            key = self._key(self._reference)
        if key is not None:
            self._store.remember(key, self._known)

    def _key(self, reference: ModelReference) -> str | None:
        """What the memo is kept under; None while the files, which decide it, are not on this machine."""
        if reference.commit is None:
            return None
        options = self._options
        asked: dict[str, Any] = {
            "dtype": options.dtype,
            "quantization": str(options.quantization),
            "attention": options.attention,
            # A Hub commit covers its tokenizer.
            "tokenizer": None if reference.is_hub else tokenizer_fingerprint(reference),
        }
        if options.backend != "local":
            asked |= {
                "backend": options.backend,
                "remote": options.remote,
                "more": repr(sorted(options.engine_options.items())),
            }
        return "model:" + fingerprint({"layout": _MEMO_LAYOUT, "name": self._name, "commit": reference.commit, **asked})

    def _open_tokenizer(self) -> PromptTokenizer:
        if self._loaded is not None:
            return self._loaded.tokenizer
        if self._options.backend == "local":
            import_module("streamtap.engines.transformers")  # which says what to install where torch is missing
        from streamtap.engines.tokenizer_files import load_tokenizer

        return PromptTokenizer(load_tokenizer(self._reference), **self.tokenizer_limits)
