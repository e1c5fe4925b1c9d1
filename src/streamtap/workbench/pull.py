"""``pull_dataset``: a dataset's rows into the cache of this machine, where ``UnifiedCache`` finds them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from streamtap.cache import CacheStore
from streamtap.dataset.names import HIDDEN, INDEX, LOGITS
from streamtap.dataset.reader import Dataset
from streamtap.layers import LayerSpec
from streamtap.settings import Settings
from streamtap.workbench.dataset_rows import chosen_layers
from streamtap.workbench.open_dataset import chosen_kinds, fetching, open_dataset
from streamtap.workbench.pulled import remember_pulled
from streamtap.workbench.pulled_rows import PulledPrompts, describe_model, layers_here, store_rows
from streamtap.workbench.pulled_scores import has_logits_here, has_perplexity_here, store_logits, store_perplexity


def pull_dataset(
    repo_id: str | Path,
    tensors: Sequence[str] | None = None,
    layers: LayerSpec | None = None,
    overwrite: bool = False,
    token: str | None = None,
    show_progress: bool | None = None,
    *,
    cache_dir: Path | str | None = None,
    revision: str | None = None,
    endpoint: str | None = None,
) -> int:
    """Fetch a dataset and put its rows into the cache; gives the number of its prompts.

    Then ``load_activations`` of it, and ``UnifiedCache`` of its model, need no network, no tokenizer and no model for
    these prompts and layers. The rows are on the disk twice: as shards, and in the cache. Where a dataset records all
    about how its rows were made they are the model's own; of others, what is unknown is said in a warning and kept, and
    the rows are matched by model, commit, pooling and text: where prompts of several datasets meet there, the rows that
    came first stay.

    ``overwrite=True`` asks for the newest version of the dataset. Rows that are the model's own stay as they are, for
    they could not be others. Of what is matched by text, it fetches again all that the cache has of this dataset, also
    layers and tensors that were not asked for now, and compares. If nothing differs, only what lacks is added. If rows
    of some prompt differ, all rows by text of that model, commit, dtype and pooling are removed, and those of this
    dataset put in their place; so it is with its logits of this k, its perplexities, and its tokens' perplexities, each
    on its own. Rows of other datasets that go with them must be pulled again. Nothing is removed before all files are
    here and the disk has room.

    Args:
        repo_id: ``user/name`` on the Hub, a folder (``./name``), or an ``s3://``, ``gs://``, ``az://`` address.
        tensors: ``"hidden_layers"`` and ``"logits_topk"``; None takes what is there, and perplexity with it.
        layers: As for ``load_activations``.
        overwrite: Fetch the newest version, and put it in place of what was pulled by text before; see above.
        token: Of the Hub; None takes ``HF_TOKEN`` or the one logged in.
        show_progress: Show a progress bar; None shows it on a terminal only.
        cache_dir: Folder of the cache; by default that of ``Settings``.
        revision: Branch, tag or commit of the dataset on the Hub.
        endpoint: Address of the Hub; by default ``HF_ENDPOINT``, or the public one.

    Raises:
        DatasetNotFound: no such dataset, or none that this token may see.
        NotInDataset: layers or tensors that it does not hold.
        DatasetDamaged: files that do not fit the manifest, fetched twice.
        NotEnoughSpace: the disk cannot take the rows.
        CacheBusy: rows are to be removed that another process is writing to.
    """
    opened = open_dataset(repo_id, token=token, revision=revision, endpoint=endpoint, refresh=overwrite)
    folder = cache_dir if cache_dir is not None else Settings.from_environment().activations_dir
    with fetching(opened, show=show_progress) as dataset, CacheStore(folder) as store:
        kinds = chosen_kinds(dataset, tensors)
        numbers = chosen_layers(dataset, layers) if HIDDEN in kinds else ()
        wanted = _Wanted(numbers, has_logits=LOGITS in kinds, has_perplexity=tensors is None)
        _fetch(dataset, wanted)
        prompts = PulledPrompts(dataset, describe_model(dataset, numbers))
        is_replaced = overwrite and bool(prompts.model.unknown)
        if is_replaced:
            wanted = _with_what_is_here(store, prompts, wanted)
            _fetch(dataset, wanted)
        _store(store, prompts, wanted, overwrite=is_replaced)
        return len(dataset.index)


@dataclass(frozen=True)
class _Wanted:
    """What of a dataset is put into the cache."""

    layers: tuple[int, ...]
    has_logits: bool
    has_perplexity: bool


def _with_what_is_here(store: CacheStore, prompts: PulledPrompts, wanted: _Wanted) -> _Wanted:
    """And what the cache has of an earlier version, which must not be left beside the new one."""
    return _Wanted(
        tuple(sorted({*wanted.layers, *layers_here(store, prompts)})),
        wanted.has_logits or has_logits_here(store, prompts),
        wanted.has_perplexity or has_perplexity_here(store, prompts),
    )


def _store(store: CacheStore, prompts: PulledPrompts, wanted: _Wanted, *, overwrite: bool) -> None:
    dataset, model = prompts.dataset, prompts.model
    if model.unknown:
        warnings.warn(
            f"{dataset.source.name} does not record {', '.join(model.unknown)}; its rows are matched by model, commit, "
            "pooling and text.",
            stacklevel=3,
        )
    if wanted.layers:
        store_rows(store, dataset, prompts, wanted.layers, overwrite=overwrite)
    if wanted.has_logits:
        store_logits(store, dataset, prompts, overwrite=overwrite)
    if wanted.has_perplexity:
        store_perplexity(store, dataset, prompts, overwrite=overwrite)
    # Last, so that a pull that was cut is not taken for a model at hand.
    prompts.remember(store)
    remember_pulled(store, model)


def _fetch(dataset: Dataset, wanted: _Wanted) -> None:
    for path in _files(dataset, wanted):
        dataset.whole(path)


def _files(dataset: Dataset, wanted: _Wanted) -> Iterator[str]:
    seen = {INDEX}
    for layer in wanted.layers:
        for shard in range(len(dataset.hidden.shards)):
            path = dataset.hidden.file(layer, shard)
            if path not in seen:
                seen.add(path)
                yield path
    if wanted.has_logits:
        yield from (dataset.logits.file(shard) for shard in range(len(dataset.logits.shards)))
