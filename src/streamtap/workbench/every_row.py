"""Every stored row of a dataset's prompts, with the tokens on which they stand, as far as they are recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from streamtap.activations import Activations
from streamtap.dataset.index import Places
from streamtap.dataset.reader import Dataset
from streamtap.errors import DatasetDamaged
from streamtap.pooling import ONE_TOKEN
from streamtap.positions import choose_positions
from streamtap.ragged import offsets_of, ranges
from streamtap.workbench.dataset_model import provenance_of, recorded_spec, special_ids

Ints = NDArray[np.int64]
TokenIds = NDArray[np.int32]


@dataclass(frozen=True)
class EveryRow:
    """Reads prompts by their numbers in the dataset, as often as wanted: what the index says is read once."""

    dataset: Dataset

    def read(self, layers: Sequence[int], rows: Ints) -> Activations:
        """All rows of prompts ``rows`` [prompts], ragged, in the stored dtype.

        ``token_ids`` and ``positions`` are -1 where a row stands on several tokens, or on which is not recorded.

        Raises:
            DatasetDamaged: files that do not fit the index.
        """
        dataset = self.dataset
        if dataset.hidden.pooling is None:
            tokens, offsets = self._token_places
            counts = np.diff(offsets)[rows]
            places = tokens.pick(ranges(offsets[rows], counts))
            positions = ranges(np.zeros(len(rows), np.int64), counts).astype(np.int32)
            token_ids = self._ids_of_rows(rows, counts)
        else:
            places, counts = self._places.pick(rows), np.ones(len(rows), np.int64)
            token_ids, positions = (column[rows] for column in self._stands)
        return Activations(
            acts={layer: dataset.read_layer(layer, places) for layer in layers},
            offsets=offsets_of(counts),
            token_ids=token_ids,
            positions=positions,
            provenance=provenance_of(dataset),
            pooling=dataset.hidden.pooling or "none",
            index=np.arange(len(rows), dtype=np.int64),
        )

    @cached_property
    def counts(self) -> Ints:
        """Rows of each prompt, int64 [prompts]."""
        if self.dataset.hidden.pooling is not None:
            return np.ones(len(self.dataset.index), np.int64)
        return np.diff(self._token_places[1])

    @cached_property
    def token_ids(self) -> list[TokenIds]:
        """Every token of each prompt, int32 [tokens]; empty where it is not recorded."""
        if self._recorded_ids is None:
            return [np.zeros(0, np.int32)] * len(self.dataset.index)
        values, offsets = self._recorded_ids
        return [values[start:stop] for start, stop in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)]

    @cached_property
    def _places(self) -> Places:
        return self.dataset.index.places()

    @cached_property
    def _token_places(self) -> tuple[Places, Ints]:
        return self.dataset.index.token_places()

    @cached_property
    def _recorded_ids(self) -> tuple[TokenIds, Ints] | None:
        if not self.dataset.index.has("token_ids"):
            return None
        values, offsets = self.dataset.index.lists("token_ids")
        return np.asarray(values, np.int32), offsets

    def _ids_of_rows(self, rows: Ints, counts: Ints) -> TokenIds:
        if self._recorded_ids is None:
            return np.full(int(counts.sum()), -1, np.int32)
        values, offsets = self._recorded_ids
        recorded = np.diff(offsets)[rows]
        if not ((recorded == counts) | (recorded == 0)).all():
            raise DatasetDamaged(f"the token ids that {self.dataset.source.name} records do not fit its token rows.")
        ids = np.full(int(counts.sum()), -1, np.int32)
        ids[np.repeat(recorded > 0, counts)] = values[ranges(offsets[rows], recorded)]
        return ids

    @cached_property
    def _stands(self) -> tuple[TokenIds, TokenIds]:
        """The token and position of each prompt's pooled row, int32 [prompts] each."""
        n_prompts, spec = len(self.dataset.index), recorded_spec(self.dataset)
        ids, positions = np.full(n_prompts, -1, np.int32), np.full(n_prompts, -1, np.int32)
        if spec is None or spec.pooling not in ONE_TOKEN or self._recorded_ids is None:
            return ids, positions
        excluded = special_ids(self.dataset) if spec.exclude_special_tokens else None
        end = -1 if spec.pooling == "last_token" else 0
        for i, tokens in enumerate(self.token_ids):
            if not len(tokens):
                continue
            positions[i] = choose_positions(spec.positions, tokens, excluded_ids=excluded, index=i)[end]
            ids[i] = tokens[positions[i]]
        return ids, positions
