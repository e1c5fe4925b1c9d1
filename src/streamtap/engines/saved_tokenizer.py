"""The tokenizer that an engine really uses, as one tokenizer.json.

Some tokenizer classes of transformers build their rules anew instead of reading those of tokenizer.json, and some
models come without that file. What such a class makes is saved once to the cache, by a process of its own so that the
caller's loads neither transformers nor torch: ``python -m streamtap.engines.saved_tokenizer FOLDER GGUF TARGET``.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from streamtap.engines.references import ModelReference, tokenizer_fingerprint
from streamtap.errors import InvalidInput
from streamtap.fingerprint import fingerprint
from streamtap.settings import Settings

#: Classes that take tokenizer.json as it is; so does a config that names none.
_AS_IT_IS = (None, "PreTrainedTokenizerFast", "TokenizersBackend")


def is_as_it_is(folder: Path) -> bool:
    """Whether the tokenizer.json in ``folder`` is what transformers uses."""
    if not (folder / "tokenizer.json").is_file():
        return False
    config = folder / "tokenizer_config.json"
    try:
        told = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
    except ValueError as error:
        raise InvalidInput(f"{config} cannot be read as JSON; is the checkpoint whole?") from error
    return isinstance(told, dict) and told.get("tokenizer_class") in _AS_IT_IS


def saved_tokenizer(reference: ModelReference, settings: Settings) -> Path | None:
    """The file in the cache, made at the first call (some seconds); None where transformers is not installed.

    Raises:
        InvalidInput: the model's tokenizer cannot be loaded, or is none that a tokenizer.json can describe.
    """
    if reference.folder is None:
        return None
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        return None
    name = fingerprint({"files": tokenizer_fingerprint(reference), "transformers": version})
    target = settings.cache_dir / "tokenizers" / f"{name}.json"
    if not target.is_file():
        _make(reference, target)
    return target


def _make(reference: ModelReference, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / target.name
        where = [str(reference.folder), reference.gguf or "", str(made)]
        command = [sys.executable, "-m", "streamtap.engines.saved_tokenizer", *where]
        done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
        if done.returncode or not made.is_file():
            last = (done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"])[-1]
            raise InvalidInput(f"the tokenizer of {reference.name!r} could not be read: {last}")
        made.replace(target)


def _main(folder: str, gguf: str, target: str) -> None:
    from transformers import AutoTokenizer

    options = {"gguf_file": gguf} if gguf else {}
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True, **options)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        sys.exit(f"{type(tokenizer).__name__} is not one that a tokenizer.json can describe.")
    backend.save(target)


if __name__ == "__main__":
    _main(*sys.argv[1:])
