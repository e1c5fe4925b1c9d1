"""How prompts become tokens for a model that a service runs: its tokenizer is read here, from its small files."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamtap.engines.api_tokenizer import kept_tokenizer
from streamtap.engines.api_told import Told
from streamtap.engines.config_file import number_in, text_config
from streamtap.engines.demo_model import DEMO
from streamtap.engines.references import ModelReference, find_model, tokenizer_fingerprint
from streamtap.engines.small_files import fetch_small_files
from streamtap.engines.tokenizing import PromptTokenizer
from streamtap.engines.unpacking import unpack_demo
from streamtap.errors import InvalidInput, InvalidPrompt, MissingExtra
from streamtap.fingerprint import fingerprint
from streamtap.settings import Settings

_LOG = logging.getLogger(__name__)
#: A tokenizer that there is not.
_NONE = "none"
_SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class Known:
    """What is known here of a model that runs elsewhere; ``fingerprint`` is its tokenizer's."""

    tokenizer: PromptTokenizer
    fingerprint: str
    n_layers: int | None = None
    hidden: int | None = None


class AbsentTokenizer(PromptTokenizer):
    """Takes token ids alone, and says why."""

    def __init__(self, name: str, why: str, context_length: int | None) -> None:
        super().__init__(None, context_length=context_length)
        self._name, self._why = name, why

    def _need_tokenizer(self, kind: str, index: int) -> None:
        raise InvalidPrompt(
            f"prompt {index} is {kind}, and the tokenizer of {self._name} cannot be read here ({self._why}); send "
            "token ids, or pass tokenizer= with a folder or Hub id that has it.",
            index=index,
        )


def known_model(told: Told, tokenizer: Any, revision: str | None) -> Known:
    """Tokenizer and shape of a service's model; no weights are read or fetched, and torch is not loaded.

    ``tokenizer`` None is the checkpoint's own, as its files on this machine or on the Hub say. Where these cannot be
    had, prompts can only be token ids.

    Raises:
        InvalidInput: ``tokenizer`` names what cannot be read, or the checkpoint here is another model.
        MissingExtra: what reads the tokenizer that was named is not installed.
    """
    if isinstance(tokenizer, PromptTokenizer):
        return Known(tokenizer, in_memory_fingerprint(tokenizer.tokenizer))
    if tokenizer is not None and not isinstance(tokenizer, str | Path):
        made = PromptTokenizer(tokenizer, context_length=told.longest_prompt, vocabulary=_vocabulary(tokenizer))
        return Known(made, in_memory_fingerprint(tokenizer))
    if tokenizer is not None:
        return _known(str(tokenizer), None, told)
    try:
        known = _known(told.checkpoint, revision or told.revision, told)
    except (InvalidInput, MissingExtra) as error:
        _LOG.info("prompts for %s can only be token ids here: %s", told.checkpoint, error)
        why = "what reads it is not installed" if isinstance(error, MissingExtra) else "its files are not to be had"
        return Known(AbsentTokenizer(told.checkpoint, why, told.longest_prompt), _NONE)
    return _checked(known, told)


def _known(name: str, revision: str | None, told: Told) -> Known:
    """What the small files of ``name`` say."""
    settings = Settings.from_environment()
    found = _found(name, revision, settings)
    if found.folder is None or found.gguf is not None:
        raise InvalidInput(f"{name!r} has no config.json; expected the folder or Hub id of a transformers model.")
    config = text_config(found.folder)
    made = PromptTokenizer(
        kept_tokenizer(found, settings),
        context_length=told.longest_prompt or number_in(config, "max_model_len"),
        vocabulary=number_in(config, "vocabulary"),
        special_ids=_special_ids(config),
    )
    shape = (number_in(config, "n_layers"), number_in(config, "hidden_size"))
    return Known(made, tokenizer_fingerprint(found) or _NONE, *shape)


def _checked(known: Known, told: Told) -> Known:
    """The checkpoint here, if it can be the one there."""
    for what, here, there in (("layers", known.n_layers, told.n_layers), ("width", known.hidden, told.hidden)):
        if there is not None and here != there:
            raise InvalidInput(
                f"{told.checkpoint} is another model here than on the service ({what} {here} and {there}); pass "
                "tokenizer= with the folder or Hub id of the service's."
            )
    return known


def _found(name: str, revision: str | None, settings: Settings) -> ModelReference:
    """The model of that name, with its small files on this machine."""
    if name == DEMO:
        unpack_demo(settings)
    # The hash of local weights, which is all that they would be read for, is of no use here.
    found = find_model(name, revision, settings=settings, recall=_unread)
    if found.folder is not None:
        return found
    fetch_small_files(name, revision, settings)
    return find_model(name, revision, settings=settings, recall=_unread)


def _unread(_key: str) -> Mapping[str, Any]:
    return {"commit": "sha256:"}


def _special_ids(config: Mapping[str, Any]) -> list[int]:
    told = [config.get(name) for name in _SPECIAL]
    flat = [each for value in told for each in (value if isinstance(value, list) else [value])]
    return [each for each in flat if isinstance(each, int)]


def _vocabulary(tokenizer: Any) -> int | None:
    return len(tokenizer) if hasattr(tokenizer, "__len__") else None


def in_memory_fingerprint(tokenizer: Any) -> str:
    """The hash of a tokenizer's rules and template."""
    if tokenizer is None:
        return _NONE
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        rules = backend.to_str()
    elif hasattr(tokenizer, "get_vocab"):
        rules = repr(sorted(tokenizer.get_vocab().items()))
    else:
        rules = type(tokenizer).__qualname__
    template = str(getattr(tokenizer, "chat_template", None))
    return "sha256:" + fingerprint({"rules": rules, "template": template})
