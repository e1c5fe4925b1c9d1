"""The float32 reference of a self-check: one prompt through the plain model on a CPU, made once and kept.

It is a small safetensors file in the cache, under a fingerprint of all that it depends on, so that a second check loads
no model. What makes it is a process of its own, started as ``python -m streamtap.engines.self_check_reference MODEL
FILE``: the caller's never loads torch. A failure is one sentence on standard error.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import streamtap
from streamtap.engines.config_file import number_in, text_config
from streamtap.engines.demo_model import DEMO
from streamtap.engines.references import ModelReference, find_model, tokenizer_fingerprint
from streamtap.engines.small_files import fetch_small_files
from streamtap.engines.tokenizing import PromptTokenizer
from streamtap.engines.unpacking import unpack_demo
from streamtap.errors import EngineFailed, InvalidInput, StreamtapError
from streamtap.fingerprint import fingerprint
from streamtap.settings import Settings, child_environment
from streamtap.spec import CaptureSpec, Prompt
from streamtap.tensor_file import read_tensors, tensor_bytes

#: Raised when what a reference holds changes; kept ones are then made anew.
_LAYOUT = 1
_LIBRARIES = ("torch", "transformers")
_FOLDER = "self-check"
#: Plain words: over digits and signs, half precision may decide otherwise whether a row becomes a very long one.
_TEXT = (
    "The harbour was quiet when the three boats came home, and nobody on the pier could say where the fourth had gone."
)
#: As many tokens of the text, or as many ids where there is no tokenizer: enough for attention to matter.
_TOKENS = 24
#: Steps through a vocabulary, a prime so that ids do not come round.
_STRIDE = 7919

Say = Callable[[str], None]


@dataclass(frozen=True, eq=False)
class Reference:
    """What the plain model gives: ``rows`` float32 [layers, tokens, hidden] of ``token_ids`` int32 [tokens].

    ``model`` is the name that was asked for, ``commit`` its identity, ``made_by`` the versions that ran it.
    """

    rows: NDArray[np.float32]
    token_ids: NDArray[np.int32]
    model: str
    commit: str
    made_by: str

    @property
    def shape(self) -> tuple[int, int]:
        """Number of layers, and width of a row."""
        return self.rows.shape[0], self.rows.shape[2]


def reference_for(
    model: str, revision: str | None = None, *, settings: Settings, say: Say = lambda _message: None
) -> Reference:
    """The reference of ``model``, made in a process of its own unless it was kept; ``say`` is told before that.

    Raises:
        InvalidInput: no such model.
        EngineFailed: it could not be made; the message says why.
    """
    found = _found(model, revision, settings)
    if found.folder is not None and (kept := _kept(reference_file(found, settings))) is not None:
        return kept
    say(f"running {model} in float32 on the CPU once, for the reference")
    scratch = settings.cache_dir / _FOLDER / f".made-{os.getpid()}.safetensors"
    scratch.parent.mkdir(parents=True, exist_ok=True)
    try:
        _make_elsewhere(model, revision, scratch, settings)
        made = read_reference(scratch)
        # A model of the Hub may be here only now, fetched by that process.
        scratch.replace(reference_file(_found(model, revision, settings), settings))
    finally:
        scratch.unlink(missing_ok=True)
    return made


def keep_reference(reference: Reference, model: str, revision: str | None = None, *, settings: Settings) -> Path:
    """Keep one that was made elsewhere as that of ``model`` here, and so for this machine's versions; where it lies.

    Raises:
        InvalidInput: no such model, or the reference is another's.
    """
    file = reference_file(check_reference(reference, model, revision, settings=settings), settings)
    write_reference(reference, file)
    return file


def check_reference(
    reference: Reference, model: str, revision: str | None = None, *, settings: Settings
) -> ModelReference:
    """Hold one that was made elsewhere against ``model``, and give what that name means here.

    Raises:
        InvalidInput: no such model, or the reference is another's: of another commit, depth or width.
    """
    found = _found(model, revision, settings)
    told: dict[str, tuple[object, object]] = {"commit": (reference.commit, found.commit)}
    if found.folder is not None and found.gguf is None:
        config, (n_layers, hidden) = text_config(found.folder), reference.shape
        told["depth"] = (n_layers, number_in(config, "n_layers"))
        told["width"] = (hidden, number_in(config, "hidden_size"))
    for what, (its, models) in told.items():
        if models is not None and its != models:
            raise InvalidInput(
                f"the reference, made of {reference.model}, is not of {model}: its {what} is {its}, the model's is "
                f"{models}; make one of this model with streamtap doctor --write-reference."
            )
    return found


def make_reference(model: str, revision: str | None = None, *, settings: Settings) -> Reference:
    """Run ``model`` in this process, with torch.

    Raises:
        InvalidInput: no such model.
        MissingExtra: torch and transformers are not installed.
        StreamtapError: it cannot be loaded or run.
    """
    from streamtap.engines.transformers import TransformersEngine

    found = _found(model, revision, settings)
    engine = TransformersEngine.load(model, revision=revision, dtype="float32", device="cpu", reference=found)
    try:
        ids = reference_ids(engine.tokenizer)
        (part,) = engine.capture([Prompt(token_ids=ids)], CaptureSpec(layers="all", exact=True))
        rows = np.stack([part.acts[layer] for layer in part.layers])
        return Reference(rows, ids, model, engine.provenance.commit, _versions())
    finally:
        engine.close()


def reference_ids(tokenizer: PromptTokenizer) -> NDArray[np.int32]:
    """The prompt of every self-check, int32 [at most 24]: a fixed text, or fixed ids where there is no tokenizer."""
    most = min(_TOKENS, tokenizer.context_length or _TOKENS)
    if tokenizer.tokenizer is None:
        vocabulary = tokenizer.vocabulary or _TOKENS
        return np.array([_STRIDE * (i + 1) % vocabulary for i in range(most)], np.int32)
    return tokenizer.read(_TEXT, 0)[:most]


def reference_file(found: ModelReference, settings: Settings) -> Path:
    """Where the reference of a model is kept: the name stands for the model, the prompt and what runs it."""
    depends_on = {
        "layout": _LAYOUT,
        "commit": found.commit,
        # With the text these make the token ids, which need not be worked out to find the file.
        "tokenizer": tokenizer_fingerprint(found),
        "text": _TEXT,
        "tokens": _TOKENS,
        "made by": _versions(),
    }
    return settings.cache_dir / _FOLDER / f"{fingerprint(depends_on)[:32]}.safetensors"


def write_reference(reference: Reference, file: Path) -> None:
    """Write ``file`` in whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    about = {"model": reference.model, "commit": reference.commit, "made_by": reference.made_by}
    tensors = {"rows": reference.rows, "token_ids": reference.token_ids}
    _put(file, tensor_bytes(tensors, about | {"layout": str(_LAYOUT)}))


def read_reference(file: Path) -> Reference:
    """What ``write_reference`` wrote.

    Raises:
        InvalidInput: it is not there, or is no such file.
    """
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise InvalidInput(f"the reference {file} cannot be read ({error.strerror}).") from error
    tensors, about = read_tensors(raw, file.name)
    rows, ids = tensors.get("rows"), tensors.get("token_ids")
    if rows is None or ids is None or about.get("layout") != str(_LAYOUT) or not _fits(rows, ids):
        raise InvalidInput(f"{file.name} holds no reference; write one with streamtap doctor --write-reference.")
    return Reference(rows, ids, about.get("model", ""), about.get("commit", ""), about.get("made_by", ""))


def _fits(rows: NDArray[Any], ids: NDArray[Any]) -> bool:
    if rows.ndim != 3 or ids.ndim != 1 or rows.dtype != np.float32 or ids.dtype != np.int32:
        return False
    return 0 < rows.shape[1] == len(ids) and 0 not in rows.shape and bool(np.isfinite(rows).all())


def _kept(file: Path) -> Reference | None:
    """The reference that was kept, or None; what is damaged is made again."""
    if not file.is_file():
        return None
    try:
        return read_reference(file)
    except InvalidInput:
        return None


def _make_elsewhere(model: str, revision: str | None, file: Path, settings: Settings) -> None:
    command = [sys.executable, "-m", "streamtap.engines.self_check_reference", model, str(file)]
    command += [] if revision is None else ["--revision", revision]
    same = {"STREAMTAP_CACHE_DIR": str(settings.cache_dir), "HF_HUB_CACHE": str(settings.hub_cache_dir)}
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        env=child_environment({}, **same),
    )
    if done.returncode == 0:
        return
    if done.returncode < 0:
        why = f"it was ended by signal {-done.returncode}, as where memory runs out"
    else:
        why = (done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"])[-1].rstrip(".")
    raise EngineFailed(
        f"the float32 reference of {model!r} could not be made: {why}. It can be made on another machine, with "
        "streamtap doctor --write-reference, and given with --reference."
    )


def _found(model: str, revision: str | None, settings: Settings) -> ModelReference:
    """The model's files; of one on the Hub that is not here, config and tokenizer are fetched."""
    if model == DEMO:
        unpack_demo(settings)
    memory = _Memory(settings.cache_dir / _FOLDER)
    found = find_model(model, revision, settings=settings, recall=memory.recall, remember=memory.remember)
    if found.folder is None:
        fetch_small_files(model, revision, settings)
        found = find_model(model, revision, settings=settings)
    return found


class _Memory:
    """Hashes of local weights, a file each, so that a start of an engine does not read the weights for them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def recall(self, key: str) -> Mapping[str, Any] | None:
        try:
            found = json.loads(self._file(key).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) and isinstance(found.get("commit"), str) else None

    def remember(self, key: str, value: Mapping[str, Any]) -> None:
        _put(self._file(key), json.dumps(dict(value)).encode())

    def _file(self, key: str) -> Path:
        return self._folder / f"{fingerprint({'of': key})[:32]}.json"


def _put(file: Path, raw: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        draft.write_bytes(raw)
        draft.replace(file)
    finally:
        draft.unlink(missing_ok=True)


def _versions() -> str:
    named = [f"{name} {_version(name)}" for name in _LIBRARIES]
    return ", ".join([f"streamtap {streamtap.__version__}", *named])


def _version(library: str) -> str:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def main(arguments: list[str] | None = None) -> None:
    """Make a reference in this process and write it to a file."""
    parser = argparse.ArgumentParser(prog="python -m streamtap.engines.self_check_reference", description=__doc__)
    parser.add_argument("model")
    parser.add_argument("file", type=Path)
    parser.add_argument("--revision")
    given = parser.parse_args(arguments)
    try:
        made = make_reference(given.model, given.revision, settings=Settings.from_environment())
        write_reference(made, given.file)
    except StreamtapError as error:
        sys.exit(" ".join(str(error).split()))


if __name__ == "__main__":
    main()
