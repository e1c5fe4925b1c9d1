"""From the name of a model to its files and their identity, without torch or a network.

``"demo"`` is the embedded model, a path is a local folder or GGUF file, anything else is a
Hub id, whose commit is read from the local Hub cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamtap.engines.demo_model import DEMO, demo_folder
from streamtap.errors import InvalidInput
from streamtap.fingerprint import content_hash, fingerprint
from streamtap.settings import Settings

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "chat_template.jinja",
    "chat_template.json",
)
_WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt", ".pth")

#: Keeps what was worked out about files, by a key that changes when they do.
Recall = Callable[[str], Mapping[str, Any] | None]
Remember = Callable[[str, Mapping[str, Any]], None]


@dataclass(frozen=True)
class ModelReference:
    """A model that was named.

    ``folder`` holds its files, if they are on this machine; ``gguf`` is the one GGUF file in it
    that is meant. ``commit`` is the Hub commit, ``"sha256:…"`` for local files, or None for a
    Hub id that is not here yet.
    """

    name: str
    folder: Path | None
    gguf: str | None = None
    commit: str | None = None
    revision: str | None = None

    @property
    def is_hub(self) -> bool:
        """Whether the name is a Hub id."""
        return self.commit is None or not self.commit.startswith("sha256:")


def find_model(
    name: str,
    revision: str | None = None,
    *,
    settings: Settings,
    recall: Recall = lambda _key: None,
    remember: Remember = lambda _key, _value: None,
) -> ModelReference:
    """Find what ``name`` means on this machine.

    ``recall`` and ``remember`` keep the hash of local weights, so that they are read once.

    Raises:
        InvalidInput: a path without a model, or a revision of something that has none.
    """
    if name == DEMO:
        _no_revision(name, revision)
        folder = demo_folder(settings)
        return ModelReference(name, folder, None, _local_commit(folder, None, recall, remember))
    path = Path(name).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        _no_revision(name, revision)
        return ModelReference(name, path.parent, path.name, _local_commit(path.parent, path.name, recall, remember))
    if name.strip() and path.is_dir():
        _no_revision(name, revision)
        if not (path / "config.json").is_file():
            raise InvalidInput(f"the folder {name} has no config.json; expected a transformers model folder.")
        return ModelReference(name, path, None, _local_commit(path, None, recall, remember))
    if name.startswith(("/", ".", "~")) or name.count("/") > 1 or not name.strip() or path.suffix == ".gguf":
        raise InvalidInput(
            f"model {name!r} is neither a folder, a GGUF file nor a Hub id such as 'org/model'; "
            "check the path, or write 'demo' for the embedded model."
        )
    return _hub_reference(name, revision, settings)


def has_tokenizer(reference: ModelReference) -> bool:
    """Whether there are files of a tokenizer beside the model's."""
    folder = reference.folder
    return folder is not None and (reference.gguf is not None or bool(_tokenizer_files(folder)))


def _tokenizer_files(folder: Path) -> list[Path]:
    return [folder / file for file in _TOKENIZER_FILES if (folder / file).is_file()]


def tokenizer_fingerprint(reference: ModelReference) -> str:
    """Hash of the files that decide how text becomes tokens, chat template included."""
    folder = reference.folder
    if folder is None:
        return ""
    if reference.gguf is not None:
        return f"gguf:{reference.commit}"
    return content_hash(_tokenizer_files(folder))


def _hub_reference(name: str, revision: str | None, settings: Settings) -> ModelReference:
    repo = settings.hub_cache_dir / ("models--" + name.replace("/", "--"))
    asked = revision or "main"
    ref = repo / "refs" / asked
    commit = ref.read_text().strip() if ref.is_file() else asked
    folder = repo / "snapshots" / commit
    if not (folder / "config.json").exists():
        return ModelReference(name, None, None, None, revision)
    return ModelReference(name, folder, None, commit, revision)


def _local_commit(folder: Path, gguf: str | None, recall: Recall, remember: Remember) -> str:
    files = [folder / gguf] if gguf else sorted(file for file in folder.iterdir() if _shapes_values(file))
    stats = {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in files}
    key = "content:" + fingerprint({"folder": str(folder.resolve()), "files": stats})
    known = recall(key)
    if known is not None:
        return str(known["commit"])
    commit = content_hash(files)
    remember(key, {"commit": commit})
    return commit


def _shapes_values(file: Path) -> bool:
    # The tokenizer has a fingerprint of its own; readmes and the like change nothing.
    return file.is_file() and (file.name.endswith(_WEIGHTS) or file.name in ("config.json", "adapter_config.json"))


def _no_revision(name: str, revision: str | None) -> None:
    if revision is not None:
        raise InvalidInput(f"revision={revision!r} means nothing for {name!r}: only Hub ids have revisions.")
