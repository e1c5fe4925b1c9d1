"""A dataset's prompts and rows as the cache holds them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamtap.activations import Provenance
from streamtap.cache import CacheStore, Channel, PromptKey
from streamtap.cache.writer import Batch
from streamtap.dataset.reader import Dataset
from streamtap.errors import DatasetDamaged, RowsDamaged
from streamtap.fingerprint import tokens_digest
from streamtap.pooling import Pooling, check_pooling
from streamtap.ragged import blocks
from streamtap.spec import CaptureSpec
from streamtap.workbench.dataset_model import provenance_of, recorded_limits, recorded_spec
from streamtap.workbench.every_row import EveryRow
from streamtap.workbench.known_model import KnownModel
from streamtap.workbench.prompt_keys import BY_TEXT, PromptKeys, prompt_name
from streamtap.workbench.prompt_texts import prompt_of
from streamtap.workbench.pulled import NO_COMMIT, PulledModel, names_content, text_commit
from streamtap.workbench.tokenizing_rules import AS_TOKENS, CHAT, RULES, may_be_cut, same_rules
from streamtap.workbench.wanted import layer_channel, layer_name, row_identity

Ints = NDArray[np.int64]
_BLOCK_BYTES = 32 << 20
_UNKNOWN = ("its tokenizer", "how its tokens were chosen", "its weights' dtype", "its engine's settings")


def describe_model(dataset: Dataset, layers: Sequence[int]) -> PulledModel:
    """The model of a dataset, and what is unknown of it; ``layers`` are those whose files are here already."""
    provenance, known = provenance_of(dataset), recorded_limits(dataset)
    is_recorded = known is not None and recorded_spec(dataset) is not None and provenance.commit not in NO_COMMIT
    if known is not None and is_recorded and _has_every_token(dataset):
        return PulledModel(provenance, known)
    # What is recorded of rows that this version would make otherwise is not theirs here.
    provenance = replace(provenance, tokenizer="", engine="")
    limits: dict[str, Any] = {"context_length": None, "vocabulary": None, "special_ids": []}
    unknown = _UNKNOWN if names_content(provenance.commit) else ("its commit", *_UNKNOWN)
    commit, dtype = text_commit(provenance.model, provenance.commit), _stored_dtype(dataset, provenance, layers)
    return PulledModel(replace(provenance, commit=commit, dtype=dtype), limits, unknown)


def _has_every_token(dataset: Dataset) -> bool:
    """Whether each prompt's tokens are recorded: all that are not would be one prompt."""
    index = dataset.index
    if not (index.has("token_ids") and index.has("num_tokens")):
        return False
    values, offsets = index.lists("token_ids")
    counts = np.diff(offsets)
    return values.dtype.kind in "iu" and bool(counts.all()) and np.array_equal(counts, index.ints("num_tokens"))


@dataclass(frozen=True)
class PulledPrompts:
    """The prompts of a dataset, and the keys under which the cache knows them."""

    dataset: Dataset
    model: PulledModel

    @cached_property
    def every_row(self) -> EveryRow:
        """Reads the rows and tokens."""
        return EveryRow(self.dataset)

    @cached_property
    def keys(self) -> list[PromptKey]:
        """One a row of the index: by its tokens, or by its text alone where the model is not known well enough."""
        tokens = self.every_row.token_ids
        if not self.model.unknown:
            return [PromptKey(tokens_digest(ids), ids) for ids in tokens]
        told = zip(self.texts, tokens, self._rule_numbers(), strict=True)
        return [PromptKey(_name_of(text, ids, number), ids) for text, ids, number in told]

    @cached_property
    def texts(self) -> list[str]:
        """The texts, in the dataset's order."""
        return self.dataset.index.texts()

    def spec(self, pooling: Pooling = "none") -> CaptureSpec:
        """How the rows were taken."""
        said = None if self.model.unknown else recorded_spec(self.dataset)
        return replace(said or CaptureSpec(layers=()), pooling=pooling)

    def remember(self, store: CacheStore) -> None:
        """Let the cache find the prompts by their texts, as the model's tokenizer would have made them."""
        if self.model.unknown:
            names = [key.digest for key in self.keys]
            store.remember_texts(BY_TEXT, names, self.keys, [0] * len(names))
            return
        source, spec = KnownModel(self.model.provenance, self.model.limits), self.spec()
        groups: dict[tuple[bool, tuple[int, ...]], list[int]] = {}
        for place, number in enumerate(self._rule_numbers()):
            if number == AS_TOKENS:
                continue
            groups.setdefault((number >= CHAT, self._same_rules(place, number)), []).append(place)
        for (is_chat, rules), places in groups.items():
            prompts = [prompt_of(self.texts[i], is_chat=is_chat) for i in places]
            keys = [self.keys[i] for i in places]
            for rule in rules:
                PromptKeys(store, source, replace(spec, **RULES[rule])).remember(prompts, keys)

    def _rule_numbers(self) -> list[int]:
        index = self.dataset.index
        numbers: list[int] = index.ints("tokenized_as").tolist() if index.has("tokenized_as") else [0] * len(index)
        if not {*numbers} <= {*range(len(RULES)), *range(CHAT, CHAT + len(RULES)), AS_TOKENS}:
            raise DatasetDamaged(f"column tokenized_as of the index of {self.dataset.source.name} holds no such rule.")
        return numbers

    def _same_rules(self, place: int, number: int) -> tuple[int, ...]:
        rule, limit = number % CHAT, self.model.limits["context_length"]
        is_cut = may_be_cut(rule, len(self.keys[place].token_ids), limit)
        return tuple(same_rules(rule, is_chat=number >= CHAT, may_be_cut=is_cut))


def store_rows(
    store: CacheStore, dataset: Dataset, prompts: PulledPrompts, layers: Sequence[int], *, overwrite: bool
) -> None:
    """Put rows of ``layers`` into the cache, block after block of prompts; what it has already is not written twice."""
    provenance, identity = prompts.model.provenance, _identity(prompts)
    channels = [layer_channel(layer, provenance) for layer in layers]
    if overwrite:
        clear_others(store, identity, lambda: _batches(prompts, layers), channels, _row_count(dataset))
    set_id = store.ensure_set(identity, asdict(provenance))
    gone = store.missing(set_id, [key.digest for key in prompts.keys], [layer_name(layer) for layer in layers])
    layers = [layer for layer in layers if any(layer_name(layer) in names for names in gone)]
    if not layers:
        return
    channels = [layer_channel(layer, provenance) for layer in layers]
    store.require_space(_row_count(dataset) * sum(channel.row_bytes for channel in channels))
    with store.writer(set_id, channels) as writer:
        for batch in _batches(prompts, layers):
            writer.append(batch.keys, batch.rows, batch.offsets, batch.token_ids, batch.positions)


def layers_here(store: CacheStore, prompts: PulledPrompts) -> tuple[int, ...]:
    """Layers of the dataset of which its prompts have rows in the cache, ascending."""
    hidden = prompts.dataset.manifest.hidden
    set_id = None if hidden is None else store.find_set(_identity(prompts))
    if hidden is None or set_id is None:
        return ()
    digests = [key.digest for key in prompts.keys]
    gone = store.missing(set_id, digests, [layer_name(layer) for layer in hidden.layers])
    lacking = {
        layer: sum(len(places) for names, places in gone.items() if layer_name(layer) in names)
        for layer in hidden.layers
    }
    return tuple(sorted(layer for layer, count in lacking.items() if count < len(digests)))


def clear_others(
    store: CacheStore,
    identity: Mapping[str, Any],
    batches: Callable[[], Iterable[Batch]],
    channels: Sequence[Channel],
    n_rows: int,
) -> None:
    """Remove a set that has other values of some prompt than ``batches``, if their ``n_rows`` rows have space."""
    set_id = store.find_set(identity)
    if set_id is None or not any(_holds_other(store, set_id, batch) for batch in _once(batches())):
        return
    store.require_space(n_rows * sum(channel.row_bytes for channel in channels))
    store.clear([set_id])


def _once(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Batches without the repetitions of a prompt, of which the cache keeps the first."""
    seen: set[bytes] = set()
    for batch in batches:
        places = []
        for place, key in enumerate(batch.keys):
            if key.digest not in seen:
                seen.add(key.digest)
                places.append(place)
        if places:
            yield batch.pick(places, list(batch.rows))


def _holds_other(store: CacheStore, set_id: int, batch: Batch) -> bool:
    return any(_is_other(store, set_id, batch, name) for name in batch.rows)


def _is_other(store: CacheStore, set_id: int, batch: Batch, name: str) -> bool:
    digests = [key.digest for key in batch.keys]
    lacking = {place for places in store.missing(set_id, digests, [name]).values() for place in places}
    here = [place for place in range(len(digests)) if place not in lacking]
    if not here:
        return False
    try:
        old = store.read(set_id, [digests[place] for place in here], name)
    except RowsDamaged:  # they were set aside, so now they are missing
        return _is_other(store, set_id, batch, name)
    new = batch.pick(here, [name])
    pairs = [(old.values, new.rows[name]), (old.token_ids, new.token_ids), (old.positions, new.positions)]
    # Bit by bit: a NaN is the same as itself here.
    return any(mine.tobytes() != theirs.tobytes() for mine, theirs in [*pairs, (old.offsets, new.offsets)])


def _identity(prompts: PulledPrompts) -> dict[str, Any]:
    pooling = check_pooling(prompts.dataset.hidden.pooling or "none")
    return row_identity(prompts.model.provenance, prompts.spec(pooling))


def _batches(prompts: PulledPrompts, layers: Sequence[int]) -> Iterator[Batch]:
    # Rows of all layers of a block are about one size.
    most = max(1, _BLOCK_BYTES // (prompts.dataset.hidden.width * 4 * len(layers)))
    for start, stop in blocks(prompts.every_row.counts, most):
        here = np.arange(start, stop)
        acts = prompts.every_row.read(layers, here)
        keys = [prompts.keys[i] for i in here.tolist()]
        rows = {layer_name(layer): acts.acts[layer] for layer in layers}
        yield Batch(keys, rows, acts.offsets, acts.token_ids, acts.positions)


def _row_count(dataset: Dataset) -> int:
    return sum(shard.rows for shard in dataset.hidden.shards)


def _name_of(text: str, token_ids: NDArray[np.int32], number: int) -> bytes:
    """Where rows lie that are known by text alone; a text that no prompt had finds none."""
    return tokens_digest(token_ids) if number == AS_TOKENS else prompt_name(prompt_of(text, is_chat=False))


def _stored_dtype(dataset: Dataset, provenance: Provenance, layers: Sequence[int]) -> str:
    """The dtype in the shards, which others' manifests do not always say rightly."""
    if dataset.manifest.hidden is None or not len(dataset.index):
        return provenance.dtype
    layer = layers[0] if layers else dataset.hidden.layers[0]
    return dataset.read_layer(layer, dataset.index.places().pick(np.zeros(1, np.int64))).dtype.name
