"""The manifest as JSON: version 2's keys in the index's schema metadata, and version 1's file.

Versions 2.x keep it under keys that begin with ``lmprobe:``, versions 1.x in ``lmprobe_info.json``. What the format
has no word for (sizes and hashes, and how rows were captured) stands under ``streamtap:manifest``.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from typing import Any

from streamtap.dataset.inside import inside
from streamtap.dataset.manifest import FORMAT_VERSION, FileSum, Hidden, Logits, Manifest, Shard, value_bytes
from streamtap.dataset.names import HIDDEN, HIDDEN_KEY_PATTERN, HIDDEN_PATTERN, LOGITS, LOGITS_PATTERN, logits_file
from streamtap.errors import DatasetDamaged, Unsupported

_MAJOR, _MINOR = 2, 0
_PREFIX, _OURS = "lmprobe:", "streamtap:manifest"
#: How the keys of schema metadata begin that are read here.
PREFIXES = (_PREFIX.encode(), b"streamtap:")


def to_metadata(manifest: Manifest) -> dict[str, str]:
    """The manifest as schema metadata of an index, version 2.0."""
    values = dict(manifest.described) | {
        "format_version": FORMAT_VERSION,
        "model": {"name": manifest.model, "revision": manifest.commit},
        "num_prompts": manifest.n_prompts,
        "prompt_ordering": manifest.ordering,
        "tensors": _with_descriptors(manifest),
        "provenance": dict(manifest.provenance),
    }
    metadata = {_PREFIX + key: _json(values[key]) for key in values}
    if manifest.capture or manifest.files or manifest.content:
        files = {path: [each.size_bytes, each.sha256] for path, each in sorted(manifest.files.items())}
        ours = {"version": 1, "content": manifest.content, "capture": dict(manifest.capture), "files": files}
        metadata[_OURS] = _json(ours)
    return metadata


def from_metadata(metadata: Mapping[str, str], where: str) -> Manifest | None:
    """The manifest out of an index's schema metadata, None where there is none, as in versions 1.x.

    Raises:
        Unsupported: a newer major version.
        DatasetDamaged: metadata that means nothing.
    """
    said = {key.removeprefix(_PREFIX): value for key, value in metadata.items() if key.startswith(_PREFIX)}
    if "tensors" not in said and "tensor_types" not in said:
        return None
    ours = _parsed(metadata[_OURS], where) if _OURS in metadata else {}
    return _manifest({key: _parsed(value, where) for key, value in said.items()}, ours, where)


def from_sidecar(content: bytes, where: str) -> Manifest:
    """The manifest out of the file that versions 1.x keep it in.

    Raises:
        Unsupported: a newer major version.
        DatasetDamaged: a file that means nothing.
    """
    read = _parsed(content, where)
    if not isinstance(read, dict):
        raise DatasetDamaged(f"the metadata of {where} is no JSON object.")
    return _manifest(read, {}, where)


def _manifest(read: Mapping[str, Any], ours: Any, where: str) -> Manifest:
    _check_version(str(read.get("format_version", "1.0")), where)
    tensors = read.get("tensors") or read.get("tensor_types") or {}
    try:
        model = read.get("model") or {}
        return Manifest(
            model=str(model["name"]),
            commit=model.get("revision"),
            n_prompts=_number(read["num_prompts"]),
            hidden=_hidden(tensors[HIDDEN], where) if HIDDEN in tensors else None,
            logits=_logits(tensors[LOGITS], where) if LOGITS in tensors else None,
            ordering=str(read.get("prompt_ordering", "random")),
            format_version=str(read.get("format_version", "1.0")),
            provenance=dict(read.get("provenance") or {}),
            capture=dict(ours.get("capture") or {}),
            files={path: FileSum(int(size), str(sha)) for path, (size, sha) in (ours.get("files") or {}).items()},
            content=ours.get("content"),
            described=dict(read),
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise DatasetDamaged(
            f"the metadata of {where} is not that of an activation dataset: {type(error).__name__} at {error}."
        ) from error


def _hidden(said: Mapping[str, Any], where: str) -> Hidden:
    full = said.get("storage", "pooled") == "full_sequence"
    shards = tuple(_shard(each, where, is_full=full) for each in said["shards"])
    layers = tuple(_number(layer) for layer in said["layers"])
    if not layers:
        raise ValueError("no layer")
    return Hidden(
        layers=layers,
        width=_number(said["dim"]),
        dtype=str(said.get("dtype", "float32")),
        pooling=None if full else str(said.get("pooling", "last_token")),
        shards=shards,
        last_token_shards=_number(said.get("last_token_shards", 0)),
        per_layer=said.get("layout") == "per_layer",
    )


def _logits(said: Mapping[str, Any], where: str) -> Logits:
    shards = tuple(_shard(each, where, is_full=False) for each in said.get("shards", ()))
    return Logits(_number(said["k"]), str(said.get("dtype", "float32")), shards)


def _shard(said: Mapping[str, Any], where: str, *, is_full: bool) -> Shard:
    prompts = _number(said["num_prompts"])
    file = said.get("file")
    return Shard(
        prompts,
        _number(said["num_tokens"]) if is_full else prompts,
        None if file is None else inside(file, where),
    )


def _number(said: Any) -> int:
    number = int(said)
    if number < 0:
        raise ValueError(f"{number}, which counts nothing")
    return number


def _with_descriptors(manifest: Manifest) -> dict[str, Any]:
    """The format's descriptions of the tensors; those that were read are kept as they stand, in the new names."""
    said = manifest.described.get("tensors") or manifest.described.get("tensor_types")
    if said is not None:
        return {name: _upgraded(name, dict(each)) for name, each in said.items()}
    tensors: dict[str, Any] = {}
    if manifest.hidden is not None:
        tensors[HIDDEN] = describe_hidden(manifest.hidden)
    if manifest.logits is not None:
        tensors[LOGITS] = describe_logits(manifest.logits)
    return tensors


def _upgraded(name: str, said: dict[str, Any]) -> dict[str, Any]:
    if name == HIDDEN and said.get("layout") == "per_layer":
        return {"file_pattern": HIDDEN_PATTERN, "key_pattern": HIDDEN_KEY_PATTERN} | said
    if name == HIDDEN:
        return {"key_pattern": HIDDEN_KEY_PATTERN} | said
    return {"file_pattern": LOGITS_PATTERN} | said if name == LOGITS else said


def describe_hidden(hidden: Hidden) -> dict[str, Any]:
    """The format's description of activations."""
    full = hidden.pooling is None
    about: dict[str, Any] = {
        "type": "hidden",
        "layers": list(hidden.layers),
        "dim": hidden.width,
        "dtype": hidden.dtype,
        "layout": "per_layer",
        "file_pattern": HIDDEN_PATTERN,
        "key_pattern": HIDDEN_KEY_PATTERN,
        "shards": [
            {"num_prompts": each.prompts} | ({"num_tokens": each.rows} if full else {}) for each in hidden.shards
        ],
    }
    if full:
        return about | {"storage": "full_sequence", "last_token_shards": hidden.last_token_shards}
    return about | {
        "storage": "pooled",
        "pooling": hidden.pooling,
        "row_bytes": hidden.width * value_bytes(hidden.dtype),
    }


def describe_logits(logits: Logits) -> dict[str, Any]:
    """The format's description of logits."""
    shards = [{"file": logits_file(i), "num_prompts": each.prompts} for i, each in enumerate(logits.shards)]
    return {
        "type": "logits_topk",
        "k": logits.k,
        "dtype": logits.dtype,
        "pooling": "last_token",
        "file_pattern": LOGITS_PATTERN,
        "row_bytes": logits.k * 8,
        "shards": shards,
    }


def _check_version(version: str, where: str) -> None:
    major, _, minor = version.partition(".")
    if not (major.isdecimal() and minor.isdecimal()):
        raise DatasetDamaged(f"the format version of {where} should be two numbers such as 2.0; it is {version!r}.")
    if int(major) > _MAJOR:
        raise Unsupported(
            f"{where} has format version {version}, and this Streamtap reads up to {_MAJOR}.x: "
            "pip install --upgrade streamtap"
        )
    if int(major) == _MAJOR and int(minor) > _MINOR:
        warnings.warn(
            f"{where} has format version {version}, newer than the {FORMAT_VERSION} that this Streamtap knows; "
            "what is new in it is not seen.",
            stacklevel=2,
        )
    if int(major) < _MAJOR:
        warnings.warn(
            f"{where} has the older format version {version}; its owner can upgrade it, without moving a tensor: "
            f"streamtap dataset upgrade {where.partition('@')[0]}",
            stacklevel=2,
        )


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _parsed(text: str | bytes, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DatasetDamaged(f"the metadata of {where} is not JSON ({type(error).__name__}).") from error
