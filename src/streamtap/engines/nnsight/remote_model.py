"""A model that NDIF runs: its tokenizer and config here, its weights there."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

import nnsight
from nnsight.schema.config import CONFIG

from streamtap.activations import Provenance
from streamtap.engines.demo_model import DEMO
from streamtap.engines.described import described_model
from streamtap.engines.nnsight.ndif_jobs import LOGIN, NdifPlace, model_key
from streamtap.engines.nnsight.wrapping import Tree, tree_without_weights
from streamtap.engines.references import ModelReference
from streamtap.engines.tokenizing import PromptTokenizer
from streamtap.errors import InvalidInput, MissingAuthorization
from streamtap.settings import Settings

#: NDIF itself, at the address that nnsight is set up for.
NDIF = ""
_DTYPES = {"auto": "bfloat16", "bfloat16": "bfloat16", "float32": "float32", "float16": "float16"}


@dataclass(frozen=True, eq=False)
class RemoteModel:
    """What is known here of a model that runs at ``place``."""

    tree: Tree
    provenance: Provenance
    tokenizer: PromptTokenizer
    place: NdifPlace


def remote_model(
    name: str,
    revision: str | None,
    dtype: str,
    attention: str | None,
    host: str,
    reference: ModelReference | None = None,
    api_key: str | None = None,
) -> RemoteModel:
    """Read the small files of ``name``, fetched from the Hub if need be; no weights are read or fetched.

    Args:
        name: A Hub id; for a ``host`` that is not ``NDIF`` whatever that server calls the model.
        revision: Branch, tag or commit of a Hub id.
        dtype: Of the rows that come back; ``"auto"`` is bfloat16.
        attention: Attention kernel that the server is asked to use.
        host: ``NDIF`` or ``http(s)://…``.
        reference: What ``name`` means on this machine, where it was found already.
        api_key: The server's; without it NDIF gets that of the environment, or of nnsight, and another server none.

    Raises:
        InvalidInput: no such model, a dtype, host or name that means nothing, or a key that others could read.
        MissingAuthorization: NDIF is asked without a key.
        UnsupportedModel: it is no causal language model whose decoder blocks are found.
    """
    address = _address(host)
    is_ndif = address == _address(NDIF)
    key = (api_key or "").strip() or (_ndif_key() if is_ndif else None)
    _check_way(address, key)
    if host == NDIF:
        _check_ndif(name, key)
    if dtype not in _DTYPES:
        raise InvalidInput(f"with remote=, dtype must be one of {', '.join(_DTYPES)}; got {dtype!r}.")
    about = described_model(name, revision, reference=reference)
    folder = about.reference.folder
    assert folder is not None
    tree = tree_without_weights(folder, name, about.tokenizer.tokenizer, attention)
    environment = tree.model._remoteable_get_env()
    place = NdifPlace(address, model_key(name, revision), environment, key, is_ndif)
    provenance = Provenance(
        model=name,
        commit=_commit_there(about.reference, revision),
        tokenizer=about.tokenizer_print,
        dtype=_DTYPES[dtype],
        attention=environment.get("attn_implementation"),
        engine="ndif",
        engine_version=nnsight.__version__,
        device=place.name,
        n_layers=about.n_layers,
        hidden=about.hidden,
    )
    return RemoteModel(tree, provenance, about.tokenizer, place)


def _address(host: str) -> str:
    if host == NDIF:
        return str(CONFIG.API.HOST).rstrip("/")
    if not host.startswith(("http://", "https://")):
        raise InvalidInput(f"remote must be True, False, 'local' or http(s)://…; got {host!r}.")
    return host.rstrip("/")


def _ndif_key() -> str | None:
    return Settings.from_environment().ndif_api_key or CONFIG.API.APIKEY


def _check_way(address: str, key: str | None) -> None:
    parts = urlsplit(address)
    if key and parts.scheme == "http" and not _is_loopback(parts.hostname or ""):
        raise InvalidInput(
            f"{parts.hostname} is asked over plain http, where others could read the API key; give an https:// address."
        )


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"


def _commit_there(reference: ModelReference, revision: str | None) -> str:
    """What the rows are filed under: a commit of the Hub only where it was asked for, for else the server chooses."""
    commit = reference.commit or "unknown"
    return f"ndif:{reference.name}@{revision or 'main'}" if reference.is_hub and commit != revision else commit


def _check_ndif(name: str, key: str | None) -> None:
    if not key:
        raise MissingAuthorization(
            f"remote=True runs {name!r} on NDIF, which wants an API key: set NDIF_API_KEY; {LOGIN} gives one."
        )
    if name == DEMO or Path(name).expanduser().exists():
        raise InvalidInput(
            f"NDIF knows models by their Hub id, and {name!r} is on this machine alone; give the id, or run it here: "
            "remote=False."
        )
