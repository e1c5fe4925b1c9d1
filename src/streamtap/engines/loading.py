"""Load a ``transformers`` model and its tokenizer: Hub ids, folders, GGUF files."""

from __future__ import annotations

import importlib.util
import json
import struct
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamtap.activations import Provenance
from streamtap.engines.base import IN_MEMORY
from streamtap.engines.gguf_reading import parsed_once
from streamtap.engines.references import ModelReference, find_model, tokenizer_fingerprint
from streamtap.errors import InvalidInput, MissingExtra, UnsupportedModel
from streamtap.fingerprint import fingerprint
from streamtap.settings import Settings

try:
    import torch
    import transformers
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer
except ImportError as _error:
    raise MissingExtra("running a model here needs torch and transformers: pip install 'streamtap[local]'.") from _error

from streamtap.capture.arrays import dtype_name
from streamtap.engines.tokenizer_files import first_line, load_tokenizer, quiet_transformers, source_of

_DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
_NOT_THIS_CLASS = "Unrecognized configuration class"
# What files that are damaged, or options that fit no device, raise deep inside the libraries.
_LOADING_ERRORS = (OSError, ValueError, RuntimeError, AssertionError, SafetensorError, struct.error)


@dataclass(frozen=True)
class Loaded:
    """A model, its tokenizer (None if it has none) and where both came from."""

    model: Any
    tokenizer: Any
    provenance: Provenance


def load_model(
    name: str,
    *,
    revision: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    device_map: Any = None,
    quantization: Any = None,
    attention: str | None = None,
    reference: ModelReference | None = None,
) -> Loaded:
    """Load a model for reading; see ``TransformersEngine.load``.

    Raises:
        InvalidInput: no such model, a checkpoint that is not whole, or a dtype or device that means nothing.
        UnsupportedModel: no ``transformers`` class for text generation takes it.
        MissingExtra: what the format, the quantisation or the attention kernel needs is not installed.
    """
    settings = Settings.from_environment()
    found = reference or find_model(name, revision, settings=settings)
    place = _device(device)
    options: dict[str, Any] = {"dtype": _dtype(dtype), "attn_implementation": attention, "device_map": device_map}
    options["quantization_config"] = _quantization(quantization) or (_plain_gguf() if found.gguf else None)
    source, where = source_of(found)
    options = {key: value for key, value in (options | where).items() if value is not None}
    with quiet_transformers(), _gguf_reader(found):
        model = _model(name, source, options)
        tokenizer = load_tokenizer(found)
    if device_map is None and not _is_placed(model):
        model = model.to(place)
    if found.folder is None:  # it was downloaded just now; its identity is that of the next run
        found = find_model(name, found.revision, settings=settings)
    commit = found.commit or getattr(model.config, "_commit_hash", None) or "unknown"
    return Loaded(model, tokenizer, provenance_of(model, tokenizer, name, commit=commit, reference=found))


def provenance_of(
    model: Any,
    tokenizer: Any,
    name: str | None = None,
    *,
    commit: str = IN_MEMORY,
    reference: ModelReference | None = None,
) -> Provenance:
    """Where the rows of a loaded ``model`` come from."""
    text_config = model.config.get_text_config(decoder=True)
    weight = next((p for p in model.parameters() if p.is_floating_point()), None)
    on_files = reference is not None and reference.folder is not None
    return Provenance(
        model=name or type(model).__name__,
        commit=commit,
        tokenizer=tokenizer_fingerprint(reference) if on_files and reference else _in_memory_tokenizer(tokenizer),
        dtype=dtype_name(weight.dtype if weight is not None else torch.float32),
        quantization=_quantization_of(model),
        attention=getattr(model.config, "_attn_implementation", None),
        engine="transformers",
        engine_version=transformers.__version__,
        device=str(getattr(model, "device", "cpu")),
        n_layers=int(getattr(text_config, "num_hidden_layers", 0) or 0),
        hidden=int(getattr(text_config, "hidden_size", 0) or 0),
    )


def save_dequantised(gguf: Path, folder: Path) -> None:
    """Read ``gguf``, dequantise it to float32 and write model and tokenizer to ``folder`` as safetensors.

    Raises:
        ImportError: ``gguf`` is not installed.
    """
    with quiet_transformers(), parsed_once():
        tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
        model: Any = AutoModelForCausalLM.from_pretrained(
            str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32, quantization_config=_plain_gguf()
        )
        # The weights are plain float32 now; the note that they once were not forbids saving.
        model.hf_quantizer = None
        model.config.__dict__.pop("quantization_config", None)
        model.is_quantized = False
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _model(name: str, source: str, options: dict[str, Any]) -> Any:
    try:
        model, report = _from_pretrained(source, options)
    except torch.OutOfMemoryError:
        raise
    except ImportError as error:
        raise MissingExtra(f"{name!r} could not be loaded: {first_line(error)}") from error
    except _LOADING_ERRORS as error:
        if _NOT_THIS_CLASS in str(error):
            raise UnsupportedModel(
                f"{name!r} is not a decoder-only language model of transformers: {first_line(error)}"
            ) from error
        raise InvalidInput(f"{name!r} could not be loaded: {_reason(error)}") from error
    _refuse_gaps(model, report["missing_keys"], name)
    return model


def _from_pretrained(source: str, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    # Code that comes with a model is never run; left open, transformers would ask on the terminal.
    options = options | {"output_loading_info": True, "trust_remote_code": False}
    try:
        loaded: tuple[Any, dict[str, Any]] = AutoModelForCausalLM.from_pretrained(source, **options)
    except ValueError as error:
        if _NOT_THIS_CLASS not in str(error):
            raise
        # Multimodal wrappers are not causal-LM classes; their text decoder is.
        loaded = transformers.AutoModelForImageTextToText.from_pretrained(source, **options)
    return loaded


def _refuse_gaps(model: Any, missing: Collection[str], name: str) -> None:
    """Weights that a checkpoint lacks would be random numbers; only a head can be done without."""
    head = model.get_output_embeddings()
    of_head = {f"{path}.{key}" for path, each in model.named_modules() if each is head for key in each.state_dict()}
    gaps = sorted(set(missing) - of_head)
    if gaps:
        raise InvalidInput(f"{name!r} could not be loaded: its files lack {len(gaps)} of its weights, first {gaps[0]}.")
    if missing:
        model.set_output_embeddings(None)


def _dtype(name: str) -> Any:
    if name not in _DTYPES:
        raise InvalidInput(f"dtype must be one of {', '.join(_DTYPES)}; got {name!r}.")
    return "auto" if name == "auto" else getattr(torch, name)


def _device(name: str) -> torch.device:
    if name == "auto":
        kinds = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
        return torch.device(next((kind for kind, there in kinds.items() if there), "cpu"))
    try:
        device = torch.device(name)
        if device.type == "meta":
            raise RuntimeError("it holds no values")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InvalidInput(
            f"device {name!r} is not on this machine; write 'auto', 'cpu' or 'cuda:0' ({first_line(error)})"
        ) from error
    return device


def _quantization(asked: Any) -> Any:
    if asked is None or not isinstance(asked, str):
        return asked
    if asked not in ("8bit", "4bit"):
        raise InvalidInput(f"quantization must be '8bit', '4bit' or a transformers config; got {asked!r}.")
    bits: Any = transformers.BitsAndBytesConfig
    try:
        return bits(load_in_8bit=asked == "8bit", load_in_4bit=asked == "4bit")
    except ImportError as error:
        raise MissingExtra(f"quantization={asked!r} needs bitsandbytes: pip install bitsandbytes.") from error


def _quantization_of(model: Any) -> str | None:
    config = getattr(model.config, "quantization_config", None)
    if config is None:
        return None
    as_dict = config if isinstance(config, dict) else config.to_dict()
    plain = json.loads(json.dumps(as_dict, default=str))
    return f"{plain.get('quant_method', 'unknown')}:{fingerprint(plain)[:12]}"


def _gguf_reader(reference: ModelReference) -> AbstractContextManager[None]:
    if reference.gguf is None:
        return nullcontext()
    if importlib.util.find_spec("gguf") is None:
        raise MissingExtra("a GGUF file is read with gguf: pip install 'streamtap[demo]'.")
    return parsed_once()


def _plain_gguf() -> Any:
    """Unpack GGUF weights: left packed, they are computed by kernels that are fetched from the Hub."""
    config: Any = getattr(transformers, "GgufConfig", None)  # older releases always unpack
    return None if config is None else config(dequantize=True)


def _is_placed(model: Any) -> bool:
    return getattr(model, "hf_device_map", None) is not None or getattr(model, "is_quantized", False)


def _in_memory_tokenizer(tokenizer: Any) -> str:
    if tokenizer is None:
        return "none"
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items()))
    special = {key: str(value) for key, value in (getattr(tokenizer, "special_tokens_map", None) or {}).items()}
    template = str(getattr(tokenizer, "chat_template", None))
    return "sha256:" + fingerprint({"rules": rules, "template": template, "special": special})


def _reason(error: BaseException) -> str:
    if isinstance(error, SafetensorError | struct.error):
        return f"its weights are damaged ({first_line(error)})"
    return "its weights have other shapes than its config says" if "mismatched" in str(error) else first_line(error)
