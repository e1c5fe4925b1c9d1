"""A model's tokenizer from its files, with ``transformers`` and without torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from streamtap.engines.references import ModelReference, has_tokenizer
from streamtap.errors import InvalidInput, MissingExtra

try:
    import transformers
    from transformers import AutoTokenizer
except ImportError as _error:
    raise MissingExtra("reading a tokenizer needs transformers: pip install 'streamtap[local]'.") from _error

#: What the library raises of files that lack or are not what they should be; it looks at little before it uses it.
_DAMAGED = (OSError, ValueError, KeyError, TypeError, AttributeError)


def load_tokenizer(reference: ModelReference) -> Any:
    """The model's tokenizer, or None where it has none.

    Raises:
        InvalidInput: the Hub id cannot be reached, or the files of the tokenizer cannot be read.
    """
    source, where = source_of(reference)
    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False, **where)
    except _DAMAGED as error:
        if reference.folder is None or has_tokenizer(reference):
            raise InvalidInput(f"the tokenizer of {reference.name!r} could not be read: {first_line(error)}") from error
        return None


def source_of(reference: ModelReference) -> tuple[str, dict[str, Any]]:
    """What ``from_pretrained`` takes: a folder or Hub id, and where in it."""
    if reference.gguf is not None:
        return str(reference.folder), {"gguf_file": reference.gguf}
    if reference.folder is not None and not reference.is_hub:
        return str(reference.folder), {}
    return reference.name, {"revision": reference.commit or reference.revision or "main"}


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars of the library inside the ``with``; ours are enough."""
    log: Any = transformers.utils.logging
    bars = log.is_progress_bar_enabled()
    log.disable_progress_bar()
    try:
        yield
    finally:
        if bars:
            log.enable_progress_bar()


def first_line(error: BaseException) -> str:
    """The start of a library's message, which may go on for pages."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
