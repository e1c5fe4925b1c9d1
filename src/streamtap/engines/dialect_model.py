"""What the model of an engine process is: as its own files say, which may be here, and as the process says."""

from __future__ import annotations

from collections.abc import Callable

from streamtap.activations import Provenance
from streamtap.engines.base import IN_MEMORY
from streamtap.engines.described import DescribedModel, described_model
from streamtap.engines.dialect_calls import ServedProcess
from streamtap.engines.tokenizing import PromptTokenizer
from streamtap.errors import InvalidInput


def described_process(
    process: ServedProcess,
    checkpoint: str | None,
    revision: str | None,
    shape: tuple[int, int] | None,
    seen_dtype: Callable[[], str],
) -> tuple[Provenance, PromptTokenizer]:
    """Where the rows of a process come from, and how prompts become its tokens.

    What ``shape`` and the files of ``checkpoint`` say of depth and width goes before what the process says: rows of
    another shape are then refused. ``seen_dtype`` finds the dtype out where the process does not tell it.

    Raises:
        InvalidInput: no such checkpoint, or nobody says depth and width.
    """
    model = None if checkpoint is None else described_model(checkpoint, revision)
    n_layers, hidden = shape or _shape(process, model)
    about = Provenance(
        model=checkpoint or process.text("root") or process.name,
        # A model that nobody knows here by its files has no identity to keep rows under.
        commit=(model.reference.commit if model else None) or IN_MEMORY,
        tokenizer=model.tokenizer_print if model else "none",
        dtype=process.text("dtype") or seen_dtype(),
        engine="transformers" if process.is_ours else "vllm",
        device="elsewhere",
        n_layers=n_layers,
        hidden=hidden,
    )
    return about, _tokenizer(process, model)


def _shape(process: ServedProcess, model: DescribedModel | None) -> tuple[int, int]:
    if model is not None:
        return model.n_layers, model.hidden
    n_layers, hidden = process.number("n_layers"), process.number("hidden_size")
    if n_layers is None or hidden is None:
        raise InvalidInput(
            f"the engine does not say how deep and wide {process.name!r} is; name its checkpoint, whose config does."
        )
    return n_layers, hidden


def _tokenizer(process: ServedProcess, model: DescribedModel | None) -> PromptTokenizer:
    context = process.number("max_model_len")
    if context is not None and not process.is_ours:
        context -= 1  # a token is drawn in any case, and needs its place
    if model is None:
        return PromptTokenizer(None, context_length=context, vocabulary=process.number("vocabulary"))
    own = model.tokenizer
    known = [length for length in (context, own.context_length) if length is not None]
    return PromptTokenizer(
        own.tokenizer,
        context_length=min(known, default=None),
        vocabulary=own.vocabulary,
        special_ids=own.special_ids.tolist(),
    )
