"""The one seam: everything that runs a model is behind ``Engine``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol, runtime_checkable

from streamtap.activations import Activations, Provenance
from streamtap.completion import Cancel, CompletionRequest, Emit
from streamtap.engines.tokenizing import PromptTokenizer
from streamtap.errors import InvalidInput
from streamtap.spec import CaptureSpec, PromptLike

#: The commit of a model that an engine was given ready, without a word on where it comes from.
IN_MEMORY = "in-memory"


@runtime_checkable
class HoldsWeights(Protocol):
    """An engine that can tell a model without a commit by what its weights hold now."""

    def weights_hash(self) -> str:
        """``"sha256:…"`` of every weight, by name, dtype, shape and value."""
        ...


@runtime_checkable
class Engine(Protocol):
    """Runs one language model. Each method may be called from many threads at once."""

    @property
    def provenance(self) -> Provenance:
        """What the rows come from; its ``n_layers`` and ``hidden`` are the model's."""
        ...

    @property
    def tokenizer(self) -> PromptTokenizer:
        """How prompts become token ids."""
        ...

    def capture(
        self, prompts: Iterable[PromptLike], spec: CaptureSpec, *, ordered: bool = True
    ) -> Iterator[Activations]:
        """Rows of ``prompts`` as they are made, several prompts at a time.

        ``ordered`` gives them in the caller's order; without it each batch comes as soon as it
        is done and ``Activations.index`` says whose rows they are.
        """
        ...

    def close(self) -> None:
        """Let go of the model."""
        ...


@runtime_checkable
class Completes(Protocol):
    """An engine that also writes: completions with capture and steering."""

    @property
    def provenance(self) -> Provenance:
        """What the rows come from."""
        ...

    @property
    def tokenizer(self) -> PromptTokenizer:
        """How prompts become token ids; knows context length and vocabulary."""
        ...

    def submit(self, request: CompletionRequest, emit: Emit) -> Cancel:
        """Queue ``request`` and return at once.

        ``emit`` is called from the engine's thread: with each ``Delta`` where the request streams, then once with
        ``Finished`` or ``Failed``, and must not block. The returned function stops the work within one step; nothing is
        emitted after it returned.

        Raises:
            InvalidInput: the request cannot be run; nothing was queued.
        """
        ...

    def close(self) -> None:
        """Fail what is queued and let go of the model."""
        ...


@runtime_checkable
class AcrossNetwork(Protocol):
    """An engine whose model is reached over a network, which may fail for a while."""

    def trying(self, max_retries: int) -> int:
        """Ask up to ``max_retries`` times more where the way there fails; gives how many it was, at first its own.

        Raises:
            InvalidInput: it is no whole number of at least 0.
        """
        ...


def checked_retries(max_retries: int) -> int:
    """``max_retries`` as it is.

    Raises:
        InvalidInput: it is no whole number of at least 0.
    """
    if not isinstance(max_retries, int) or max_retries < 0:
        raise InvalidInput(f"max_retries must be a whole number of at least 0; got {max_retries!r}.")
    return max_retries
