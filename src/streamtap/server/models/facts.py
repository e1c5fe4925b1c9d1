"""What the gateway knows of a model: read from its files, without loading it and without torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamtap.engines.config_file import NAMES, dtype_in, number_in, text_config
from streamtap.engines.demo_model import DEMO, is_unpacked
from streamtap.engines.references import ModelReference, find_model, has_tokenizer
from streamtap.engines.saved_tokenizer import is_as_it_is, saved_tokenizer
from streamtap.engines.small_files import fetch_small_files
from streamtap.engines.unpacking import unpack_demo
from streamtap.errors import InvalidInput, SettingsError
from streamtap.server.config import ModelConfig
from streamtap.settings import Settings

Say = Callable[[str], None]


@dataclass(frozen=True)
class ModelFacts:
    """Numbers that requests are checked against.

    ``checkpoint`` is what answers call the model; ``vocabulary`` the rows of its embedding; ``dtype`` None where the
    engine decides. Without ``tokenizer_file`` prompts can only be token ids.
    """

    n_layers: int
    hidden: int
    max_model_len: int
    vocabulary: int
    dtype: str | None
    checkpoint: str
    tokenizer_file: Path | None = None


def waits_for(model: ModelConfig, settings: Settings) -> str | None:
    """What ``facts_of`` would have to do first, in words; None where it only reads."""
    if model.checkpoint == DEMO and not is_unpacked(settings):
        return "the demo model is unpacked at the first start, which takes about half a minute"
    told = all(getattr(model, name) is not None for name in NAMES)
    try:
        if told or model.engine == "url" or _found(model, settings).folder is not None:
            return None
    except InvalidInput:  # which facts_of says, with the model's id
        return None
    return "config and tokenizer are fetched from the Hub at the first start"


def facts_of(
    model: ModelConfig, settings: Settings, say: Say = lambda _message: None, *, exact: bool = True
) -> ModelFacts:
    """Read what there is to know of ``model``; what its table says wins over its files.

    A demo model that is not unpacked yet is unpacked, config and tokenizer of a Hub model are fetched, and a tokenizer
    that transformers makes in its own way is saved to the cache unless ``exact`` is False; ``say`` is told before each.

    Raises:
        InvalidInput: no such checkpoint, or a fact that neither files nor the configuration tell.
    """
    told = {name: getattr(model, name) for name in NAMES}
    reference = None
    if None in told.values() or model.tokenizer is None:
        reference = _reference(model, settings, say, optional=None not in told.values())
    config = _text_config(reference)
    facts = {name: told[name] or number_in(config, name) for name in NAMES}
    if missing := [name for name, value in facts.items() if value is None]:
        raise SettingsError(_asks_for(model, reference, missing))
    return ModelFacts(
        n_layers=int(facts["n_layers"] or 0),
        hidden=int(facts["hidden_size"] or 0),
        max_model_len=int(facts["max_model_len"] or 0),
        vocabulary=int(facts["vocabulary"] or 0),
        dtype=_dtype(model, config),
        checkpoint=model.served_name,
        tokenizer_file=_tokenizer_file(model, reference, settings, say if exact else None),
    )


def _reference(model: ModelConfig, settings: Settings, say: Say, *, optional: bool) -> ModelReference | None:
    """Where the files are; None where the configuration tells enough without them."""
    if model.checkpoint == DEMO and not is_unpacked(settings):
        say("unpacking the demo model; this happens once and takes about half a minute")
        unpack_demo(settings)
    try:
        found = _found(model, settings)
        if found.folder is None and not optional and model.engine != "url":
            say(f"fetching config and tokenizer of {model.checkpoint} from the Hub")
            fetch_small_files(model.checkpoint, model.revision, settings)
            found = _found(model, settings)
    except InvalidInput as error:
        if optional or model.engine == "url":
            return None
        raise InvalidInput(f"model {model.id!r}: {error}") from error
    return found


def _found(model: ModelConfig, settings: Settings) -> ModelReference:
    # The hash of the weights is of no use here, and reading them takes long.
    return find_model(model.checkpoint, model.revision, settings=settings, recall=lambda _key: {"commit": "sha256:"})


def _text_config(reference: ModelReference | None) -> Mapping[str, Any]:
    """The model's config.json, or the part of it that is about text; empty where there is none to read."""
    if reference is None or reference.folder is None or reference.gguf is not None:
        return {}
    return text_config(reference.folder)


def _dtype(model: ModelConfig, config: Mapping[str, Any]) -> str | None:
    return model.dtype if model.dtype != "auto" else dtype_in(config)


def _tokenizer_file(
    model: ModelConfig, reference: ModelReference | None, settings: Settings, say: Say | None
) -> Path | None:
    """The tokenizer.json to count with; one is only made where ``say`` is there to be told."""
    if model.tokenizer is not None:
        return model.tokenizer / "tokenizer.json" if model.tokenizer.is_dir() else model.tokenizer
    if reference is None or reference.folder is None or not has_tokenizer(reference):
        return None
    file = reference.folder / "tokenizer.json"
    if reference.gguf is None and is_as_it_is(reference.folder):
        return file
    made = None
    if say is not None:
        say(f"reading the tokenizer of {model.checkpoint}")
        made = saved_tokenizer(reference, settings)
        if made is None and not file.is_file():
            raise SettingsError(
                f"model {model.id!r}: there is no tokenizer.json beside {model.checkpoint}; set tokenizer to a folder "
                "that has one, such as transformers' AutoTokenizer writes with save_pretrained."
            )
    return made or (file if file.is_file() and reference.gguf is None else None)


def _asks_for(model: ModelConfig, reference: ModelReference | None, missing: list[str]) -> str:
    if reference is not None and reference.gguf is not None:
        where = "a GGUF file, which is not read here, so they have to be told"
    elif reference is None or reference.folder is None:
        where = "not on this machine, so they have to be told"
    else:
        where = "a checkpoint whose config.json lacks them"
    return f"model {model.id!r}: set {', '.join(missing)} in its table; {model.checkpoint} is {where}."
