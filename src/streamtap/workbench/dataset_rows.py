"""``load_activations`` and ``load_rows``: a dataset's rows as arrays, by layer, without any model."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamtap.activations import Activations
from streamtap.dataset.index import Places
from streamtap.dataset.reader import Dataset
from streamtap.errors import InvalidInput, InvalidLayers, NotInDataset, PoolingMismatch
from streamtap.layers import LayerSpec, resolve_layers
from streamtap.pooling import check_pooling, pool
from streamtap.ragged import blocks, offsets_of, ranges
from streamtap.spec import PromptLike, as_prompts
from streamtap.workbench.dataset_model import recorded_depth
from streamtap.workbench.every_row import EveryRow
from streamtap.workbench.open_dataset import fetching, open_dataset
from streamtap.workbench.prompt_texts import dataset_texts

Array = NDArray[Any]
Ints = NDArray[np.int64]
_SHOWN = 8
_LAYERS_AT_ONCE = 4
# Deeper than any model: what a number is checked against where the depth is not known.
_NO_DEPTH = 1 << 20
_BLOCK_BYTES = 64 << 20


def load_activations(
    dataset: str | Path,
    layers: LayerSpec | None = None,
    prompts: Sequence[PromptLike] | None = None,
    return_labels: bool = False,
    pooling: str | None = None,
    token: str | None = None,
    as_dict: bool = True,
    show_progress: bool | None = None,
    *,
    dtype: Any = np.float32,
    revision: str | None = None,
    endpoint: str | None = None,
    refresh: bool = False,
) -> Any:
    """One row a prompt at each layer: ``{layer: [prompts, hidden]}``, or with labels ``({…}, labels)``.

    Only the shards of these layers are fetched, and of a large shard only the rows' bytes where few are wanted.
    What was fetched once is read from this machine the next time, and no server is asked.

    Args:
        dataset: ``user/name`` on the Hub, a folder (``./name``), or an ``s3://``, ``gs://``, ``az://`` address.
        layers: ``16``, ``[8, 16]``, ``"all"``, ``"8-20"``, …; None takes all that are there.
        prompts: Take the rows of these, in this order; the nth repetition of a text takes its nth row, and where the
            dataset has a text once, every repetition takes it. None takes all, in the dataset's order.
        return_labels: Also the labels: int64 or str [prompts], an object array with None where some are null, None
            where all are.
        pooling: None takes what is stored. Where every token has a row, any pooling can be made.
        token: Of the Hub; None takes ``HF_TOKEN`` or the one logged in.
        as_dict: False gives one array [prompts, layers, hidden].
        show_progress: Show a progress bar; None shows it on a terminal only.
        dtype: Of the arrays; None keeps the stored one.
        revision: Branch, tag or commit of the dataset on the Hub.
        endpoint: Address of the Hub; by default ``HF_ENDPOINT``, or the public one.
        refresh: Ask for the newest version, instead of the one that is on this machine.

    Raises:
        DatasetNotFound: no such dataset, or none that this token may see.
        NotInDataset: prompts or layers that it does not hold, counted and named.
        PoolingMismatch: rows of another pooling are stored.
        DatasetDamaged: files that do not fit the manifest, fetched twice.
        TransferFailed: the server failed for too long.
    """
    opened = open_dataset(dataset, token=token, revision=revision, endpoint=endpoint, refresh=refresh)
    with fetching(opened, show=show_progress) as found:
        numbers = chosen_layers(found, layers)
        asked = check_stored_pooling(found, pooling)
        kind = _kind(dtype)
        rows = None if prompts is None else rows_of_prompts(found, prompts)
        acts: Any = _read_layers(found, numbers, asked, rows, kind)
        labels = found.index.labels() if return_labels else None
    if not as_dict:
        acts = np.stack([acts[layer] for layer in numbers], axis=1)
    if not return_labels:
        return acts
    return acts, labels if labels is None or rows is None else _narrowed(labels[rows])


def load_rows(
    dataset: str | Path,
    layers: LayerSpec | None = None,
    prompts: Sequence[PromptLike] | None = None,
    *,
    token: str | None = None,
    show_progress: bool | None = None,
    revision: str | None = None,
    endpoint: str | None = None,
    refresh: bool = False,
) -> Activations:
    """Every stored row, ragged and in the stored dtype: all tokens of a full-sequence dataset, else one a prompt.

    The arguments are those of ``load_activations``. ``token_ids`` are -1 where the dataset does not record them.

    Raises:
        NotInDataset: prompts or layers that it does not hold, counted and named.
        DatasetDamaged: files that do not fit the manifest, fetched twice.
        TransferFailed: the server failed for too long.
    """
    opened = open_dataset(dataset, token=token, revision=revision, endpoint=endpoint, refresh=refresh)
    with fetching(opened, show=show_progress) as found:
        numbers = chosen_layers(found, layers)
        rows = np.arange(len(found.index)) if prompts is None else rows_of_prompts(found, prompts)
        return EveryRow(found).read(numbers, rows)


def chosen_layers(dataset: Dataset, layers: LayerSpec | None) -> tuple[int, ...]:
    """The layers asked for, ascending.

    Raises:
        NotInDataset: one that is not there.
        InvalidLayers: none at all, or a spec that needs the model's depth, which the dataset does not record.
    """
    held = dataset.layers(None)
    if layers is None or (isinstance(layers, str) and layers == "all"):
        return held
    depth = recorded_depth(dataset)
    # Layers that are named by their numbers are the same at any depth.
    numbers = resolve_layers(layers, depth or _NO_DEPTH)
    if depth is None and _needs_depth(layers):
        raise InvalidLayers(
            f"layers {layers!r} needs the model's depth, which {dataset.source.name} does not record; "
            f"name layers by their numbers: it holds {list(held)}."
        )
    if not numbers:
        raise InvalidLayers(f"no layers were asked for; {dataset.source.name} holds {list(held)}.")
    return dataset.layers(numbers)


def _needs_depth(layers: LayerSpec) -> bool:
    """Whether a spec counts from the end, or by a name."""
    if isinstance(layers, str):
        return not re.fullmatch(r"\d+([-:]\d+)?(,\d+([-:]\d+)?)*", layers.replace(" ", ""))
    listed = [layers] if isinstance(layers, int | np.integer) else layers
    return any(isinstance(layer, int | np.integer) and layer < 0 for layer in listed)


def check_stored_pooling(dataset: Dataset, pooling: str | None) -> str:
    """The pooling that will be given, if the stored rows can give it.

    Raises:
        PoolingMismatch: the rows are stored under another; both are named.
    """
    stored = dataset.hidden.pooling
    if pooling is None:
        return stored or "last_token"
    asked = check_pooling(pooling)
    if asked == "none":
        raise InvalidInput("load_activations gives one row a prompt; load_rows gives every row that is stored.")
    if stored is not None and asked != stored:
        raise PoolingMismatch(
            f"pooling {asked!r} was asked for, and {dataset.source.name} stores {stored!r} alone; "
            f"ask for {stored!r}, or for None, which takes what is stored."
        )
    return asked


def rows_of_prompts(dataset: Dataset, prompts: Sequence[PromptLike]) -> Ints:
    """Numbers of the prompts' rows in the dataset, int64 [prompts], in the order of ``prompts``.

    Raises:
        NotInDataset: some are not there; they are counted and named by their indices.
    """
    asked = dataset_texts(as_prompts(prompts))
    there = _rows_by_text(dataset, set(asked))
    taken: dict[str, int] = defaultdict(int)
    rows, absent = np.empty(len(asked), np.int64), []
    for place, text in enumerate(asked):
        found, nth = there.get(text, []), taken[text]
        taken[text] += 1
        if nth < len(found) or len(found) == 1:
            rows[place] = found[min(nth, len(found) - 1)]
        else:
            absent.append(place)
    if absent:
        shown = ", ".join(map(str, absent[:_SHOWN])) + (", …" if len(absent) > _SHOWN else "")
        raise NotInDataset(
            f"{len(absent)} of {len(asked)} prompts have no row in {dataset.source.name}: prompts {shown}. "
            "A text that is asked for several times needs as many rows there, or exactly one."
        )
    return rows


def _rows_by_text(dataset: Dataset, wanted: set[str]) -> dict[str, list[int]]:
    """The rows of each text, in the order in which they were pushed where that is recorded."""
    found: dict[str, list[int]] = {}
    for row, text in enumerate(dataset.index.texts()):
        if text in wanted:
            found.setdefault(text, []).append(row)
    if dataset.index.has("pushed_index") and any(len(rows) > 1 for rows in found.values()):
        pushed = dataset.index.ints("pushed_index")
        for rows in found.values():
            rows.sort(key=lambda row: int(pushed[row]))
    return found


def _read_layers(
    dataset: Dataset, layers: Sequence[int], pooling: str, rows: Ints | None, dtype: np.dtype[Any] | None
) -> dict[int, Array]:
    if dataset.hidden.pooling is None and pooling != "last_token":
        numbers = np.arange(len(dataset.index)) if rows is None else rows
        tokens = dataset.index.token_places()
        return {layer: _pooled_here(dataset, layer, pooling, tokens, numbers, dtype) for layer in layers}
    places = dataset.index.places()
    chosen = places if rows is None else places.pick(rows)
    # A server takes its time for each file, so several are asked for at once.
    with ThreadPoolExecutor(_LAYERS_AT_ONCE) as pool:
        found = pool.map(lambda layer: dataset.read_layer(layer, chosen, dtype), layers)
        return dict(zip(layers, found, strict=True))


def _pooled_here(
    dataset: Dataset,
    layer: int,
    pooling: str,
    token_places: tuple[Places, Ints],
    rows: Ints,
    dtype: np.dtype[Any] | None,
) -> Array:
    """Pool token rows, block after block of prompts, so that memory does not grow with the tokens."""
    tokens, offsets = token_places
    counts = np.diff(offsets)[rows]
    if pooling == "first_token":
        return dataset.read_layer(layer, tokens.pick(offsets[rows]), dtype)
    pooled: list[Array] = []
    most = max(1, _BLOCK_BYTES // (dataset.hidden.width * 4))
    for start, stop in blocks(counts, most):
        here = slice(start, stop)
        places = tokens.pick(ranges(offsets[rows[here]], counts[here]))
        values = dataset.read_layer(layer, places, dtype)
        pooled.append(pool(values, offsets_of(counts[here]), pooling))
    return np.concatenate(pooled) if pooled else dataset.read_layer(layer, tokens.pick(rows), dtype)


def _kind(dtype: Any) -> np.dtype[Any] | None:
    name = str(dtype)
    try:
        return None if dtype is None else np.dtype(name.removeprefix("torch.") if name.startswith("torch.") else dtype)
    except TypeError as error:
        raise InvalidInput(f"dtype must be 'float32', 'float16', …, or None for the stored one; got {name}.") from error


def _narrowed(labels: Array) -> Array | None:
    """Picked labels as those of a whole dataset: without nulls in a plain array, all null none at all."""
    if labels.dtype != object:
        return labels
    missing = sum(label is None for label in labels)
    if missing == len(labels):
        return None
    if missing:
        return labels
    first = labels[0]
    return np.array([int(label) for label in labels], np.int64) if isinstance(first, int) else np.array(labels.tolist())
