"""The engine that runs a model on vLLM with vllm-lens, opened in this process, through ``LLM.generate``."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from streamtap.activations import Activations, Provenance
from streamtap.completion import Cancel, Completion, CompletionRequest, Delta, Emit
from streamtap.engines.by_sequence import BySequence
from streamtap.engines.completing import PromptsLike, request_of, run_request, stream_request
from streamtap.engines.described import DescribedModel, described_model
from streamtap.engines.references import ModelReference
from streamtap.engines.tokenizing import PromptTokenizer
from streamtap.engines.vllm_offline_llm import Llm, LlmFacts
from streamtap.engines.vllm_offline_loading import Asked, check_installed, open_llm
from streamtap.engines.vllm_offline_rows import RowMaker
from streamtap.errors import InvalidInput, Unsupported
from streamtap.spec import CaptureSpec, PromptLike

if TYPE_CHECKING:
    from streamtap.engines.vllm_offline_completing import Completing


class VllmEngine:
    """Runs a model on vLLM, whose own processes hold it, on one device or split over many. Threads may share it.

    Layer k is the output of block k, before the final norm. vLLM puts batches together itself; sequences go to it in
    calls that its memory has room for at once, and no prefix is taken from a cache.

    Args:
        llm: An open vLLM.
        facts: What it made of the model.
        described: The model's files.
    """

    def __init__(self, llm: Llm, facts: LlmFacts, described: DescribedModel) -> None:
        self._llm, self._facts = llm, facts
        self._starting = threading.Lock()
        self._completing: Completing | None = None
        self._closed = False
        self._provenance = Provenance(
            model=described.reference.name,
            commit=described.reference.commit or "",
            tokenizer=described.tokenizer_print,
            dtype=facts.dtype,
            quantization=facts.quantization,
            engine="vllm",
            engine_version=facts.version,
            device=facts.device,
            n_layers=described.n_layers,
            hidden=described.hidden,
        )
        known = described.tokenizer
        self._tokenizer = PromptTokenizer(
            known.tokenizer,
            context_length=facts.context - 1,  # vLLM draws a token, and wants room for it
            vocabulary=known.vocabulary,
            special_ids=known.special_ids.tolist(),
        )
        self._by_sequence = BySequence(self._provenance, self._tokenizer, RowMaker(llm, facts, described.hidden))

    @classmethod
    def load(
        cls,
        model: str = "demo",
        *,
        revision: str | None = None,
        dtype: str = "auto",
        max_model_len: int | None = None,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        distributed_executor: str | None = None,
        gpu_memory_utilization: float | None = None,
        engine_options: Mapping[str, Any] | None = None,
        reference: ModelReference | None = None,
    ) -> VllmEngine:
        """Open ``model``: ``"demo"``, a local folder, or a Hub id.

        Args:
            model: See above.
            revision: A Hub revision.
            dtype: ``"auto"`` (the checkpoint's own), ``"float32"``, ``"bfloat16"`` or ``"float16"``.
            max_model_len: Longest prompt and the token after it; None is the model's context.
            tensor_parallel_size: Devices that each layer is split over.
            pipeline_parallel_size: Groups of devices that the layers are dealt out to; needs GPUs.
            distributed_executor: ``"mp"`` for one machine, ``"ray"`` for many; None leaves it to vLLM.
            gpu_memory_utilization: Share of a device's memory that vLLM takes; None leaves it to vLLM.
            engine_options: Other arguments of ``vllm.LLM``.
            reference: The model, where it was found already.

        Raises:
            InvalidInput: no such model, or an option that means nothing.
            Unsupported: an option under which rows would lack, or that vllm-lens fails with.
            MissingExtra: vllm, vllm-lens or what reads the tokenizer is not installed.
            EngineFailed: vLLM could not open it.
        """
        asked = Asked(
            dtype=dtype,
            max_model_len=max_model_len,
            tensor_parallel_size=tensor_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
            distributed_executor=distributed_executor,
            gpu_memory_utilization=gpu_memory_utilization,
            engine_options=engine_options,
        )
        check_installed()
        found = reference if reference is not None and reference.folder is not None else None
        described = described_model(model, revision, reference=found)
        llm, facts = open_llm(described, asked)
        return cls(llm, facts, described)

    @property
    def provenance(self) -> Provenance:
        """What the rows come from."""
        return self._provenance

    @property
    def tokenizer(self) -> PromptTokenizer:
        """How prompts become token ids; its context leaves room for the token that vLLM draws."""
        return self._tokenizer

    def capture(
        self, prompts: Iterable[PromptLike], spec: CaptureSpec, *, ordered: bool = True
    ) -> Iterator[Activations]:
        """Rows of ``prompts`` as they are made; see ``Engine.capture``.

        Raises:
            InvalidInput: a prompt, layer or position that cannot be; its index is named.
            Unsupported: logits, or values that depend on no other prompt.
            CaptureMissed: a layer did not come whole and finite.
            EngineFailed: vLLM failed; ``EngineDead`` where its processes are gone.
        """
        if spec.logits is not None:
            raise Unsupported("vLLM gives no logits, only likelihoods; backend='local' gives them.")
        if spec.exact:
            raise Unsupported("vLLM puts batches together itself, so that it has no exact=True; backend='local' has.")
        return self._by_sequence.capture(prompts, spec, ordered=ordered)

    def submit(self, request: CompletionRequest, emit: Emit) -> Cancel:
        """Queue a completion; see ``Completes.submit``. Requests run one after the other.

        Raises:
            InvalidInput: the request cannot be run on this model, or the engine is closed.
            Unsupported: vLLM with vllm-lens would do something else; ``SteeringUnsupported`` with vectors.
        """
        return self._requests().submit(request, emit)

    def complete(self, prompt: PromptsLike | CompletionRequest, **options: Any) -> Completion:
        """Complete ``prompt`` and wait for it; takes what ``TransformersEngine.complete`` takes.

        Raises:
            InvalidInput: a value that means nothing, or a request that this model cannot run.
            Unsupported: vLLM with vllm-lens would do something else; ``SteeringUnsupported`` with vectors.
            CaptureMissed: a row did not come whole and finite.
            SteeringNotFinite: a vector drove the stream out of range.
        """
        request = prompt if isinstance(prompt, CompletionRequest) else request_of(self, prompt, **options)
        return run_request(self, request)

    def stream(self, prompt: PromptsLike | CompletionRequest, **options: Any) -> Iterator[Delta]:
        """As ``complete``, with the text as it is made; whoever stops iterating stops the work."""
        request = prompt if isinstance(prompt, CompletionRequest) else request_of(self, prompt, **options)
        return stream_request(self, request)

    def close(self) -> None:
        """Fail what is queued and end vLLM's processes."""
        with self._starting:
            self._closed = True
            completing = self._completing
        if completing is not None:
            completing.close()
        self._llm.close()

    def _requests(self) -> Completing:
        from streamtap.engines.vllm_offline_completing import Completing

        with self._starting:
            if self._closed:
                raise InvalidInput("this engine is closed, so its model is gone; load it again.")
            if self._completing is None:
                self._completing = Completing(
                    self._llm, self._facts, self._tokenizer, self._provenance.n_layers, self._provenance.hidden
                )
            return self._completing
