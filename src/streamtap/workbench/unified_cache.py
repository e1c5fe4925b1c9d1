"""``UnifiedCache``: a model's activations, perplexity and logits, made once and kept."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from streamtap.activations import Activations, Provenance
from streamtap.cache import CacheStore, Rows
from streamtap.engines.base import Engine
from streamtap.errors import InvalidInput, MissingExtra, NotCached, RowsDamaged
from streamtap.layers import LayerSpec, resolve_layers
from streamtap.pooling import Pooling, check_pooling
from streamtap.positions import PositionSpec
from streamtap.settings import Settings
from streamtap.spec import CaptureSpec, Prompt, PromptLike, Truncate, as_prompts
from streamtap.workbench.extraction import estimate_bytes, plan_jobs, run_job
from streamtap.workbench.harvest_import import import_harvest
from streamtap.workbench.harvested_rows import Harvest
from streamtap.workbench.lacking import Need, find_needs, refuse_other_pooling, scores_of, told
from streamtap.workbench.load_options import LoadOptions
from streamtap.workbench.logits import Logits
from streamtap.workbench.model_source import ModelSource, model_source
from streamtap.workbench.patience import Patience
from streamtap.workbench.prompt_keys import Keyed, PromptKeys
from streamtap.workbench.stored_rows import RowReader, no_rows
from streamtap.workbench.wanted import score_channels, score_identity
from streamtap.workbench.warmup_stats import WarmupStats, stats_of

__all__ = ["Logits", "UnifiedCache", "WarmupStats"]

Array = NDArray[Any]


class UnifiedCache:
    """Extracts what it is asked for once and keeps it; the next call, or process, only reads.

    Args:
        model: ``"demo"``, a local folder, a GGUF file, a Hub id, or an engine, which is used as it is.
        layers: Which blocks: ``16``, ``-1``, ``[8, 16]``, ``"all"``, ``"middle"``, ``"last"``, ``"8-20"``.
        compute_perplexity: Also keep mean, minimum and maximum perplexity of each prompt.
        device: ``"auto"``, ``"cpu"``, ``"cuda:1"``, …
        remote: With ``backend="nnsight"``, run on NDIF; needs ``NDIF_API_KEY``.
        batch_size: At most this many prompts in a batch; None leaves it to the token budget.
        cache_pooled: Keep one row a prompt; False keeps every chosen row, which serves any pooling.
        pooling: How a prompt's rows become one.
        backend: What runs the model: ``"local"``, ``"nnsight"``, ``"vllm"``, ``"api"`` (a service): ``load_engine``.
        dtype: None or ``"auto"`` keeps the checkpoint's; else ``"float32"``, ``"bfloat16"``, … or a torch dtype. Of a
            model that is not here, ``"auto"`` takes pulled rows of any one dtype, until it is loaded for others.
        cache_logits: Also keep logits.
        logit_top_k: Only the k largest logits, with their ids.
        logit_positions: ``"last"`` or ``"all"``.
        cache_dir: Folder of the store; by default under the cache folder of ``Settings``.
        revision: Branch, tag or commit of a Hub id.
        positions: Which tokens have a row; see ``CaptureSpec``.
        exclude_special_tokens: Leave BOS and its like out, by id.
        truncate: Cut prompts longer than the context on this side; None refuses them.
        generation_prompt: End a chat with the template's opening of the assistant's turn.
        exact: Run each prompt alone and whole.
        token_perplexity: Also keep each token's negative log-likelihood.
        max_batch_tokens: At most this many tokens, padding counted, in a batch.
        device_map: Spread over devices as ``accelerate`` does, instead of ``device``.
        quantization: ``"8bit"``, ``"4bit"`` or a ``transformers`` quantisation config.
        attention: Attention kernel; None lets the model choose.
        api_base: Address of the service; by default ``STREAMTAP_API_BASE`` or ``ACS_API_BASE``.
        api_key: Its key; by default ``STREAMTAP_API_KEY`` or ``ACS_API_KEY``. Or that of the server in ``remote``.
        engine_options: More options of the backend's own engine, such as vLLM's ``tensor_parallel_size``.
        progress: Show a progress bar; None shows it on a terminal only.

    Raises:
        InvalidInput: an argument that means nothing to the backend, or one for loading beside an engine.
        Unsupported: ``remote`` with another backend than nnsight's.
    """

    def __init__(
        self,
        model: str | Path | Engine,
        layers: LayerSpec = "all",
        compute_perplexity: bool = True,
        device: str = "auto",
        remote: bool = False,
        batch_size: int | None = 8,
        cache_pooled: bool = True,
        pooling: Pooling = "last_token",
        backend: str = "local",
        dtype: Any = None,
        cache_logits: bool = False,
        logit_top_k: int | None = None,
        logit_positions: Literal["last", "all"] = "last",
        *,
        cache_dir: Path | str | None = None,
        revision: str | None = None,
        positions: PositionSpec = "all",
        exclude_special_tokens: bool = False,
        truncate: Truncate | None = None,
        generation_prompt: bool = False,
        exact: bool = False,
        token_perplexity: bool = False,
        max_batch_tokens: int | None = None,
        device_map: Any = None,
        quantization: Any = None,
        attention: str | None = None,
        api_base: str | None = None,
        api_key: str | None = None,
        engine_options: Mapping[str, Any] | None = None,
        progress: bool | None = None,
    ) -> None:
        self.pooling = check_pooling(pooling)
        self.layers = layers
        self.spec = CaptureSpec(
            layers=(),
            positions=positions,
            pooling=pooling if cache_pooled else "none",
            exclude_special_tokens=exclude_special_tokens,
            truncate=truncate,
            generation_prompt=generation_prompt,
            exact=exact,
            perplexity=compute_perplexity,
            token_nll=token_perplexity,
            logits=logit_positions if cache_logits else None,
            logit_top_k=logit_top_k if cache_logits else None,
        )
        settings = Settings.from_environment()
        self.store = CacheStore(Path(cache_dir) if cache_dir is not None else settings.activations_dir)
        kind = "auto" if dtype is None else str(dtype).removeprefix("torch.")
        options = LoadOptions(
            *(revision, kind, device, device_map, quantization, attention, batch_size, max_batch_tokens),
            *(backend, remote, api_base, api_key, engine_options or {}),
        )
        self._remote = bool(remote)
        self.source: ModelSource = model_source(model, options, self.store, settings)
        self._progress, self._patience = progress, Patience()

    def __enter__(self) -> Self:
        """Enter the block at whose end the cache is closed."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the cache."""
        self.close()

    def close(self) -> None:
        """Close the store, and the engine where it was opened here; one that was given stays open."""
        try:
            self.source.close()
        finally:
            self.store.close()

    @property
    def provenance(self) -> Provenance:
        """Where the values come from; loads the model only if this cache has never seen it."""
        return self.source.provenance

    @property
    def layer_indices(self) -> tuple[int, ...]:
        """The block numbers that ``layers`` names, ascending."""
        return resolve_layers(self.layers, self.provenance.n_layers)

    def warmup(
        self, prompts: Sequence[PromptLike], remote: bool | None = None, max_retries: int | None = None
    ) -> WarmupStats:
        """Extract what the cache lacks of ``prompts``; what is there is not run again.

        Stopped at any moment, it loses at most the batch in the model and the one on its way to
        the disk. ``max_retries`` is for backends across a network: how often a way that fails is tried again, in this
        call.

        Raises:
            InvalidPrompt: a prompt that cannot be run, named by its index before any work.
            InvalidPositions: a prompt without the positions asked for, in the same way.
            NotEnoughSpace: the disk cannot take what would be written.
            CaptureMissed: a layer did not come whole and finite.
        """
        self._check_remote(remote)
        started = time.perf_counter()
        read = as_prompts(prompts)
        keyed, needs = self._lacking(read, self.spec, None)
        self._extract(needs, keyed, self.spec, max_retries)
        return stats_of(self.spec, needs, len(read), time.perf_counter() - started, has_layers=bool(self.layer_indices))

    def import_harvest(self, harvest: Harvest | str | Path, layers: LayerSpec | None = None) -> int:
        """Put the rows of a harvest of this model into the cache; gives the number of its prompts.

        ``harvest`` is a run, several joined, or where one lies: a folder, or an ``s3://``, ``gs://`` or ``az://``
        address. The rows are then served as if they had been extracted here; where the model is not on this machine, to
        prompts of token ids. What the cache has already is not read.

        Raises:
            InvalidInput: it is of another model, holds products or rounded rows, or does not say what made its rows.
            InvalidLayers: ``layers`` names some that it does not hold.
            HarvestDamaged: it is not whole, or a file is damaged.
            NotEnoughSpace: the disk cannot take the rows.
        """
        return import_harvest(self.store, self.source, harvest, layers, self._progress)

    def activations(self, prompts: Sequence[PromptLike], layer: int, pooling: Pooling | None = None) -> Array:
        """One row a prompt at ``layer``, [prompts, hidden], in the order asked and the model's dtype.

        What is missing is extracted first. ``pooling`` is the cache's own unless another is
        given; rows kept unpooled serve any.

        Raises:
            PoolingMismatch: only rows of another pooling are stored; both are named.
            InvalidLayers: the model has no such layer.
            NotCached: rows are missing, and what would run the model is not installed.
        """
        asked = check_pooling(pooling or self.pooling)
        if asked == "none":
            raise InvalidInput("activations() gives one row a prompt; use rows() for every row, or choose a pooling.")
        return self._rows(prompts, (self._one_layer(layer),), asked)[0].values

    def rows(self, prompts: Sequence[PromptLike], layers: LayerSpec | None = None) -> Activations:
        """All stored rows of ``prompts``, ragged, in the order asked; ``layers`` defaults to the cache's.

        Raises:
            PoolingMismatch: only rows of another pooling are stored.
        """
        numbers = self.layer_indices if layers is None else resolve_layers(layers, self.provenance.n_layers)
        if not numbers:
            raise InvalidInput("no layers were asked for, so there are no rows; name some with layers=.")
        found = self._rows(prompts, numbers, self.spec.pooling)
        first = found[0]
        return Activations(
            acts={layer: rows.values for layer, rows in zip(numbers, found, strict=True)},
            offsets=first.offsets,
            token_ids=first.token_ids,
            positions=first.positions,
            provenance=self.provenance,
            pooling=self.spec.pooling,
            index=np.arange(len(first.offsets) - 1, dtype=np.int64),
        )

    def get_activations(
        self, prompts: Sequence[PromptLike], remote: bool | None = None
    ) -> tuple[Array, NDArray[np.bool_] | None]:
        """All the cache's layers side by side, and a mask where rows were padded.

        Pooled: ([prompts, layers * hidden], None). Unpooled: ([prompts, rows, layers * hidden],
        [prompts, rows] True at real rows), padded on the right with zeros. ``rows()`` gives the
        same without padding.
        """
        self._check_remote(remote)
        acts = self.rows(prompts)
        flat = np.concatenate([acts.acts[layer] for layer in acts.layers], axis=1)
        if self.spec.pooling != "none":
            return flat, None
        counts = np.diff(acts.offsets)
        mask = np.arange(counts.max(initial=0))[None, :] < counts[:, None]
        padded = np.zeros((*mask.shape, flat.shape[1]), flat.dtype)
        padded[mask] = flat
        return padded, mask

    def get_perplexity(self, prompts: Sequence[PromptLike], remote: bool | None = None) -> NDArray[np.float64]:
        """Mean, minimum and maximum perplexity, float64 [prompts, 3]; NaN for a prompt of one token.

        Raises:
            InvalidInput: the cache was made with ``compute_perplexity=False``.
        """
        self._check_remote(remote)
        return self._scores(prompts, "perplexity", ["perplexity"], "compute_perplexity=True")[0].values

    def get_token_perplexity(self, prompts: Sequence[PromptLike]) -> list[NDArray[np.float32]]:
        """Perplexity of each token but the first, one float32 [tokens - 1] a prompt.

        Raises:
            InvalidInput: the cache was made without ``token_perplexity=True``.
        """
        rows = self._scores(prompts, "token_nll", ["nll"], "token_perplexity=True")[0]
        values = np.exp(rows.values[:, 0])
        return [values[start:stop] for start, stop in pairwise(rows.offsets.tolist())]

    def get_logits(self, prompts: Sequence[PromptLike], remote: bool | None = None) -> Logits:
        """Logits as they were asked for, raw, not probabilities.

        Raises:
            InvalidInput: the cache was made without ``cache_logits=True``.
        """
        self._check_remote(remote)
        names = ["logits"] if self.spec.logit_top_k is None else ["logits", "ids"]
        found = self._scores(prompts, "logits", names, "cache_logits=True")
        return Logits(found[0].values, found[1].values if len(found) > 1 else None, found[0].offsets)

    def _keys(self) -> PromptKeys:
        return PromptKeys(self.store, self.source, self.spec)

    def _one_layer(self, layer: int) -> int:
        numbers = resolve_layers(layer, self.provenance.n_layers)
        if len(numbers) != 1:
            raise InvalidInput(f"layer must name one layer; {layer!r} names {len(numbers)}. rows() takes several.")
        return numbers[0]

    def _rows(self, prompts: Sequence[PromptLike], layers: Sequence[int], pooling: Pooling) -> list[Rows]:
        spec = replace(self.spec, pooling=pooling, perplexity=False, token_nll=False, logits=None)
        # A cache of unpooled rows keeps them so, whatever pooling they are made for.
        kept = replace(spec, pooling="none") if self.spec.pooling == "none" else spec
        keyed, needs = self._lacking(as_prompts(prompts), spec, layers)
        if needs:
            refuse_other_pooling(self.store, self.provenance, spec, layers, keyed, needs)
            self._extract(needs, keyed, kept)
        special = np.asarray(self.source.tokenizer_limits["special_ids"], np.int32)
        reader = RowReader(self.store, self.provenance, spec, special)
        found = []
        for layer in layers:
            try:
                found.append(reader.read(keyed, layer))
            except RowsDamaged:
                # They were set aside, so now they are missing and are run again.
                before = self.provenance
                keyed, needs = self._lacking(as_prompts(prompts), spec, layers)
                self._extract(needs, keyed, kept)
                if self.provenance != before:  # loaded just now, and none of what was read may be mixed with its rows
                    return self._rows(prompts, layers, pooling)
                found.append(reader.read(keyed, layer))
        return found

    def _scores(self, prompts: Sequence[PromptLike], kind: str, channels: list[str], asked: str) -> list[Rows]:
        if kind not in scores_of(self.spec):
            raise InvalidInput(f"this cache keeps no {kind}; make it with {asked}.")
        spec = replace(
            self.spec,
            perplexity=kind == "perplexity",
            token_nll=kind == "token_nll",
            logits=self.spec.logits if kind == "logits" else None,
        )
        keyed, needs = self._lacking(as_prompts(prompts), spec, ())
        if not keyed.tokens:
            vocabulary = self.source.tokenizer_limits["vocabulary"] or 0
            return [no_rows(channel) for channel in score_channels(self.spec, kind, vocabulary)]
        self._extract(needs, keyed, spec)
        try:
            return self._read_scores(spec, kind, channels, keyed)
        except RowsDamaged:
            keyed, needs = self._lacking(as_prompts(prompts), spec, ())
            self._extract(needs, keyed, spec)
            return self._read_scores(spec, kind, channels, keyed)

    def _read_scores(self, spec: CaptureSpec, kind: str, channels: list[str], keyed: Keyed) -> list[Rows]:
        set_id = self.store.ensure_set(score_identity(self.provenance, spec, kind), asdict(self.provenance))
        return [self.store.read(set_id, keyed.tokens, channel) for channel in channels]

    def _lacking(
        self, prompts: Sequence[Prompt], spec: CaptureSpec, layers: Sequence[int] | None
    ) -> tuple[Keyed, dict[Need, list[int]]]:
        """The keys of ``prompts``, and what is lacking of them at ``layers``, None for the cache's own."""

        def look() -> tuple[Keyed, dict[Need, list[int]]]:
            keyed = self._keys().find(prompts)
            numbers = self.layer_indices if layers is None else layers
            return keyed, find_needs(self.store, self.provenance, spec, numbers, keyed)

        if not self.source.may_change:
            return look()
        keyed, needs = look()
        if needs:
            if layers:
                refuse_other_pooling(self.store, self.provenance, spec, layers, keyed, needs)
            try:
                self.source.engine()
            except (NotCached, MissingExtra) as error:
                raise NotCached(f"{told(needs, len(prompts))}; {error}") from error
        # Once the model is here it may be known better than the dataset or the cache knew it.
        return (keyed, needs) if self.source.may_change else look()

    def _extract(
        self, needs: Mapping[Need, Sequence[int]], keyed: Keyed, spec: CaptureSpec, max_retries: int | None = None
    ) -> None:
        if not needs:
            return
        from streamtap.workbench.progress import progress_bar

        jobs = plan_jobs(self._keys(), needs, keyed)
        vocabulary = self.source.tokenizer_limits["vocabulary"] or 0
        self.store.require_space(estimate_bytes(jobs, self.provenance, spec, vocabulary))
        try:
            engine = self.source.engine()
        except MissingExtra as error:
            lacking = sum(len(places) for places in needs.values())
            raise NotCached(f"{lacking} of {len(keyed.rows)} prompts are not in the cache, and {error}") from error
        bar = progress_bar("extracting", sum(len(job.keys) for job in jobs), show=self._progress)
        with self._patience.of(engine, max_retries), bar as advance:
            for job in jobs:
                run_job(self.store, engine, self.provenance, spec, job, advance)

    def _check_remote(self, remote: bool | None) -> None:
        if remote is not None and bool(remote) != self._remote:
            raise InvalidInput(
                f"this cache was made with remote={self._remote}, which is where its rows come from; make another for "
                f"remote={remote}."
            )
