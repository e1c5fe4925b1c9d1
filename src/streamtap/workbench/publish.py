"""``push_dataset``: from what the cache holds of a model to a dataset that anyone can load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamtap.cache import CacheStore
from streamtap.dataset.columns import label_column, metadata_columns
from streamtap.dataset.contents import GIB, Contents, make_plan
from streamtap.dataset.names import HIDDEN, LOGITS
from streamtap.dataset.opening import open_target
from streamtap.dataset.places import Target
from streamtap.dataset.writer import public_name, publish, work_bytes
from streamtap.errors import InvalidInput
from streamtap.fingerprint import fingerprint, text_digest
from streamtap.layers import LayerSpec
from streamtap.pooling import Pooling, check_pooling
from streamtap.positions import PositionSpec, canonical_positions
from streamtap.settings import Settings
from streamtap.spec import PromptLike, Truncate, as_prompts
from streamtap.workbench.cached_contents import Given, contents_of
from streamtap.workbench.choice import choose
from streamtap.workbench.holdings import find_holding
from streamtap.workbench.progress import progress_bar
from streamtap.workbench.prompt_texts import dataset_texts

_KINDS = (HIDDEN, LOGITS)


def push_dataset(
    repo_id: str | Path,
    model_name: str,
    prompts: Sequence[PromptLike],
    labels: Sequence[int | str | None] | None = None,
    description: str | None = None,
    private: bool | None = None,
    metadata: Sequence[Mapping[str, Any]] | None = None,
    tensors: Sequence[str] | None = None,
    skip_missing: bool = False,
    shuffle: bool = True,
    stream: bool = False,
    shard_max_bytes: int = GIB,
    exist_ok: bool = False,
    license: str = "cc-by-4.0",
    token: str | None = None,
    *,
    layers: LayerSpec | None = None,
    pooling: Pooling | None = None,
    revision: str | None = None,
    dtype: str | None = None,
    positions: PositionSpec | None = None,
    exclude_special_tokens: bool | None = None,
    exact: bool | None = None,
    quantization: str | None = None,
    engine: str | None = None,
    tokenizer: str | None = None,
    generation_prompt: bool | None = None,
    truncate: Truncate | None = None,
    logit_top_k: int | None = None,
    cache_dir: Path | str | None = None,
    endpoint: str | None = None,
    progress: bool | None = None,
) -> str:
    """Publish what the cache holds of ``prompts`` as a dataset, in one visible step, and return its address.

    Nothing is extracted here. Pushing the same again changes nothing, and a push that was cut goes on.

    Args:
        repo_id: ``user/name`` on the Hub, a folder (``./name``), or an ``s3://``, ``gs://``, ``az://`` address.
        model_name: The model whose rows are meant, as it was named when they were extracted.
        prompts: Texts or chats; a chat is kept as the JSON of its messages.
        labels: One int, string or None a prompt.
        description: The first words of the dataset card.
        private: Visibility on the Hub; None leaves a new repository to the Hub's default and an old one as it is.
        metadata: One dict a prompt, all of the same keys; each key becomes a column of the index.
        tensors: ``"hidden_layers"`` and ``"logits_topk"``; None publishes both where the cache has them.
        skip_missing: Leave out prompts that the cache lacks, instead of refusing.
        shuffle: Spread the prompts at random, so that every shard has of each kind; False keeps the order given.
        stream: Send each shard as soon as it is packed, and remove it here: for sets larger than the disk.
        shard_max_bytes: Size of a shard file, in bytes.
        exist_ok: Replace another dataset that is there.
        license: The Hub's identifier of a licence.
        token: Of the Hub; None takes ``HF_TOKEN`` or the one logged in.
        layers: Which layers; None takes all that the cache has of these prompts.
        pooling: Which pooling, where the cache has several, or has every row.
        revision: Which commit of the model, where the cache has several.
        dtype: Which dtype, in the same way, as all that follow.
        positions: Which positions.
        exclude_special_tokens: Whether special tokens were left out.
        exact: Whether each prompt ran alone.
        quantization: Which quantisation; ``"none"`` for rows of the model as it is.
        engine: Which engine.
        tokenizer: Which tokenizer fingerprint.
        generation_prompt: Whether chats end with the opening of the assistant's turn, where the cache has both.
        truncate: On which side long prompts were cut, where the cache has both.
        logit_top_k: Which size of logits.
        cache_dir: Folder of the cache; by default that of ``Settings``.
        endpoint: Address of the Hub; by default ``HF_ENDPOINT``, or the public one.
        progress: Show a progress bar; None shows it on a terminal only.

    Raises:
        NotCached: prompts that are not in the cache; they are counted and named by their indices.
        InvalidInput: labels or metadata that do not fit, several sets to choose from, or a value that means nothing.
        DatasetExists: something else is there.
        TransferFailed: the server failed for too long; what it has already need not be sent again.
    """
    kinds = _kinds(tensors)
    read = as_prompts(prompts)
    given = Given(read, dataset_texts(read), label_column(labels, len(read)), metadata_columns(metadata, len(read)))
    picks = {
        "revision": revision,
        "dtype": None if dtype is None else str(dtype).removeprefix("torch."),
        "pooling": None if pooling is None else check_pooling(pooling),
        "positions": None if positions is None else canonical_positions(positions),
        "exclude_special_tokens": exclude_special_tokens,
        "exact": exact,
        "quantization": quantization,
        "engine": engine,
        "tokenizer": tokenizer,
        "generation_prompt": generation_prompt,
        "truncate": truncate,
    }
    target = open_target(repo_id, private=private, token=token, endpoint=endpoint)
    with CacheStore(cache_dir if cache_dir is not None else Settings.from_environment().activations_dir) as store:
        holding = find_holding(store, str(model_name), read, picks)
        chosen = choose(store, holding, layers, kinds, logit_top_k, skip_missing=skip_missing)
        order = shuffled_order(len(chosen.places), target) if shuffle else None
        contents = replace(contents_of(store, holding, chosen, given, order), description=description, license=license)
        return send(
            contents,
            target,
            shard_max_bytes=shard_max_bytes,
            exist_ok=exist_ok,
            stream=stream,
            progress=progress,
        )


def send(
    contents: Contents,
    target: Target,
    *,
    shard_max_bytes: int,
    exist_ok: bool,
    stream: bool,
    progress: bool | None,
) -> str:
    """Publish ``contents`` under a progress bar and return the address; see ``push_dataset``."""
    known = fingerprint({"of": contents.content, **_manner(contents, shard_max_bytes)})
    contents = replace(contents, content=known)
    plan = make_plan(contents, shard_max_bytes)
    with progress_bar("publishing", work_bytes(contents, plan, target), show=progress, is_bytes=True) as advance:
        return publish(contents, target, plan=plan, exist_ok=exist_ok, stream=stream, advance=advance)


def shuffled_order(n_prompts: int, target: Target) -> NDArray[np.int64]:
    """A random order that is the same at the next push of the same dataset."""
    seed = int.from_bytes(text_digest(public_name(target.name)), "little")
    return np.random.default_rng(seed).permutation(n_prompts)


def _kinds(tensors: Sequence[str] | None) -> dict[str, bool]:
    """The kinds of tensors to publish, and whether each was asked for by name."""
    if tensors is None:
        return dict.fromkeys(_KINDS, False)
    names = [tensors] if isinstance(tensors, str) else list(tensors)
    if not names or not set(names) <= set(_KINDS):
        raise InvalidInput(f"tensors must be some of {', '.join(map(repr, _KINDS))}, or None for all; got {tensors!r}.")
    return dict.fromkeys(names, True)


def _manner(contents: Contents, shard_max_bytes: int) -> dict[str, Any]:
    return {
        "ordering": contents.ordering,
        "description": contents.description,
        "license": contents.license,
        "shard_max_bytes": shard_max_bytes,
    }
