"""A model without its weights: tokenizer, depth, width, context, as its small files tell. For engines elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from streamtap.engines.config_file import dtype_in, number_in, text_config
from streamtap.engines.demo_model import DEMO
from streamtap.engines.references import ModelReference, find_model, tokenizer_fingerprint
from streamtap.engines.small_files import fetch_small_files
from streamtap.engines.tokenizing import PromptTokenizer
from streamtap.engines.unpacking import unpack_demo
from streamtap.errors import InvalidInput
from streamtap.settings import Settings

_SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class DescribedModel:
    """What is known of a model that runs elsewhere; ``dtype`` is the checkpoint's, None where its config says none."""

    reference: ModelReference
    tokenizer: PromptTokenizer
    n_layers: int
    hidden: int
    dtype: str | None

    @property
    def tokenizer_print(self) -> str:
        """The fingerprint of the tokenizer's files."""
        return tokenizer_fingerprint(self.reference)


def described_model(
    model: str, revision: str | None = None, *, reference: ModelReference | None = None
) -> DescribedModel:
    """Read config and tokenizer of ``model``, fetched from the Hub if need be; no weights are loaded or fetched.

    ``reference`` is what ``model`` means, where it was found already. Else it is found here, and the weights of a local
    folder are hashed, for their hash is the model's identity.

    Raises:
        InvalidInput: no such model, no access to it, or a config that tells no depth.
        MissingExtra: transformers, which reads the tokenizer, or the Hub's client is not installed.
    """
    found = _found(model, revision, reference, Settings.from_environment())
    if found.gguf is not None:
        raise InvalidInput(f"{model!r} is a GGUF file, which only backend='local' reads; name a folder or a Hub id.")
    if found.folder is None:
        raise InvalidInput(f"{model!r} has no config.json on the Hub; expected a transformers model.")
    config = text_config(found.folder)
    n_layers, hidden = number_in(config, "n_layers"), number_in(config, "hidden_size")
    if n_layers is None or hidden is None:
        raise InvalidInput(f"the config of {model!r} tells no depth and width; is it a language model?")
    tokenizer = PromptTokenizer(
        import_module("streamtap.engines.tokenizer_files").load_tokenizer(found),
        context_length=number_in(config, "max_model_len"),
        vocabulary=number_in(config, "vocabulary"),
        special_ids=_special_ids(config),
    )
    return DescribedModel(found, tokenizer, n_layers, hidden, dtype_in(config))


def _found(model: str, revision: str | None, reference: ModelReference | None, settings: Settings) -> ModelReference:
    """What ``model`` means, with its small files on this machine."""
    if reference is None:
        if model == DEMO and revision is None:
            unpack_demo(settings)
        reference = find_model(model, revision, settings=settings)
    if reference.folder is not None:
        return reference
    fetch_small_files(reference.name, reference.revision, settings)
    return find_model(reference.name, reference.revision, settings=settings)


def _special_ids(config: Mapping[str, Any]) -> list[int]:
    told = [config.get(name) for name in _SPECIAL]
    flat = [each for value in told for each in (value if isinstance(value, list) else [value])]
    return [each for each in flat if isinstance(each, int)]
