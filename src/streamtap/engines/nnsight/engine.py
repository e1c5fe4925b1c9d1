"""The engine that runs a model through nnsight: in this process, or on NDIF."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from streamtap.errors import EngineFailed, EngineOutOfMemory, InvalidInput, MissingExtra, Unsupported

try:
    import nnsight
    import torch
    from nnsight.intervention.backends.local import LocalSimulationBackend
except ImportError as _error:
    raise MissingExtra(
        "backend='nnsight' needs torch, transformers and nnsight: pip install 'streamtap[nnsight]'."
    ) from _error

from streamtap.activations import Activations, Provenance
from streamtap.capture.arrays import to_numpy
from streamtap.capture.runs import TokenRun
from streamtap.engines.base import checked_retries
from streamtap.engines.by_sequence import BySequence, SequenceRows, Wanted
from streamtap.engines.loading import load_model, provenance_of
from streamtap.engines.nnsight.in_trace import run_trace
from streamtap.engines.nnsight.ndif_jobs import NdifJob, NdifPlace, asked_of
from streamtap.engines.nnsight.patience import Patience, unmiscounted
from streamtap.engines.nnsight.remote_model import NDIF, remote_model
from streamtap.engines.nnsight.traces import Limits, Sizes, cut_traces, plan_trace, read_trace
from streamtap.engines.nnsight.wrapping import Tree, tree_over
from streamtap.engines.references import ModelReference
from streamtap.engines.tokenizing import PromptTokenizer
from streamtap.engines.transformers import prompt_tokenizer
from streamtap.engines.weights import weights_hash
from streamtap.spec import CaptureSpec, PromptLike

_LOG = logging.getLogger(__name__)
# Tokens in one padded batch: a CPU gains nothing from more, a GPU needs them to be busy, and a job should be short.
_CPU_BATCH_TOKENS, _ACCELERATOR_BATCH_TOKENS, _JOB_TOKENS = 512, 16384, 4096
#: ``remote=`` that serialises each trace and runs it in this process: a rehearsal of NDIF.
REHEARSAL = "local"

#: Runs one trace that a backend is made for, and gives its bytes.
Runner = Callable[[Callable[[Any], Any]], Any]


class NnsightEngine:
    """Captures the residual stream of a loaded decoder-only ``transformers`` model through nnsight.

    Selection of layers and positions, pooling and the cast to the rows' dtype happen inside the trace.

    Args:
        model: The model, unmodified; put into evaluation mode.
        tokenizer: Its tokenizer, or None where every prompt is token ids.
        name: What to call it in ``provenance``.
        batch_size: At most this many prompts in a trace.
        max_batch_tokens: At most this many tokens, padding counted, in a trace.
        rehearse: Serialise each trace, and run what comes of that, as a server would.

    Raises:
        UnsupportedModel: its decoder blocks were not found.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        tokenizer: Any = None,
        *,
        name: str | None = None,
        provenance: Provenance | None = None,
        batch_size: int | None = None,
        max_batch_tokens: int | None = None,
        rehearse: bool = False,
    ) -> None:
        module = model.eval()
        about = replace(
            provenance or provenance_of(module, tokenizer, name), engine="nnsight", engine_version=nnsight.__version__
        )
        on_cpu = about.device.startswith("cpu")
        limits = _limits(batch_size, max_batch_tokens, _CPU_BATCH_TOKENS if on_cpu else _ACCELERATOR_BATCH_TOKENS)
        tree = tree_over(module, tokenizer)
        backend = partial(LocalSimulationBackend, tree.model) if rehearse else None
        self._set_up(tree, about, prompt_tokenizer(tokenizer, module), limits, partial(_here, backend), module)

    def _set_up(
        self,
        tree: Tree,
        about: Provenance,
        tokenizer: PromptTokenizer,
        limits: Limits,
        runner: Runner,
        module: torch.nn.Module | None,
    ) -> None:
        self.provenance = about
        self.tokenizer = tokenizer
        self.patience = Patience()
        self._tree: Tree | None = tree
        self._limits = replace(limits, prompts=1) if tree.alone else limits
        self._sizes = Sizes(about.hidden, about.dtype, tokenizer.vocabulary)
        self._runner = runner
        self._module: Any = module
        self._lock = threading.Lock()

    @classmethod
    def load(
        cls,
        model: str,
        *,
        revision: str | None = None,
        dtype: str = "auto",
        device: str = "auto",
        device_map: Any = None,
        quantization: Any = None,
        attention: str | None = None,
        batch_size: int | None = None,
        max_batch_tokens: int | None = None,
        remote: bool | str = False,
        api_key: str | None = None,
        reference: ModelReference | None = None,
    ) -> NnsightEngine:
        """Load ``model`` here, or with ``remote`` only its tokenizer and config.

        Args:
            model: ``"demo"``, a local folder, a GGUF file, or a Hub id; with ``remote=True`` a Hub id.
            revision: Branch, tag or commit of a Hub id.
            dtype: As ``TransformersEngine.load``; with ``remote`` what rows come back in, bfloat16 for ``"auto"``.
            device: As there; means nothing with ``remote``, as do the next two.
            device_map: As there.
            quantization: As there.
            attention: Attention kernel, for example ``"eager"``; a server is asked to use it.
            batch_size: As in the class.
            max_batch_tokens: As in the class.
            remote: False runs the model here; True on NDIF, with the key in ``NDIF_API_KEY``; ``"http://…"`` on another
                server that speaks as NDIF does; ``"local"`` here again, each trace serialised as for a server.
            api_key: The server's key. Another server than NDIF is sent none but this one.
            reference: What ``model`` means, where it was found already.

        Raises:
            InvalidInput: no such model, an option that means nothing, or a key for an address where others could read
                it: plain ``http://`` to another machine.
            MissingAuthorization: ``remote=True``, and no key.
            UnsupportedModel: its decoder blocks were not found.
            MissingExtra: what the format needs is not installed.
        """
        if remote not in (False, REHEARSAL):
            if (device, device_map, quantization) != ("auto", None, None):
                raise InvalidInput("device, device_map and quantization are the server's with remote=; leave them out.")
            limits = _limits(batch_size, max_batch_tokens, _JOB_TOKENS)
            return cls._elsewhere(model, revision, dtype, attention, remote, api_key, reference, limits)
        if api_key is not None:
            raise InvalidInput("api_key is a server's, and the model runs here; leave it out, or say remote=.")
        loaded = load_model(
            model,
            revision=revision,
            dtype=dtype,
            device=device,
            device_map=device_map,
            quantization=quantization,
            attention=attention,
            reference=reference,
        )
        return cls(
            loaded.model,
            loaded.tokenizer,
            provenance=loaded.provenance,
            batch_size=batch_size,
            max_batch_tokens=max_batch_tokens,
            rehearse=remote == REHEARSAL,
        )

    @classmethod
    def _elsewhere(
        cls,
        name: str,
        revision: str | None,
        dtype: str,
        attention: str | None,
        remote: bool | str,
        api_key: str | None,
        reference: ModelReference | None,
        limits: Limits,
    ) -> NnsightEngine:
        host = NDIF if remote is True else str(remote)
        found = remote_model(name, revision, dtype, attention, host, reference, api_key)
        engine = cls.__new__(cls)
        engine._set_up(found.tree, found.provenance, found.tokenizer, limits, partial(_as_job, found.place), None)
        return engine

    def trying(self, max_retries: int) -> int:
        """Ask a server up to ``max_retries`` times more where the way there or a job fails; see ``AcrossNetwork``.

        Raises:
            InvalidInput: it is no whole number of at least 0.
        """
        before, self.patience = self.patience.retries, replace(self.patience, retries=checked_retries(max_retries))
        return before

    def capture(
        self, prompts: Iterable[PromptLike], spec: CaptureSpec, *, ordered: bool = True
    ) -> Iterator[Activations]:
        """Rows of ``prompts`` as they are made; see ``Engine.capture``.

        Raises:
            InvalidInput: a prompt, layer or position that cannot be; its index is named. Or what is at the address
                does not speak as NDIF does.
            Unsupported: logits or perplexity of a model without a head.
            CaptureMissed: a layer did not come whole and finite.
            EngineOutOfMemory: one prompt alone does not fit.
            KeyRefused: the server does not take the key.
            ModelNotFound: the server does not serve the model.
            EngineFailed: a job failed, and so did those that were asked for after it.
            TransferFailed: so did the way to the server, or what it said could not be read.
        """
        self._open_tree()
        if spec.needs_head and self._module is not None and self._module.get_output_embeddings() is None:
            raise Unsupported(
                f"{type(self._module).__name__} has no language-model head, so it gives no logits or perplexity; load "
                "it as a causal language model, or set compute_perplexity=False and cache_logits=False."
            )
        make = partial(self._make, alone=spec.exact)
        return BySequence(self.provenance, self.tokenizer, make).capture(prompts, spec, ordered=ordered)

    def weights_hash(self) -> str:
        """``"sha256:…"`` of every weight as it is now; the whole model is read.

        Raises:
            Unsupported: the weights are elsewhere.
        """
        self._open_tree()
        if self._module is None:
            raise Unsupported(f"the weights of {self.provenance.model} are not on this machine.")
        return weights_hash(self._module)

    def close(self) -> None:
        """Let go of the model."""
        self._tree = self._module = None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _open_tree(self) -> Tree:
        if self._tree is None:
            raise InvalidInput("this engine is closed, so its model is gone; load it again.")
        return self._tree

    def _make(self, runs: Sequence[TokenRun], wanted: Wanted, *, alone: bool) -> Iterator[tuple[int, SequenceRows]]:
        left = set(range(len(runs)))
        while left:
            limits = replace(self._limits, prompts=1) if alone else self._limits
            for members in cut_traces(runs, sorted(left), wanted, self._sizes, limits):
                made = self._traced([runs[i] for i in members], wanted)
                if made is None:
                    break  # out of memory: what is left once more, in smaller traces
                left -= set(members)
                yield from zip(members, made, strict=True)

    def _traced(self, runs: Sequence[TokenRun], wanted: Wanted) -> list[SequenceRows] | None:
        """The rows of ``runs``, or None once the token budget was halved because they did not fit."""
        try:
            return self._run(runs, wanted)
        except (torch.OutOfMemoryError, EngineOutOfMemory) as error:
            if len(runs) == 1:
                raise EngineOutOfMemory(
                    f"prompt {runs[0].name} alone ({len(runs[0].token_ids)} tokens) does not fit into the memory of "
                    f"{self.provenance.device}; shorten it, or ask for fewer layers."
                ) from error
        tokens = max(1, min(self._limits.tokens, sum(len(run.token_ids) for run in runs)) // 2)
        self._limits = replace(self._limits, tokens=tokens)
        _LOG.warning("out of memory: going on with traces of %d tokens", tokens)
        return None

    def _run(self, runs: Sequence[TokenRun], wanted: Wanted) -> list[SequenceRows]:
        tree, trace = self._open_tree(), plan_trace(runs, wanted, self._sizes)
        blocks = [tree.blocks[layer] for layer in wanted.layers]
        if not blocks and not trace.needs_head:  # one token, which nothing predicts
            return read_trace(_NOTHING, runs, wanted, self._sizes)
        dtype = getattr(torch, self.provenance.dtype)

        def run(backend: Any) -> Any:
            return unmiscounted(lambda: run_trace(tree.model, blocks, dtype, backend, **trace.arguments()))

        def ask() -> Any:
            with self._lock, torch.no_grad():
                return self._runner(run)

        packed = self.patience.asking(ask)
        if not isinstance(packed, torch.Tensor):
            raise EngineFailed(f"a trace of {self.provenance.model} gave nothing back.")
        return read_trace(to_numpy(packed), runs, wanted, self._sizes)


_NOTHING = to_numpy(torch.zeros(0, dtype=torch.uint8))


def _limits(batch_size: int | None, max_batch_tokens: int | None, usual_tokens: int) -> Limits:
    for name, value in (("batch_size", batch_size), ("max_batch_tokens", max_batch_tokens)):
        if value is not None and value < 1:
            raise InvalidInput(f"{name} must be at least 1; got {value}.")
    return Limits(batch_size, usual_tokens if max_batch_tokens is None else max_batch_tokens)


def _here(backend: Callable[[], Any] | None, run: Callable[[Any], Any]) -> Any:
    if backend is None:
        return run(None)
    paths = list(sys.path)
    try:
        return run(backend())
    finally:
        sys.path[:] = paths  # a rehearsal hides some of them, and puts those back at the end


def _as_job(place: NdifPlace, run: Callable[[Any], Any]) -> Any:
    return asked_of(place, lambda: run(NdifJob(place)))
