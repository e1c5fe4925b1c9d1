"""A model's tokenizer without transformers in this process, for with torch installed that loads torch too.

A process of its own opens the tokenizer once, as transformers does, and keeps what it is made of in the cache:
``python -m streamtap.engines.api_tokenizer SOURCE REVISION TARGET``.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from streamtap.engines.references import ModelReference, has_tokenizer, tokenizer_fingerprint
from streamtap.errors import InvalidInput, MissingExtra
from streamtap.fingerprint import fingerprint
from streamtap.settings import Settings

_RULES, _ABOUT = "tokenizer.json", "about.json"
_INSTALL = "reading a tokenizer needs transformers and tokenizers: pip install 'streamtap[local]'."


class KeptTokenizer:
    """As much of a fast tokenizer of transformers as engines ask for; a chat's template alone needs transformers.

    Args:
        rules: What ``tokenizers`` reads.
        about: The ids of its special tokens, and its chat template.
        reference: The model that it is of.
    """

    is_fast = True

    def __init__(self, rules: Any, about: Mapping[str, Any], reference: ModelReference) -> None:
        self.backend_tokenizer = rules
        self.all_special_ids: list[int] = list(about["special_ids"])
        self.bos_token_id: int | None = about["bos_token_id"]
        self.chat_template: Any = about["chat_template"]
        self._reference = reference
        self._whole: Any = None

    def __call__(self, texts: str | Sequence[str], *, add_special_tokens: bool = True, **_: Any) -> dict[str, Any]:
        """Ids and where each token stands in the text; lists of them for a list of texts."""
        listed = [texts] if isinstance(texts, str) else list(texts)
        found = self.backend_tokenizer.encode_batch(listed, add_special_tokens=add_special_tokens)
        every = {"input_ids": [each.ids for each in found], "offset_mapping": [each.offsets for each in found]}
        return {name: values[0] for name, values in every.items()} if isinstance(texts, str) else every

    def __len__(self) -> int:
        """Tokens, the added ones among them."""
        return int(self.backend_tokenizer.get_vocab_size())

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]:
        """The added tokens by id."""
        found: Mapping[int, Any] = self.backend_tokenizer.get_added_tokens_decoder()
        return found

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False, **_: Any) -> str:
        """The text of ids, verbatim."""
        return str(self.backend_tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def convert_ids_to_tokens(self, token_id: int) -> str | None:
        """What the vocabulary calls an id, None where it has none."""
        name: str | None = self.backend_tokenizer.id_to_token(token_id)
        return name

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]], **options: Any) -> Any:
        """A chat as the template writes it; transformers is loaded for it."""
        if self._whole is None:
            self._whole = import_module("streamtap.engines.tokenizer_files").load_tokenizer(self._reference)
        return self._whole.apply_chat_template(messages, **options)


def kept_tokenizer(reference: ModelReference, settings: Settings) -> Any:
    """The tokenizer of a model whose small files are here, made at the first call (some seconds); None if it has none.

    One that ``tokenizers`` cannot read is opened by transformers here.

    Raises:
        InvalidInput: its files cannot be read.
        MissingExtra: what reads them is not installed.
    """
    if not has_tokenizer(reference):
        return None
    try:
        from tokenizers import Tokenizer

        version = importlib.metadata.version("transformers")
    except (ImportError, importlib.metadata.PackageNotFoundError) as error:
        raise MissingExtra(_INSTALL) from error
    files = reference.commit if reference.is_hub else tokenizer_fingerprint(reference)
    name = fingerprint({"name": reference.name if reference.is_hub else "", "files": files, "transformers": version})
    folder = settings.cache_dir / "tokenizers" / name
    if not folder.is_dir():
        _make(reference, folder)
    about = json.loads((folder / _ABOUT).read_text(encoding="utf-8"))
    if not (folder / _RULES).is_file():
        return import_module("streamtap.engines.tokenizer_files").load_tokenizer(reference)
    rules = Tokenizer.from_str((folder / _RULES).read_text(encoding="utf-8"))
    # What is written there is for batches; a prompt is neither cut nor padded.
    rules.no_truncation()
    rules.no_padding()
    return KeptTokenizer(rules, about, reference)


def _make(reference: ModelReference, folder: Path) -> None:
    source, revision = (reference.name, reference.commit or "") if reference.is_hub else (str(reference.folder), "")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        made = Path(scratch) / folder.name
        command = [sys.executable, "-m", "streamtap.engines.api_tokenizer", source, revision, str(made)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
        if done.returncode or not (made / _ABOUT).is_file():
            last = (done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"])[-1]
            raise InvalidInput(f"the tokenizer of {reference.name!r} could not be read: {last}")
        try:
            made.rename(folder)
        except OSError:
            # Another process was quicker; what it made is the same.
            if not (folder / _ABOUT).is_file():
                raise


def _main(source: str, revision: str, target: str) -> None:
    from transformers import AutoTokenizer

    where = {"revision": revision} if revision else {}
    tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False, **where)
    folder = Path(target)
    folder.mkdir()
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        backend.save(str(folder / _RULES))
    template = getattr(tokenizer, "chat_template", None)
    about = {
        "special_ids": [int(token) for token in tokenizer.all_special_ids],
        "bos_token_id": tokenizer.bos_token_id,
        "chat_template": template if isinstance(template, str) else bool(template),
    }
    (folder / _ABOUT).write_text(json.dumps(about), encoding="utf-8")


if __name__ == "__main__":
    _main(*sys.argv[1:])
