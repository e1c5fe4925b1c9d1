"""A running engine process as an engine: our worker, or a ``vllm serve`` with vllm-lens, at an address.

It is asked in the dialect of ``engines.vllm``, one request a sequence. Of the model only config and tokenizer are read
here, and no torch is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from itertools import islice
from typing import Any

import httpx2
import numpy as np
from numpy.typing import NDArray

from streamtap.activations import Activations, Provenance
from streamtap.capture.runs import TokenRun
from streamtap.client.retrying import PATIENT, Retries
from streamtap.client.sync import Client
from streamtap.completion import CapturedPositions
from streamtap.engines.base import checked_retries
from streamtap.engines.by_sequence import BySequence, SequenceRows, Wanted, chosen_rows, pooled_rows
from streamtap.engines.dialect_calls import ServedProcess, address_of, capture_call, planned, served_process
from streamtap.engines.dialect_model import described_process
from streamtap.engines.tokenizing import PromptTokenizer
from streamtap.errors import InvalidInput, Unsupported
from streamtap.pooling import ONE_TOKEN
from streamtap.spec import CaptureSpec, PromptLike

#: What is sent to a process that asks for no key: a client always sends one.
_NO_KEY = "none"
#: A prompt of one token, whose row shows in which dtype a process computes.
_SHOWING = (7,)

Connect = Callable[[Retries], Client]


class DialectEngine:
    """Captures what an engine process runs; ``load`` makes one.

    Args:
        connect: Makes a client of the process that asks again as it is told.
        process: What the process says of itself.
        provenance: What its rows come from; ``n_layers``, ``hidden`` and ``dtype`` are what its answers are held to.
        tokenizer: How prompts become token ids.
        concurrency: Requests at a time.
    """

    def __init__(
        self,
        connect: Connect,
        process: ServedProcess,
        provenance: Provenance,
        tokenizer: PromptTokenizer,
        *,
        concurrency: int = 8,
    ) -> None:
        if concurrency < 1:
            raise InvalidInput(f"concurrency must be at least 1; got {concurrency}.")
        self.provenance = provenance
        self.tokenizer = tokenizer
        self.concurrency = concurrency
        self._connect, self._process = connect, process
        self._client, self._connects = connect(PATIENT), PATIENT.connects
        self._closed = False

    @classmethod
    def load(
        cls,
        url: str,
        *,
        key: str | None = None,
        model: str | None = None,
        checkpoint: str | None = None,
        revision: str | None = None,
        shape: tuple[int, int] | None = None,
        concurrency: int = 8,
        timeout_seconds: float = 900.0,
        transport: httpx2.BaseTransport | None = None,
    ) -> DialectEngine:
        """Ask the process at ``url`` what it serves, and be an engine of it.

        Args:
            url: Its address, such as ``"http://127.0.0.1:8000"``, with or without ``/v1``.
            key: The key that it asks for, if any.
            model: What it calls the model; None takes the only one that it serves.
            checkpoint: The model by a name that is known here (``"demo"``, a folder, a Hub id), for tokenizer, depth
                and width. Without it prompts are token ids, and depth and width are what ``shape`` or the process says.
            revision: Branch, tag or commit of ``checkpoint``.
            shape: Number of layers, and width of a row.
            concurrency: Requests at a time.
            timeout_seconds: How long the process may be silent.
            transport: How it is reached, for tests; by default directly, whatever proxy the environment names.

        Raises:
            InvalidInput: no address, no such model there or here, or nobody says its depth and width.
            KeyRefused: it does not take the key.
            TransferFailed: it cannot be reached.
            CaptureMissed: it captures nothing.
        """
        # A proxy of the environment has no business between us and an engine.
        way, base = transport or httpx2.HTTPTransport(), address_of(url)

        def connect(retries: Retries) -> Client:
            return Client(base, key or _NO_KEY, timeout_seconds=timeout_seconds, retries=retries, transport=way)

        client = connect(PATIENT)
        try:
            process = served_process(client, model)
            seen = partial(_dtype_of, client, process)
            about, tokenizer = described_process(process, checkpoint, revision, shape, seen)
            return cls(connect, process, about, tokenizer, concurrency=concurrency)
        except BaseException:
            client.close()
            raise

    def capture(
        self, prompts: Iterable[PromptLike], spec: CaptureSpec, *, ordered: bool = True
    ) -> Iterator[Activations]:
        """Rows of ``prompts`` as they are made; see ``Engine.capture``.

        Raises:
            InvalidInput: a prompt, layer or position that cannot be; its index is named.
            Unsupported: perplexity or logits, which a process does not give beside rows, or ``exact``.
            CaptureMissed: a layer did not come whole and finite.
            TransferFailed: the process cannot be reached any more.
        """
        if self._closed:
            raise InvalidInput("this engine is closed; load it again.")
        if spec.needs_head:
            raise Unsupported("an engine process gives neither perplexity nor logits; backend='local' does.")
        if spec.exact:
            raise Unsupported("an engine process runs sequences together as it likes; exact is for backend='local'.")
        return BySequence(self.provenance, self.tokenizer, self._make).capture(prompts, spec, ordered=ordered)

    def trying(self, max_retries: int) -> int:
        """Ask up to ``max_retries`` times more where the process does not answer; gives how many it was.

        Raises:
            InvalidInput: it is no whole number of at least 0.
        """
        before, self._connects = self._connects, checked_retries(max_retries)
        self._client = self._connect(Retries(connects=max_retries))
        return before

    def close(self) -> None:
        """Let go of the connections; the process runs on."""
        self._closed = True
        self._client.close()

    def _make(self, runs: Sequence[TokenRun], wanted: Wanted) -> Iterator[tuple[int, SequenceRows]]:
        """A few requests under way at a time, and no more answers in memory than that."""
        left = iter(enumerate(runs))
        with ThreadPoolExecutor(self.concurrency, thread_name_prefix="streamtap-dialect") as threads:
            pending: dict[Future[SequenceRows], int] = {}
            while True:
                for place, run in islice(left, self.concurrency - len(pending)):
                    pending[threads.submit(self._rows, run, wanted)] = place
                if not pending:
                    return
                done, _ = wait(pending, return_when=FIRST_COMPLETED)
                for each in done:
                    yield pending.pop(each), each.result()

    def _rows(self, run: TokenRun, wanted: Wanted) -> SequenceRows:
        positions = self._positions(run, wanted)
        call = capture_call(self._process, run.token_ids.tolist(), wanted.layers, positions, self._wire_dtype)
        values = self._client.carry_out(planned(call))
        if self.provenance.dtype == "float16":
            values = values.astype(np.float16)  # which they were, before they were widened for the way
        if positions == "all":
            return SequenceRows(chosen_rows(values, run, wanted.pooling))
        return SequenceRows(pooled_rows(values, wanted.pooling))

    def _positions(self, run: TokenRun, wanted: Wanted) -> CapturedPositions:
        """Which rows are asked for: those that are kept, of a process that can choose."""
        chosen = run.chosen.tolist()
        if wanted.pooling in ONE_TOKEN:
            chosen = chosen[-1:] if wanted.pooling == "last_token" else chosen[:1]
        return tuple(chosen) if self._process.is_ours and len(chosen) < len(run.token_ids) else "all"

    @property
    def _wire_dtype(self) -> str:
        return "bfloat16" if self.provenance.dtype == "bfloat16" else "float32"


def _dtype_of(client: Client, process: ServedProcess) -> str:
    """The dtype of a row that was captured for it."""
    values: NDArray[Any] = client.carry_out(planned(capture_call(process, _SHOWING, (0,), "all", "float32")))
    return values.dtype.name
