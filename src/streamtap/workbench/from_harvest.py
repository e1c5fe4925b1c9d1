"""``dataset_from_harvest``: a harvest as a dataset that anyone can load; no row is made anew."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamtap.dataset.columns import PromptColumns, label_column, metadata_columns, pick
from streamtap.dataset.contents import GIB, Contents, HiddenRows
from streamtap.dataset.opening import open_target
from streamtap.engines.tokenizing import PromptTokenizer
from streamtap.errors import InvalidInput
from streamtap.fingerprint import fingerprint, tokens_digest
from streamtap.layers import LayerSpec
from streamtap.spec import PromptLike, as_prompts
from streamtap.workbench.cached_contents import made_by, published
from streamtap.workbench.harvest_texts import HarvestTexts, given_texts, open_tokenizer, read_texts
from streamtap.workbench.harvested_rows import Harvest, HarvestedRows, open_harvest
from streamtap.workbench.publish import send, shuffled_order

Ints = NDArray[np.int64]
Array = NDArray[Any]


def dataset_from_harvest(
    harvest: Harvest | str | Path,
    repo_id: str | Path,
    prompts: Sequence[PromptLike] | None = None,
    labels: Sequence[int | str | None] | None = None,
    description: str | None = None,
    private: bool | None = None,
    metadata: Sequence[Mapping[str, Any]] | None = None,
    *,
    model: str | Path | None = None,
    tokenizer: PromptTokenizer | None = None,
    layers: LayerSpec | None = None,
    shuffle: bool = False,
    stream: bool = False,
    shard_max_bytes: int = GIB,
    exist_ok: bool = False,
    license: str = "cc-by-4.0",
    token: str | None = None,
    endpoint: str | None = None,
    progress: bool | None = None,
) -> str:
    """Publish the rows of a harvest as a dataset, in one visible step, and return its address.

    A harvest keeps tokens and no texts. Give the prompts again, and each is compared with its tokens; else the texts
    are read off the tokens. Windows of documents get columns ``documents``, ``offsets`` and ``starts``. Publishing the
    same again changes nothing, and what was cut goes on.

    Args:
        harvest: A run, several joined, or where one lies: a folder, or an ``s3://``, ``gs://`` or ``az://`` address.
        repo_id: ``user/name`` on the Hub, a folder (``./name``), or an ``s3://``, ``gs://``, ``az://`` address.
        prompts: What was harvested, in its order; None reads the texts off the tokens.
        labels: One int, string or None a prompt.
        description: The first words of the dataset card.
        private: Visibility on the Hub; None leaves it as it is, or to the Hub's default.
        metadata: One dict a prompt, all of the same keys; each key becomes a column of the index.
        model: What the harvested model is called on this machine, for its tokenizer; None takes the harvest's name.
        tokenizer: The tokenizer itself, such as an engine's; None opens that of the model.
        layers: Which layers; None takes all.
        shuffle: Spread the prompts at random over the shards. A compressed harvest is read slowly then.
        stream: Send each shard as soon as it is packed, and remove it here: for sets larger than the disk.
        shard_max_bytes: Size of a shard file, in bytes.
        exist_ok: Replace another dataset that is there.
        license: The Hub's identifier of a licence.
        token: Of the Hub; None takes ``HF_TOKEN`` or the one logged in.
        endpoint: Address of the Hub; by default ``HF_ENDPOINT``, or the public one.
        progress: Show a progress bar; None shows it on a terminal only.

    Raises:
        InvalidInput: rows that the format has no place for, other prompts than were harvested, or labels or metadata
            that do not fit.
        MissingExtra: what reads the tokenizer is not installed.
        HarvestDamaged: the harvest is not whole, or a file is damaged.
        DatasetExists: something else is there.
        TransferFailed: the server failed for too long; what it has already need not be sent again.
    """
    opened = open_harvest(harvest)
    rows, n_prompts = HarvestedRows(opened), len(opened)
    _check_whole(rows)
    told = label_column(labels, n_prompts), metadata_columns(_with_segments(rows, metadata), n_prompts)
    by = open_tokenizer(rows, model) if tokenizer is None else tokenizer
    texts = read_texts(rows, by) if prompts is None else given_texts(rows, as_prompts(prompts), by)
    # The dataset will vouch for these values.
    opened.verify()
    target = open_target(repo_id, private=private, token=token, endpoint=endpoint)
    order = shuffled_order(n_prompts, target) if shuffle else None
    contents = _Publishing(rows, rows.layers(layers), texts, *told).contents(order)
    contents = replace(contents, description=description, license=license)
    return send(contents, target, shard_max_bytes=shard_max_bytes, exist_ok=exist_ok, stream=stream, progress=progress)


def _check_whole(rows: HarvestedRows) -> None:
    if rows.spec.pooling == "none" and rows.spec.positions != "all":
        raise InvalidInput(
            f"{rows.name} has rows of positions {rows.spec.positions!r} without pooling, which have no place in the "
            "format of datasets: it holds one row a prompt, or one a token. Harvest with a pooling, or all positions."
        )


@dataclass(frozen=True)
class _Publishing:
    rows: HarvestedRows
    layers: tuple[int, ...]
    texts: HarvestTexts
    labels: Any
    metadata: Mapping[str, Any]

    def contents(self, order: Ints | None) -> Contents:
        """What will be published, in ``order`` or as it was harvested."""
        rows, about = self.rows, self.rows.provenance
        places: Ints = np.arange(len(rows.harvest)) if order is None else order
        prompts, n_tokens = hashlib.sha256(), np.zeros(len(places), np.int64)
        for place, ids in enumerate(self._tokens(places)):
            prompts.update(tokens_digest(ids))
            n_tokens[place] = len(ids)
        columns = self._columns(places, n_tokens)
        hidden = self._hidden(places, n_tokens)
        content = {
            "identity": rows.identity,
            "model": about.model,
            "prompts": prompts.hexdigest(),
            "hidden": [list(hidden.layers), hidden.dtype.name, hidden.pooling],
            "columns": columns.fingerprint(),
        }
        return Contents(
            model=about.model,
            commit=about.commit or None,
            n_prompts=len(places),
            hidden=hidden,
            logits=None,
            columns=columns,
            content=fingerprint(content),
            ordering="given" if order is None else "random",
            provenance=made_by(about),
            capture={"identity": rows.identity, "provenance": published(about), "limits": dict(rows.limits)},
        )

    def _hidden(self, places: Ints, n_tokens: Ints) -> HiddenRows:
        rows = self.rows

        def read(layer: int, start: int, stop: int) -> Array:
            return rows.read(places[start:stop].tolist(), [layer]).acts[layer]

        is_pooled = rows.spec.pooling != "none"
        return HiddenRows(
            self.layers,
            rows.harvest.width,
            rows.dtype,
            rows.spec.pooling if is_pooled else None,
            read,
            None if is_pooled else n_tokens,
        )

    def _tokens(self, places: Ints) -> Iterator[NDArray[np.int32]]:
        return (self.rows.harvest.token_ids(int(i)) for i in places)

    def _columns(self, places: Ints, n_tokens: Ints) -> PromptColumns:
        numbers = self.texts.tokenized_as[places]
        return PromptColumns(
            texts=[self.texts.texts[place] for place in places],
            labels=pick(self.labels, places),
            metadata={key: pick(column, places) for key, column in self.metadata.items()},
            num_tokens=n_tokens,
            pushed_index=places,
            tokenized_as=numbers if numbers.any() else None,
            token_ids=lambda start, stop: list(self._tokens(places[start:stop])),
        )


def _with_segments(
    rows: HarvestedRows, metadata: Sequence[Mapping[str, Any]] | None
) -> Sequence[Mapping[str, Any]] | None:
    """And which documents each window is made of, where prompts are windows."""
    found = [rows.harvest.segments(i) for i in range(len(rows.harvest))]
    if not any(each is not None for each in found):
        return metadata
    told = [
        {name: None if each is None else getattr(each, name).tolist() for name in ("documents", "offsets", "starts")}
        for each in found
    ]
    if metadata is None:
        return told
    if len(metadata) != len(told):
        return metadata  # whose length is refused by name
    return [{**own, **theirs} for own, theirs in zip(told, metadata, strict=True)]
