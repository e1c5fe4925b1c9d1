"""The engine that runs a ``transformers`` model in this process."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from streamtap.errors import CaptureMissed, EngineOutOfMemory, InvalidInput, MissingExtra

try:
    import torch
except ImportError as _error:
    raise MissingExtra("running a model here needs torch and transformers: pip install 'streamtap[local]'.") from _error

from streamtap.activations import Activations, Provenance, in_asked_order
from streamtap.capture.batches import Group, cut_batches, share_prefixes
from streamtap.capture.forward import Forward
from streamtap.capture.groups import Ask, BatchRows, Prefix, run_batch, run_prefix
from streamtap.capture.head import Head
from streamtap.capture.narrowing import Narrowing
from streamtap.capture.passes import follows_the_longest
from streamtap.capture.runs import TokenRun
from streamtap.completion import Cancel, Completion, CompletionRequest, Delta, Emit
from streamtap.engines.completing import PromptsLike, request_of, run_request, stream_request
from streamtap.engines.generation.building import generator_for
from streamtap.engines.generation.generator import Generator
from streamtap.engines.loading import load_model, provenance_of
from streamtap.engines.references import ModelReference
from streamtap.engines.tokenizing import PromptTokenizer
from streamtap.engines.weights import weights_hash
from streamtap.engines.windows import HeldBytes, Window, windows_of
from streamtap.layers import resolve_layers
from streamtap.spec import CaptureSpec, PromptLike, as_prompts

_LOG = logging.getLogger(__name__)
# Tokens in one padded batch: a CPU gains nothing from more, a GPU needs them to be busy.
_CPU_BATCH_TOKENS, _ACCELERATOR_BATCH_TOKENS = 512, 16384
# A shared prefix that changes values by more than rounding is not shared.
_SHARING_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
_SHARING_TOLERANCE_HALF = 0.2
_PROBE_TAIL_TOKENS = 8
_SHARING_ERRORS = (AttributeError, TypeError, ValueError, RuntimeError, IndexError, CaptureMissed)


class TransformersEngine:
    """Captures the residual stream of a loaded decoder-only ``transformers`` model.

    Args:
        model: The model, unmodified; put into evaluation mode.
        tokenizer: Its tokenizer, or None where every prompt is token ids.
        name: What to call it in ``provenance``.
        batch_size: At most this many prompts in a batch.
        max_batch_tokens: At most this many tokens, padding counted, in a batch.
        share_prefixes: Run a long prefix that several prompts share once.

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
        share_prefixes: bool = True,
    ) -> None:
        _check_positive(batch_size=batch_size, max_batch_tokens=max_batch_tokens)
        self.model = model.eval()
        self.forward = Forward(self.model)
        self.provenance = provenance or provenance_of(self.model, tokenizer, name)
        self.tokenizer = prompt_tokenizer(tokenizer, self.model)
        if follows_the_longest(self.forward):
            batch_size, share_prefixes = 1, False
        self.batch_size = batch_size
        on_cpu = self.forward.device.type == "cpu"
        self.max_batch_tokens = max_batch_tokens or (_CPU_BATCH_TOKENS if on_cpu else _ACCELERATOR_BATCH_TOKENS)
        self._sharing = None if share_prefixes and self.forward.keeps_states else False
        self._head: Head | None = None
        self._generator: Generator | None = None
        self._lock = threading.Lock()
        self._building = threading.Lock()
        self._loaded_here = self._closed = False

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
        share_prefixes: bool = True,
        reference: ModelReference | None = None,
    ) -> TransformersEngine:
        """Load ``model``: ``"demo"``, a local folder, a GGUF file, or a Hub id.

        Args:
            model: What to load.
            revision: Branch, tag or commit of a Hub id.
            dtype: ``"auto"`` keeps the checkpoint's; else ``"float32"``, ``"bfloat16"``, …
            device: ``"auto"``, ``"cpu"``, ``"cuda:1"``, …
            device_map: Spread over devices as ``accelerate`` does, instead of ``device``.
            quantization: ``"8bit"``, ``"4bit"`` or a ``transformers`` quantisation config.
            attention: Attention kernel, for example ``"eager"``; None lets the model choose.
            batch_size: As in the class.
            max_batch_tokens: As in the class.
            share_prefixes: As in the class.
            reference: What ``model`` means, where it was found already; else its files are found and hashed.

        Raises:
            InvalidInput: no such model, or a dtype or device that means nothing.
            UnsupportedModel: its decoder blocks were not found.
            MissingExtra: what the format needs is not installed.
        """
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
        engine = cls(
            loaded.model,
            loaded.tokenizer,
            provenance=loaded.provenance,
            batch_size=batch_size,
            max_batch_tokens=max_batch_tokens,
            share_prefixes=share_prefixes,
        )
        engine._loaded_here = True
        return engine

    @property
    def n_layers(self) -> int:
        """Number of decoder blocks."""
        return self.forward.blocks.n_layers

    @property
    def hidden(self) -> int:
        """Width of a row."""
        return self.forward.blocks.hidden

    def capture(
        self, prompts: Iterable[PromptLike], spec: CaptureSpec, *, ordered: bool = True
    ) -> Iterator[Activations]:
        """Rows of ``prompts`` as they are made; see ``Engine.capture``.

        The form of every prompt of a list is checked before any work, its tokens a window of
        prompts ahead; memory does not grow with the number of prompts.

        Raises:
            InvalidInput: a prompt, layer or position that cannot be; its index is named.
            Unsupported: logits or perplexity of a model whose head is not a plain matrix.
            CaptureMissed: a layer did not come whole and finite.
            EngineOutOfMemory: one prompt alone does not fit.
        """
        if self._closed:
            raise InvalidInput("this engine is closed, so its model is gone; load it again.")
        ask = self._ask(spec)
        if isinstance(prompts, Sequence | str):
            prompts = as_prompts(prompts)
        return self._captured(prompts, spec, ask, ordered)

    def submit(self, request: CompletionRequest, emit: Emit) -> Cancel:
        """Queue a completion; see ``Completes.submit``. Requests run together, each as if it were alone.

        Raises:
            InvalidInput: the request cannot be run on this model.
            Unsupported: the model's head is not a plain matrix.
        """
        if self._closed:
            raise InvalidInput("this engine is closed, so its model is gone; load it again.")
        return self._generation().submit(request, emit)

    def complete(self, prompt: PromptsLike | CompletionRequest, **options: Any) -> Completion:
        """Complete ``prompt`` and wait for it: text, and the rows of prompt and generated positions.

        Args:
            prompt: Text, token ids, a list of either, or a whole ``CompletionRequest``.
            **options: ``max_tokens`` (with a capture 1, else up to the context), ``capture`` (a layer spec or True),
                ``positions`` (``"all"``, ``"last"``, ``"prompt"``, ``"generated"`` or a list of ints),
                ``output_dtype``, ``steer`` (what ``steering_vector`` gives, or ``SteeringVector``), ``n``, ``stop``,
                ``logprobs``, ``prompt_logprobs``, ``echo``, ``add_special_tokens``, and the fields of ``Sampling``:
                ``temperature``, ``seed``, ….

        Raises:
            InvalidInput: a value that means nothing, or a request that this model cannot run.
            CaptureMissed: a row did not come whole and finite.
            SteeringNotFinite: a vector drove the stream out of range.
        """
        request = prompt if isinstance(prompt, CompletionRequest) else request_of(self, prompt, **options)
        return run_request(self, request)

    def stream(self, prompt: PromptsLike | CompletionRequest, **options: Any) -> Iterator[Delta]:
        """As ``complete``, with the text as it is made; whoever stops iterating stops the work."""
        request = prompt if isinstance(prompt, CompletionRequest) else request_of(self, prompt, **options)
        return stream_request(self, request)

    def weights_hash(self) -> str:
        """``"sha256:…"`` of every weight as it is now; the whole model is read.

        Raises:
            Unsupported: some weights are off-loaded.
        """
        return weights_hash(self.model)

    def close(self) -> None:
        """Let go of the memory of a model that was loaded here; a caller's own model is left as it is."""
        if self._generator is not None:
            self._generator.close()
        if self._loaded_here:
            self._closed = True
            _let_go(self.model)
        _empty_device_cache()

    def _ask(self, spec: CaptureSpec) -> Ask:
        layers = resolve_layers(spec.layers, self.n_layers)
        if not layers and not spec.needs_head:
            raise InvalidInput("nothing was asked for: layers is empty and neither perplexity nor logits are wanted.")
        if spec.needs_head:
            self._known_head()
        nll = spec.perplexity or spec.token_nll
        return Ask(layers, spec.pooling, nll, spec.logits, spec.logit_top_k, self._narrowing(spec))

    def _narrowing(self, spec: CaptureSpec) -> Narrowing | None:
        if spec.dtype is None and spec.projection is None:
            return None
        directions = None if spec.projection is None else spec.projection.directions
        if directions is not None and directions.shape[1] != self.hidden:
            raise InvalidInput(
                f"directions are {directions.shape[1]} wide; rows of {self.provenance.model} are {self.hidden}."
            )
        return Narrowing(spec.dtype, directions)

    def _known_head(self) -> Head:
        if self._head is None:
            with self._lock:
                self._head = self._head or Head(self.forward)
        return self._head

    def _generation(self) -> Generator:
        head = self._known_head()
        with self._building:
            if self._generator is None:
                self._generator = generator_for(
                    self.forward, head, self.tokenizer, max_step_tokens=self.max_batch_tokens, device_lock=self._lock
                )
        return self._generator

    def _captured(
        self, prompts: Iterable[PromptLike], spec: CaptureSpec, ask: Ask, ordered: bool
    ) -> Iterator[Activations]:
        held = self._held_bytes(ask) if ordered else None
        for window in windows_of(prompts, self.tokenizer, spec, held, cut=not ask.head):
            parts = self._window(window, spec, ask)
            if ordered:
                yield in_asked_order(list(parts))
            else:
                yield from parts

    def _held_bytes(self, ask: Ask) -> HeldBytes:
        kept = 2 * ask.top_k if ask.top_k else self.tokenizer.vocabulary or 0  # a value and its id, or all values
        return HeldBytes(len(ask.layers) * self.hidden * 4, kept * 4 if ask.logits else 0)

    def _window(self, window: Window, spec: CaptureSpec, ask: Ask) -> Iterator[Activations]:
        for group in self._groups(window.runs, spec):
            for members, rows in self._group(group, window.runs, spec, ask):
                yield window.activations(members, rows.on_host(), ask.layers, spec, self.provenance)

    def _groups(self, runs: Sequence[TokenRun], spec: CaptureSpec) -> list[Group]:
        everyone = Group(0, tuple(range(len(runs))))
        if spec.exact or self._sharing is False:
            return [everyone]
        groups = share_prefixes([run.token_ids for run in runs])
        shared = next((group for group in groups if group.prefix), None)
        if shared is not None and self._sharing is None:
            self._sharing = self._sharing_holds(shared, runs)
        return groups if self._sharing or shared is None else [everyone]

    def _group(
        self, group: Group, runs: Sequence[TokenRun], spec: CaptureSpec, ask: Ask
    ) -> Iterator[tuple[tuple[int, ...], BatchRows]]:
        lengths = [len(run.token_ids) for run in runs]
        prefix = self._prefix(group, runs, ask) if group.prefix else None
        left = group if prefix else Group(0, group.members)
        while left.members:
            most = 1 if spec.exact else self.batch_size
            members = next(cut_batches(left, lengths, most, self.max_batch_tokens))
            rows = self._batch([runs[i] for i in members], prefix, ask)
            if rows is None:
                continue  # out of memory: the same members again, in smaller batches
            done = set(members)
            left = Group(left.prefix, tuple(i for i in left.members if i not in done))
            yield members, rows

    def _prefix(self, group: Group, runs: Sequence[TokenRun], ask: Ask) -> Prefix | None:
        """The group's prefix, or None where it does not fit, so that each sequence is run whole."""
        try:
            with self._lock:
                return run_prefix(self.forward, self._head, [runs[i] for i in group.members], group.prefix, ask)
        except torch.OutOfMemoryError:
            _LOG.warning("out of memory: a prefix of %d tokens is not shared", group.prefix)
        _empty_device_cache()
        return None

    def _batch(self, runs: Sequence[TokenRun], prefix: Prefix | None, ask: Ask) -> BatchRows | None:
        """The batch's rows, or None once the token budget was halved because it did not fit."""
        try:
            with self._lock:
                return run_batch(self.forward, self._head, runs, prefix, ask)
        except torch.OutOfMemoryError as error:
            if len(runs) == 1:
                raise EngineOutOfMemory(
                    f"prompt {runs[0].name} alone ({len(runs[0].token_ids)} tokens) does not fit into the memory of "
                    f"{self.provenance.device}; shorten it, ask for fewer layers, or take a smaller dtype."
                ) from error
        self.max_batch_tokens = max(1, min(self.max_batch_tokens, sum(len(run.token_ids) for run in runs)) // 2)
        _LOG.warning("out of memory: going on with batches of %d tokens", self.max_batch_tokens)
        _empty_device_cache()
        return None

    def _sharing_holds(self, group: Group, runs: Sequence[TokenRun]) -> bool | None:
        """Run one sequence both ways: some architectures keep states that cannot be taken up again.

        None where it did not fit into memory, so that nothing was learnt.

        A tail of several tokens through the last block, whatever was asked for: the answer holds for
        every later request, and some take a state up for one token only, or in some blocks only.
        """
        probe = min((runs[i] for i in group.members), key=lambda run: len(run.token_ids))
        tokens = min(group.prefix, len(probe.token_ids) - _PROBE_TAIL_TOKENS)
        alone = Ask((self.n_layers - 1,), "last_token")
        try:
            with self._lock:
                prefix = run_prefix(self.forward, None, [probe], tokens, alone)
                shared = run_batch(self.forward, None, [probe], prefix, alone).rows
                whole = run_batch(self.forward, None, [probe], None, alone).rows
        except torch.OutOfMemoryError:
            _empty_device_cache()
            return None
        except _SHARING_ERRORS as error:
            _LOG.info("prefixes are not shared: %s does not take up a state (%s)", self.provenance.model, type(error))
            return False
        assert shared is not None
        assert whole is not None
        tolerance = _SHARING_TOLERANCE.get(whole.dtype, _SHARING_TOLERANCE_HALF)
        gap = (shared - whole).double().norm(dim=-1) / whole.double().norm(dim=-1).clamp_min(1e-30)
        return bool(gap.max() <= tolerance)


def prompt_tokenizer(tokenizer: Any, model: Any) -> PromptTokenizer:
    """A ``PromptTokenizer`` that knows the model's context, vocabulary and special ids."""
    config = model.config.get_text_config(decoder=True)
    special = [getattr(config, f"{kind}_token_id", None) for kind in ("bos", "eos", "pad")]
    flat = [i for each in special for i in (each if isinstance(each, list) else [each]) if i is not None]
    return PromptTokenizer(
        tokenizer,
        context_length=getattr(config, "max_position_embeddings", None),
        vocabulary=int(model.get_input_embeddings().weight.shape[0]),
        special_ids=flat,
    )


def _check_positive(**values: int | None) -> None:
    for name, value in values.items():
        if value is not None and value < 1:
            raise InvalidInput(f"{name} must be at least 1; got {value}.")


def _let_go(model: torch.nn.Module) -> None:
    # Not model.to("meta"): one that is off-loaded or quantised refuses to be moved.
    for weight in chain(model.parameters(), model.buffers()):
        if type(weight.data) is torch.Tensor:
            weight.data = weight.data.new_empty(0)


def _empty_device_cache() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if torch.backends.mps.is_available():
        torch.mps.empty_cache()
