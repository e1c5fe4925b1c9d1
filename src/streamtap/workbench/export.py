"""Rows in a folder that plain safetensors reads: one file a layer, and a manifest that makes them whole.

::

    layer_007.safetensors   rows [rows, hidden], offsets [prompts + 1], token_ids [rows], positions [rows]
    logits.safetensors      values and, of a top k, ids [rows, k or vocabulary], offsets [prompts + 1]
    prompts.parquet         index, num_tokens, truncated_from, perplexity_mean, …, and text where asked for
    manifest.json           model, what was asked, and every file's size and sha256; written last

Prompt i owns rows ``offsets[i]`` to ``offsets[i + 1]``.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

import streamtap
from streamtap.activations import Activations
from streamtap.errors import InvalidInput, MissingExtra
from streamtap.positions import canonical_positions
from streamtap.spec import Prompt
from streamtap.workbench.forecast import forecast
from streamtap.workbench.prompt_files import write_columns
from streamtap.workbench.unified_cache import UnifiedCache

MANIFEST = "manifest.json"
PROMPTS = "prompts.parquet"
LOGITS = "logits.safetensors"
FORMAT, VERSION = "streamtap-rows", 1


def export_rows(
    cache: UnifiedCache,
    prompts: Sequence[Prompt],
    folder: str | Path,
    *,
    with_text: bool = False,
    overwrite: bool = False,
    advance: Callable[[int], None] = lambda _layers: None,
) -> Path:
    """Write all that ``cache`` keeps of ``prompts`` to ``folder``, whole or not at all.

    One layer at a time is in memory. ``with_text`` puts the prompts themselves beside the rows;
    ``advance`` is told of each layer that was written.

    Raises:
        InvalidInput: ``folder`` is not empty; ``overwrite`` replaces an earlier export, and nothing else.
        MissingExtra: safetensors is not installed.
    """
    target = check_folder(folder, overwrite=overwrite)
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.{os.getpid()}.part")
    draft.mkdir()
    try:
        shape: dict[str, Any] = {}
        for layer in cache.layer_indices:
            acts = cache.rows(prompts, layers=layer)
            write_layer(acts, layer, draft / layer_file(layer))
            shape = {"rows": len(acts.token_ids), "dtype": acts.acts[layer].dtype.name}
            advance(1)
        if cache.spec.logits is not None:
            _write_logits(cache, prompts, draft / LOGITS)
        write_columns(draft / PROMPTS, _columns(cache, prompts, with_text))
        _write_manifest(draft, _about(cache) | shape | {"prompts": len(prompts)})
        _put_in_place(draft, target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target


def check_folder(folder: str | Path, *, overwrite: bool = False) -> Path:
    """The folder's absolute path, if an export may be put there.

    Raises:
        InvalidInput: it is a file, or holds something that is not to be overwritten.
    """
    target = Path(folder).resolve()
    if target.exists() and not target.is_dir():
        raise InvalidInput(f"{folder} is a file; name a folder to write to.")
    there = {file.name for file in target.iterdir()} if target.is_dir() else set()
    if there and not overwrite:
        raise InvalidInput(f"{folder} is not empty; name another folder, or overwrite (--overwrite) an earlier export.")
    if there and not there <= _exported(target):
        raise InvalidInput(
            f"{folder} holds files that are not of an export, and overwriting would remove them; name another folder."
        )
    return target


def write_layer(acts: Activations, layer: int, path: Path) -> None:
    """Write one layer's rows to a safetensors file, in their own dtype.

    Raises:
        MissingExtra: safetensors is not installed.
    """
    _save(
        path,
        {
            "rows": acts.acts[layer],
            "offsets": acts.offsets,
            "token_ids": acts.token_ids,
            "positions": acts.positions,
        },
        {"layer": str(layer), "pooling": acts.pooling, "model": acts.provenance.model},
    )


def write_rows(acts: Activations, path: Path) -> None:
    """Write all of one capture to one file, ``.safetensors`` or ``.npz``, whole or not at all.

    ``residual_stream`` is [layers, rows, hidden], with ``layer_indices``, ``token_ids``, ``positions`` and ``offsets``
    beside it. numpy has no bfloat16 of its own, so an ``.npz`` holds such rows as float32, which changes no value.

    Raises:
        MissingExtra: safetensors is not installed.
    """
    stacked = np.stack([acts.acts[layer] for layer in acts.layers])
    tensors = {
        "residual_stream": stacked,
        "layer_indices": np.array(acts.layers, np.int32),
        "token_ids": acts.token_ids,
        "positions": acts.positions,
        "offsets": acts.offsets,
    }
    draft = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        if path.suffix == ".npz":
            wide = stacked.astype(np.float32) if stacked.dtype.name == "bfloat16" else stacked
            np.savez(draft, **(tensors | {"residual_stream": wide}))
        else:
            _save(draft, tensors, {"model": acts.provenance.model})
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def layer_file(layer: int) -> str:
    """Name of the file that holds ``layer``."""
    return f"layer_{layer:03d}.safetensors"


def _save(path: Path, tensors: Mapping[str, Any], about: Mapping[str, str]) -> None:
    try:
        from safetensors.numpy import save_file
    except ImportError as error:
        raise MissingExtra("writing rows to a folder needs safetensors: pip install 'streamtap[local]'.") from error
    # The library reads memory as it lies: a slice would be written as its neighbours, or whole.
    save_file({name: np.ascontiguousarray(values) for name, values in tensors.items()}, path, dict(about))


def _write_logits(cache: UnifiedCache, prompts: Sequence[Prompt], path: Path) -> None:
    logits = cache.get_logits(prompts)
    ids = {} if logits.ids is None else {"ids": logits.ids}
    _save(path, {"values": logits.values, **ids, "offsets": logits.offsets}, {"positions": str(cache.spec.logits)})


def _columns(cache: UnifiedCache, prompts: Sequence[Prompt], with_text: bool) -> dict[str, Any]:
    found = forecast(cache, prompts)
    columns: dict[str, Any] = {
        "index": np.arange(len(prompts)),
        "num_tokens": found.n_tokens,
        "truncated_from": found.truncated_from,
    }
    if cache.spec.perplexity:
        perplexity = cache.get_perplexity(prompts)
        columns |= {f"perplexity_{name}": perplexity[:, i] for i, name in enumerate(("mean", "min", "max"))}
    if with_text:
        columns["text"] = [_as_text(prompt) for prompt in prompts]
    return columns


def _as_text(prompt: Prompt) -> str | None:
    """The prompt's text, a chat as JSON messages, nothing for token ids."""
    if prompt.messages is None:
        return prompt.text
    return json.dumps([{"role": role, "content": content} for role, content in prompt.messages], ensure_ascii=False)


def _about(cache: UnifiedCache) -> dict[str, Any]:
    spec = cache.spec
    return {
        "format": FORMAT,
        "version": VERSION,
        "streamtap": streamtap.__version__,
        "model": asdict(cache.provenance),
        "layers": list(cache.layer_indices),
        "asked": {
            "site": spec.site,
            "positions": canonical_positions(spec.positions),
            "pooling": spec.pooling,
            "exclude_special_tokens": spec.exclude_special_tokens,
            "truncate": spec.truncate,
            "generation_prompt": spec.generation_prompt,
            "exact": spec.exact,
            "logits": spec.logits,
            "logit_top_k": spec.logit_top_k,
        },
    }


def _write_manifest(draft: Path, about: Mapping[str, Any]) -> None:
    files = {file.name: {"bytes": file.stat().st_size, "sha256": _sha256(file)} for file in sorted(draft.iterdir())}
    manifest = draft / MANIFEST
    manifest.write_text(json.dumps({**about, "files": files}, indent=1) + "\n", encoding="utf-8")
    for file in draft.iterdir():
        # safetensors writes through a temporary file, which only its owner may read.
        file.chmod(manifest.stat().st_mode)


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _exported(target: Path) -> set[str]:
    """Names of the files that an export in ``target`` says are its own."""
    manifest = target / MANIFEST
    try:
        listed = json.loads(manifest.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return set()
    is_ours = isinstance(listed, dict) and listed.get("format") == FORMAT
    return {MANIFEST, *listed["files"]} if is_ours else set()


def _put_in_place(draft: Path, target: Path) -> None:
    if not target.exists() or not any(target.iterdir()):
        draft.replace(target)
        return
    old = draft.with_suffix(".old")
    target.rename(old)
    try:
        draft.rename(target)
    except OSError:
        old.rename(target)
        raise
    shutil.rmtree(old)
