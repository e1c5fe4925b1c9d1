"""What a probe of prompts needs: the rows of one layer, and examples in either form that ``fit`` takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from streamtap.errors import InvalidInput, PoolingMismatch
from streamtap.layers import LayerSpec, resolve_layers
from streamtap.pooling import Pooling, check_pooling
from streamtap.probes.labels import Labels, read_labels
from streamtap.spec import Prompt, PromptLike, as_prompts

if TYPE_CHECKING:
    from streamtap.engines.base import Engine
    from streamtap.workbench.unified_cache import UnifiedCache

#: What says how a model is run, and therefore means nothing beside a cache that has one.
_OF_THE_MODEL = ("model", "backend", "remote", "batch_size", "device", "dtype", "api_base", "api_key", "cache_dir")


@dataclass(eq=False)
class PromptRows:
    """Rows of prompts at one layer, from a ``UnifiedCache`` that is made when it is first needed, or from one given.

    The fields are the arguments of ``Probe`` of the same names; nothing is checked before ``take``.
    """

    model: str | Path | Engine | None = None
    layer: LayerSpec | None = None
    pooling: Pooling = "last_token"
    backend: str = "local"
    remote: bool = False
    batch_size: int | None = 8
    device: str = "auto"
    dtype: Any = None
    api_base: str | None = None
    api_key: str | None = field(default=None, repr=False)
    cache_dir: Path | str | None = None
    cache: UnifiedCache | None = None
    _made: UnifiedCache | None = field(default=None, init=False, repr=False)

    def take(self, prompts: Sequence[Prompt], fitted_layer: int | None = None) -> tuple[NDArray[Any], int]:
        """Rows [prompts, hidden] of ``prompts`` in the model's dtype, and the number of their layer.

        ``fitted_layer`` is the one that a probe has learnt from: used where no layer was named, and no other is.

        Raises:
            InvalidInput: neither model nor cache, both, or a layer that is not one, or not the fitted one.
            PoolingMismatch: the cache given keeps rows of another pooling.
            NotCached: rows are missing, and what would run the model is not installed.
        """
        cache = self._opened(fitted_layer)
        layer = self._one_layer(cache, fitted_layer)
        return cache.activations(prompts, layer, self.pooling), layer

    def close(self) -> None:
        """Close the cache that was made here; one that was given is its owner's."""
        made, self._made = self._made, None
        if made is not None:
            made.close()

    def _opened(self, fitted_layer: int | None) -> UnifiedCache:
        if self.cache is not None:
            return self._given(self.cache)
        if self._made is None:
            self._made = self._new(fitted_layer)
        return self._made

    def _new(self, fitted_layer: int | None) -> UnifiedCache:
        from streamtap.workbench.unified_cache import UnifiedCache

        if self.model is None:
            raise InvalidInput(
                "this Probe has no model to run prompts with: make it with Probe(model=…, layer=…) or Probe(cache=…, "
                "layer=…), or give rows to the method that ends in _from_activations."
            )
        layer = fitted_layer if self.layer is None else self.layer
        if layer is None:
            raise InvalidInput("a probe of prompts reads one layer of its model; name it, such as Probe(…, layer=16).")
        self._check_pooling()
        return UnifiedCache(
            self.model,
            layers=layer,
            compute_perplexity=False,
            device=self.device,
            remote=self.remote,
            batch_size=self.batch_size,
            pooling=self.pooling,
            backend=self.backend,
            dtype=self.dtype,
            cache_dir=self.cache_dir,
            api_base=self.api_base,
            api_key=self.api_key,
        )

    def _given(self, cache: UnifiedCache) -> UnifiedCache:
        from streamtap.workbench.unified_cache import UnifiedCache

        if not isinstance(cache, UnifiedCache):
            raise InvalidInput(
                f"cache must be a UnifiedCache; got {type(cache).__name__}. Where rows are kept is cache_dir=."
            )
        defaults = {each.name: each.default for each in fields(self)}
        if beside := [name for name in _OF_THE_MODEL if getattr(self, name) != defaults[name]]:
            raise InvalidInput(f"{', '.join(beside)} cannot be set beside cache=, which has its own; set it there.")
        self._check_pooling()
        kept = cache.spec.pooling
        if kept not in ("none", self.pooling):
            raise PoolingMismatch(
                f"this Probe asks for pooling {self.pooling!r} and the cache given keeps {kept!r}; make both alike, or "
                "the cache with cache_pooled=False, whose rows serve any pooling."
            )
        return cache

    def _check_pooling(self) -> None:
        if check_pooling(self.pooling) == "none":
            raise InvalidInput(
                "a probe learns from one row a prompt; choose 'last_token', 'first_token', 'mean', 'max'."
            )

    def _one_layer(self, cache: UnifiedCache, fitted_layer: int | None) -> int:
        spec = self.layer
        if spec is None:
            spec = cache.layers if fitted_layer is None else fitted_layer
        numbers = resolve_layers(spec, cache.provenance.n_layers)
        if len(numbers) != 1:
            raise InvalidInput(
                f"a probe of prompts reads one layer, and {spec!r} names {len(numbers)}; name one with layer=. "
                "sweep_layers compares several."
            )
        if fitted_layer not in (None, numbers[0]):
            raise InvalidInput(
                f"this Probe was fitted on layer {fitted_layer} and asks for prompts' rows at layer {numbers[0]}; "
                "fit it there, or make it with the layer that it knows."
            )
        return numbers[0]


def read_prompts(values: Sequence[PromptLike]) -> list[Prompt]:
    """``values`` as prompts.

    Raises:
        InvalidInput: it is not a list, or there is none in it.
        InvalidPrompt: one of them is not a prompt; its index is named.
    """
    prompts = as_prompts(values)
    if not prompts:
        raise InvalidInput("a probe needs at least one prompt; the list is empty.")
    return prompts


def read_examples(prompts: Sequence[PromptLike], labels: Any) -> tuple[list[Prompt], Labels]:
    """What ``fit`` learns from, in either form: prompts with a label each, or positive and negative prompts.

    ``labels`` are negative prompts where it is a list or tuple of nothing but texts, chats, lists of token ids and
    ``Prompt``; then positive prompts get the label 1 and negative ones 0. Anything else, and every array, is labels.

    Raises:
        InvalidInput: no prompts, or a second list that might be either.
        InvalidPrompt: one of them is not a prompt.
        InvalidRows: labels that cannot be learnt from.
    """
    positive = read_prompts(prompts)
    if not _are_prompts(labels):
        return positive, read_labels(labels, len(positive))
    negative = as_prompts(labels)
    _refuse_doubtful(positive, negative, are_prompts=any(isinstance(each, Prompt) for each in labels))
    return [*positive, *negative], np.repeat([1, 0], [len(positive), len(negative)])


def _are_prompts(values: Any) -> bool:
    return (
        isinstance(values, list | tuple)
        and len(values) > 0
        and all(isinstance(each, str | Prompt | list | tuple | np.ndarray) for each in values)
    )


def _refuse_doubtful(positive: Sequence[Prompt], negative: Sequence[Prompt], *, are_prompts: bool) -> None:
    """Labels in a plain list look like prompts where they are texts, or one column for each class."""
    kinds, known = {_kind(each) for each in negative}, {_kind(each) for each in positive}
    if kinds - known:
        raise InvalidInput(
            f"the second list holds {' and '.join(sorted(kinds))} where the prompts are {' and '.join(sorted(known))}; "
            "give labels as one flat list, or negative prompts of the same kind as the positive ones."
        )
    if not are_prompts and len(negative) == len(positive) and len({_key(each) for each in negative}) < len(negative):
        raise InvalidInput(
            "the second list is as long as the first and says some things twice, so that it may be labels or negative "
            "prompts: give labels of text as an array, numpy.array(labels), or each negative prompt once."
        )


def _kind(prompt: Prompt) -> str:
    if prompt.text is not None:
        return "texts"
    return "chats" if prompt.messages is not None else "token ids"


def _key(prompt: Prompt) -> Any:
    if prompt.token_ids is not None:
        return tuple(int(each) for each in prompt.token_ids)
    return prompt.text or prompt.messages
