"""vLLM's options under which rows are wrong or lack without a word, and its flags as words of a command line."""

from __future__ import annotations

import re
from collections.abc import Iterable

_DRAFTS = "drafted tokens that are thrown away would leave rows"

#: Options that would cost rows, or mix them up, and why.
NO_TRUE_ROWS = {
    **dict.fromkeys(("speculative_config", "spec_method", "spec_model", "spec_tokens"), _DRAFTS),
    "kv_transfer_config": "tokens that ran elsewhere have no rows here",
    "kv_offloading_size": "tokens whose keys and values are fetched do not run, so they have no rows",
    "kv_sharing_fast_prefill": "some layers would run for a prompt's last token alone",
    "worker_extension_cls": "vllm-lens takes its place",
}
#: Short names that options have beside their own.
_SHORT = {
    "speculative_config": "-sc",
    "tensor_parallel_size": "-tp",
    "pipeline_parallel_size": "-pp",
    "prefill_context_parallel_size": "-pcp",
}


def option_of(word: str, options: Iterable[str]) -> str | None:
    """Which of ``options`` a word of a command line sets, None if it sets none of them.

    vLLM takes ``_`` for ``-``, a value behind ``=``, a key of a value behind ``.``, and as much of a flag as no other
    one begins with; it refuses less than that itself.
    """
    name = re.split("[=.]", word, maxsplit=1)[0].replace("_", "-")
    if not re.match("--?[a-z]", name):
        return None
    return next((option for option in options if any(flag.startswith(name) for flag in _flags(option))), None)


def flag_of(option: str) -> str:
    """The flag of ``option``, written in full."""
    return f"--{option.replace('_', '-')}"


def _flags(option: str) -> tuple[str, ...]:
    return (flag_of(option), _SHORT.get(option, ""))
