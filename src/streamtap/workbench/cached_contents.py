"""What the cache holds of the chosen prompts, as the contents of a dataset."""

from __future__ import annotations

import hashlib
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

import streamtap
from streamtap.activations import Provenance
from streamtap.cache import CacheStore, SetInfo
from streamtap.cache.layout import stored_dtype
from streamtap.dataset.columns import PromptColumns, pick
from streamtap.dataset.contents import Contents, HiddenRows, LogitRows
from streamtap.errors import InvalidInput
from streamtap.fingerprint import fingerprint
from streamtap.spec import Prompt
from streamtap.workbench.choice import Chosen
from streamtap.workbench.head_holdings import find_token_perplexity, lacking, read_perplexity, read_token_perplexity
from streamtap.workbench.holdings import Holding
from streamtap.workbench.prompt_keys import Keyed
from streamtap.workbench.stored_rows import RowReader
from streamtap.workbench.tokenizing_rules import CHAT, may_be_cut, plain_rule
from streamtap.workbench.wanted import row_identity

#: As torch calls them, such as cpu or cuda:1; anything else that is told may be an address.
_DEVICE = re.compile(r"[a-z]+(:\d{1,2})?")

Ints = NDArray[np.int64]
Array = NDArray[Any]


@dataclass(frozen=True)
class Given:
    """What the caller said of each prompt, in the caller's order."""

    prompts: list[Prompt]
    texts: list[str]
    labels: Any
    metadata: Mapping[str, Any]


def contents_of(store: CacheStore, holding: Holding, chosen: Chosen, given: Given, order: Ints | None) -> Contents:
    """What will be published: the chosen prompts, in ``order`` (int64 [prompts]) or as they were given."""
    picked = chosen if order is None else chosen.pick(order)
    places = np.asarray(picked.places, np.int64)
    provenance, spec = holding.provenance, holding.spec
    n_tokens = _token_counts(store, picked.digests)
    scored = find_token_perplexity(store, provenance, picked.digests, exact=spec.exact)
    columns = PromptColumns(
        texts=[given.texts[place] for place in picked.places],
        labels=pick(given.labels, places),
        metadata={key: pick(column, places) for key, column in given.metadata.items()},
        num_tokens=n_tokens,
        pushed_index=places,
        tokenized_as=_tokenized_as(holding, given, picked.places, n_tokens),
        perplexity=read_perplexity(store, provenance, picked.digests, exact=spec.exact),
        token_ids=lambda start, stop: store.token_ids(picked.digests[start:stop]),
        token_perplexity=None if scored is None else partial(_token_perplexity, store, scored, picked.digests),
    )
    contents = Contents(
        model=provenance.model,
        commit=provenance.commit,
        n_prompts=len(places),
        hidden=_hidden_rows(store, holding, picked, n_tokens) if picked.layers else None,
        logits=_logit_rows(store, picked.logits, picked.digests) if picked.logits else None,
        columns=columns,
        content="",
        ordering="given" if order is None else "random",
        provenance=made_by(provenance),
        capture={
            "identity": row_identity(provenance, spec),
            "provenance": published(provenance),
            "limits": dict(holding.limits),
        },
    )
    n_scored = 0 if scored is None else len(places) - len(lacking(store, scored, picked.digests))
    return replace(contents, content=_content(contents, picked.digests, n_scored))


def _tokenized_as(holding: Holding, given: Given, places: Sequence[int], n_tokens: Ints) -> Ints | None:
    """How each text became tokens, None where all did in the plain way."""
    numbers = np.zeros(len(places), np.int64)
    for row, place in enumerate(places):
        rule, is_chat = holding.rules[place], given.prompts[place].messages is not None
        is_cut = may_be_cut(rule, int(n_tokens[row]), holding.limits["context_length"])
        numbers[row] = plain_rule(rule, is_chat=is_chat, may_be_cut=is_cut) + CHAT * is_chat
    return numbers if numbers.any() else None


def _hidden_rows(store: CacheStore, holding: Holding, picked: Chosen, n_tokens: Ints) -> HiddenRows:
    provenance, spec = holding.provenance, holding.spec
    dtype = stored_dtype(provenance.dtype)
    if spec.pooling == "none" and holding.is_partial:
        raise InvalidInput(
            f"the cached rows are of positions {holding.identity['positions']!r} without pooling, which have no place "
            "in the format: it holds one row a prompt, or one a token. Choose a pooling=."
        )
    reader = RowReader(store, provenance, spec, np.asarray(holding.limits["special_ids"], np.int32))

    def read(layer: int, start: int, stop: int) -> Array:
        block = picked.digests[start:stop]
        rows = reader.read(Keyed(block, block, [0] * len(block), {}), layer)
        return rows.values.astype(dtype, copy=False)

    counts = n_tokens if spec.pooling == "none" else None
    return HiddenRows(
        picked.layers, provenance.hidden, dtype, None if counts is not None else spec.pooling, read, counts
    )


def _logit_rows(store: CacheStore, held: SetInfo, digests: Sequence[bytes]) -> LogitRows:
    k = next(channel.width for channel in held.channels if channel.name == "logits")

    def read(start: int, stop: int) -> tuple[Array, Array]:
        block = digests[start:stop]
        return store.read(held.id, block, "logits").values, store.read(held.id, block, "ids").values

    return LogitRows(k, read)


def _token_perplexity(
    store: CacheStore, held: SetInfo, digests: Sequence[bytes], start: int, stop: int
) -> Sequence[Array | None]:
    return read_token_perplexity(store, held, digests[start:stop])


def _token_counts(store: CacheStore, digests: Sequence[bytes]) -> Ints:
    counts = [
        len(ids) for start in range(0, len(digests), 4096) for ids in store.token_ids(digests[start : start + 4096])
    ]
    return np.asarray(counts, np.int64)


def published(provenance: Provenance) -> dict[str, Any]:
    """A provenance as a dataset tells it: without the address of somebody's service, where the model ran behind one."""
    return asdict(provenance if _DEVICE.fullmatch(provenance.device) else replace(provenance, device=""))


def made_by(provenance: Provenance) -> dict[str, Any]:
    """What a dataset says of who made its rows, and when it was published."""
    return {
        "streamtap_version": streamtap.__version__,
        "extraction_backend": provenance.engine,
        "engine_version": provenance.engine_version,
        "python_version": platform.python_version(),
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _content(contents: Contents, digests: Sequence[bytes], token_scores: int) -> str:
    """What makes two pushes the same: rows and scores by their identity and not by their bits, and every column."""
    rows, logits, perplexity = contents.hidden, contents.logits, contents.columns.perplexity
    return fingerprint(
        {
            "identity": dict(contents.capture["identity"]),
            "model": contents.model,
            "prompts": hashlib.sha256(b"".join(digests)).hexdigest(),
            "hidden": None if rows is None else [list(rows.layers), rows.dtype.name, rows.pooling],
            "logits": None if logits is None else logits.k,
            "columns": contents.columns.fingerprint(),
            "perplexity": None if perplexity is None else int((~np.isnan(perplexity[:, 0])).sum()),
            "token_perplexity": token_scores,
        }
    )
