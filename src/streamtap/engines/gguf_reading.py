"""Let ``transformers`` read one GGUF file without parsing it again for each question it has.

Its reader walks through every token of the vocabulary in Python, and is made anew for the
config, the tokenizer and the weights; the table of tensor names is built once a module.
Keeping both for the length of one load makes it about twice as fast, with the same result.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch


@contextmanager
def parsed_once() -> Iterator[None]:
    """Inside the ``with``, a GGUF file is parsed once and no progress bar of the reader is shown.

    Raises:
        ImportError: ``gguf`` is not installed.
    """
    import gguf
    from transformers import modeling_gguf_pytorch_utils

    library: Any = gguf
    swaps = [
        (library, "GGUFReader", functools.cache(library.GGUFReader)),
        (library, "get_tensor_name_map", functools.cache(library.get_tensor_name_map)),
        (modeling_gguf_pytorch_utils, "tqdm", lambda items, **_options: items),
    ]
    with ExitStack() as stack:
        for module, name, replacement in swaps:
            stack.enter_context(patch.object(module, name, replacement))
        yield
