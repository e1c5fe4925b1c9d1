"""The engine whose model a running service has: our own, or another that speaks the same contract.

::

    capture ─► windows ─► few sequences ─► a completion each, side by side ──────────► rows
                       └► many, all rows or the last ─► one harvest, read over links ─┘
    submit, complete ─► a completion, streamed where that can be
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from streamtap.activations import Activations, Provenance
from streamtap.capture.runs import TokenRun
from streamtap.client.address import find_address
from streamtap.client.harvests import HarvestJob
from streamtap.client.retrying import PATIENT
from streamtap.client.sync import Client
from streamtap.completion import Cancel, Completion, CompletionRequest, Delta, Emit, WireDtype
from streamtap.engines.api_asked import asked_of
from streamtap.engines.api_asking import Asking, Outages
from streamtap.engines.api_bulk import Bulk, job_rows
from streamtap.engines.api_flights import Flights
from streamtap.engines.api_inline import Inline
from streamtap.engines.api_lanes import Insistence, Lanes, closed_engine
from streamtap.engines.api_tokens import Known, known_model
from streamtap.engines.api_told import Told, told_of
from streamtap.engines.api_written import TokenNames
from streamtap.engines.base import checked_retries
from streamtap.engines.by_sequence import BySequence, SequenceRows, Wanted
from streamtap.engines.completing import PromptsLike, request_of, run_request, stream_request
from streamtap.engines.tokenizing import PromptTokenizer
from streamtap.errors import (
    HarvestQuotaExceeded,
    HarvestUnsupported,
    InvalidInput,
    ScopeDenied,
    StreamtapError,
    Unsupported,
)
from streamtap.settings import Settings
from streamtap.spec import CaptureSpec, PromptLike

_LOG = logging.getLogger(__name__)
#: Sequences from which on a harvest is quicker than a request for each.
HARVEST_FROM = 256
#: About a minute of pauses in all, which is longer than a service takes to start again.
_MAX_RETRIES, _FIRST_PAUSE_SECONDS = 8, 0.5


class ApiEngine:
    """Captures, and completes, with a model that a service runs; ``load`` makes one.

    No torch is loaded and no weight is touched here: the service tells depth, width and limits, and only the
    tokenizer's files are read. Layers and positions are chosen there, and pooled there where a single row or a harvest
    does it. Rows are ``dtype``, in bfloat16 unless float32 was asked for.

    Few sequences come as a completion each, as many at once as the service lets a key have. From ``harvest_from``
    sequences on, where every row is wanted or the last one and no token costs, they come as a bulk harvest, if the
    service has them and the key may; ``last_way`` says which way was taken, and why, and so does the log.

    Each capture first asks whether the service still has the model, and again after it was away; where that is another
    one now, nothing of it is taken.

    Args:
        client: Asks the service.
        told: What the service told of the model.
        known: Its tokenizer, and its shape as its files say.
        base: The service's address, whose fingerprint is part of the rows' identity where a commit does not do.
        dtype: Of the rows.
        harvest_from: Sequences of one window; None never harvests.
        max_retries: How often what failed on its way is asked again.
        first_pause_seconds: Before the first time; each later pause is twice as long.
        owns_client: Whether ``close`` closes the client.
        outages: What the client notes that it waited out.

    Raises:
        InvalidInput: neither the service nor the checkpoint's files tell depth and width.
    """

    def __init__(
        self,
        client: Client,
        told: Told,
        known: Known,
        *,
        base: str,
        dtype: WireDtype = "bfloat16",
        harvest_from: int | None = HARVEST_FROM,
        max_retries: int = _MAX_RETRIES,
        first_pause_seconds: float = _FIRST_PAUSE_SECONDS,
        owns_client: bool = False,
        outages: Outages | None = None,
    ) -> None:
        self.told = told
        self.tokenizer: PromptTokenizer = known.tokenizer
        self.provenance = _provenance(told, known, told.commit(base, dtype), dtype)
        #: How the rows of the last window came, in words; empty before the first.
        self.last_way = ""
        self._client, self._owns_client = client, owns_client
        self._harvest_from = harvest_from if told.harvests and dtype == "bfloat16" else None
        outages = outages or Outages()
        self._insistence = Insistence(checked_retries(max_retries), first_pause_seconds, outages.tell)
        self._asking = Asking(client, told, self._insistence, outages)
        self._lanes = Lanes(told.at_once)
        self._inline = Inline(client, told, dtype, self._lanes, self._asking)
        self._bulk = Bulk(client, replace(told, hidden=self.provenance.hidden), self._asking)
        self._flights = Flights(client, told.id, TokenNames(self.tokenizer), self._lanes, self._asking)

    @classmethod
    def load(
        cls,
        model: str,
        *,
        api_base: str | None = None,
        api_key: str | None = None,
        dtype: str = "auto",
        revision: str | None = None,
        harvest_from: int | None = HARVEST_FROM,
        tokenizer: Any = None,
        client: Client | None = None,
        max_retries: int = _MAX_RETRIES,
        first_pause_seconds: float = _FIRST_PAUSE_SECONDS,
    ) -> ApiEngine:
        """Ask the service for ``model``: its id there, or what it calls ``served_model_name``.

        Args:
            model: What to run.
            api_base: The service's address; else that of the environment, as ``Client`` has it.
            api_key: Its key, likewise.
            dtype: ``"auto"`` and ``"bfloat16"`` are bfloat16; ``"float32"`` where the service sends it.
            revision: The checkpoint's commit: refused where the service tells that it has another, and of the
                tokenizer that is read here.
            harvest_from: Sequences from which on a bulk harvest is asked for; None never asks.
            tokenizer: A folder or Hub id whose tokenizer is the model's, or a tokenizer; None is the checkpoint's own.
            client: Asks in place of one made here; ``api_base`` then only names the service.
            max_retries: See ``trying``.
            first_pause_seconds: Before what failed is asked again for the first time.

        Raises:
            InvalidInput: no address, or a dtype, revision or number that means nothing.
            ModelNotFound: the service has no such model.
            ActivationsUnsupported: it has no engine for its activations.
            Unsupported: it does not send ``dtype``.
            KeyRefused: it does not take the key.
            TransferFailed: it cannot be reached.
        """
        if harvest_from is not None and (not isinstance(harvest_from, int) or harvest_from < 1):
            raise InvalidInput(f"harvest_from must be a whole number of at least 1, or None; got {harvest_from!r}.")
        # What was given ready has its key; here the address alone is read.
        address = find_address(api_base, api_key if client is None else "none", Settings.from_environment())
        outages = Outages()
        # A connection that fails is ours to try again, where pauses can be ended.
        patience = replace(PATIENT, connects=0, waiting=outages.waited_out)
        asks = client or Client(address.base, address.key, retries=patience)
        with ExitStack() as undo:
            if client is None:
                undo.callback(asks.close)
            told = told_of(asks.models(), model)
            _check_revision(told, revision)
            rows = told.row_dtype(dtype)
            engine = cls(
                asks,
                told,
                known_model(told, tokenizer, revision),
                base=address.base,
                dtype=rows,
                harvest_from=harvest_from,
                max_retries=max_retries,
                first_pause_seconds=first_pause_seconds,
                owns_client=client is None,
                outages=outages,
            )
            undo.pop_all()
        return engine

    def __repr__(self) -> str:
        return f"ApiEngine({self.told.id!r}, {self._client!r})"

    def trying(self, max_retries: int) -> int:
        """Ask up to ``max_retries`` times more where the way to the service, or its engine, fails; 8 unless told.

        A service that says when it will serve is waited for as it says, and a harvest that was submitted as long as
        the client is patient, whatever is set here.

        Raises:
            InvalidInput: less than 0.
        """
        before, self._insistence.max_retries = self._insistence.max_retries, checked_retries(max_retries)
        return before

    def capture(
        self, prompts: Iterable[PromptLike], spec: CaptureSpec, *, ordered: bool = True
    ) -> Iterator[Activations]:
        """Rows of ``prompts`` as they come; see ``Engine.capture``.

        Raises:
            InvalidInput: a prompt, layer or position that cannot be, as we or the service see it; or the service has
                another model by now.
            Unsupported: ``exact``, or logits.
            CaptureMissed: rows that are not whole, not finite, or another prompt's.
            LimitReached: a quota of the key is used up.
            TransferFailed: the service is away for longer than we try.
        """
        self._check_open()
        self._check_spec(spec)
        whole = BySequence(self.provenance, self.tokenizer, self._make)
        return self._confirmed(whole.capture(prompts, spec, ordered=ordered))

    def submit(self, request: CompletionRequest, emit: Emit) -> Cancel:
        """Queue a completion; see ``Completes.submit``.

        A cancelled one is silent at once; the service stops with its next token, but for one with rows or the prompt's
        log-probabilities, which it ends by itself.

        Raises:
            InvalidInput: the request cannot be run on this model.
            Unsupported: the service does not know what it asks for.
        """
        self._check_open()
        about = self.provenance
        asked = asked_of(request, self.told, self.tokenizer, n_layers=about.n_layers, hidden=about.hidden)
        return self._flights.start(asked, emit, streams=request.stream)

    def complete(self, prompt: PromptsLike | CompletionRequest, **options: Any) -> Completion:
        """Complete ``prompt`` and wait for it; ``options`` are those of ``TransformersEngine.complete``.

        Choices of a capture tell their ``token_ids`` where each is certain, by rows and by what the tokens say.

        Raises:
            InvalidInput: a value that means nothing, or a request that the service refuses.
            CaptureMissed: a row did not come whole and finite.
            StreamtapError: whatever else the service reports.
        """
        request = prompt if isinstance(prompt, CompletionRequest) else request_of(self, prompt, **options)
        return run_request(self, request)

    def stream(self, prompt: PromptsLike | CompletionRequest, **options: Any) -> Iterator[Delta]:
        """As ``complete``, with the text as it is made; whoever stops iterating stops the work."""
        request = prompt if isinstance(prompt, CompletionRequest) else request_of(self, prompt, **options)
        return stream_request(self, request)

    def close(self) -> None:
        """Fail completions that are under way, and let go of the connections."""
        self._asking.closed.set()
        self._flights.close()
        self._lanes.close()
        if self._owns_client:
            self._client.close()

    def _check_open(self) -> None:
        if self._asking.closed.is_set():
            raise closed_engine()

    def _check_spec(self, spec: CaptureSpec) -> None:
        if spec.exact:
            raise Unsupported(
                "exact=True needs each prompt alone in the model, and a service runs others beside it; leave it out, "
                "or take backend='local'."
            )
        if spec.logits is not None:
            raise Unsupported("a service sends no logits; take backend='local' for them.")
        if (spec.perplexity or spec.token_nll) and not self.told.has_logprobs:
            raise Unsupported(
                f"this service sends no log-probabilities of prompts for {self.told.id}; take backend='local' for "
                "perplexity."
            )

    def _confirmed(self, parts: Iterator[Activations]) -> Iterator[Activations]:
        self._asking.confirm()
        yield from parts

    def _make(self, runs: Sequence[TokenRun], wanted: Wanted) -> Iterator[tuple[int, SequenceRows]]:
        job = self._submitted(runs, wanted)
        if job is not None:
            try:
                for place, rows in self._bulk.rows(job, runs, wanted):
                    yield place, SequenceRows(rows)
                return
            except HarvestQuotaExceeded as error:  # of a later job of several, before any row has come
                self._never_harvest(runs, error)
        yield from self._inline.each(runs, wanted)

    def _submitted(self, runs: Sequence[TokenRun], wanted: Wanted) -> HarvestJob | None:
        """The harvest of these runs, or None where they come one by one."""
        if self._harvest_from is None or len(runs) < self._harvest_from or not wanted.layers:
            self._say(f"inline: {len(runs)} sequences, a request for each, {self.told.at_once} at once")
            return None
        if wanted.nll:
            # A harvest has none of them, so that every prompt would run twice.
            self._say(f"inline: {len(runs)} sequences, whose token costs no harvest has")
            return None
        rows = job_rows(runs, wanted.pooling)
        if rows is None:
            self._say(f"inline: {len(runs)} sequences, at positions that no harvest has for all of them")
            return None
        try:
            job = self._bulk.submitted(runs, wanted, rows)
        except (ScopeDenied, HarvestUnsupported, HarvestQuotaExceeded) as error:
            self._never_harvest(runs, error)
            return None
        self._say(f"harvest: {len(runs)} sequences, {self._harvest_from} or more, as bulk job {', '.join(job.ids)}")
        return job

    def _never_harvest(self, runs: Sequence[TokenRun], error: StreamtapError) -> None:
        self._harvest_from = None
        self._say(f"inline: {len(runs)} sequences, since the service takes no harvest of them ({error.code})")

    def _say(self, way: str) -> None:
        self.last_way = way
        _LOG.info("rows of %s come %s", self.told.id, way)


def _provenance(told: Told, known: Known, commit: str, dtype: WireDtype) -> Provenance:
    n_layers, hidden = told.n_layers or known.n_layers, told.hidden or known.hidden
    if n_layers is None or hidden is None:
        raise InvalidInput(
            f"the service does not tell how deep and wide {told.id} is, and its config is not here; pass tokenizer= "
            "with a folder or Hub id that has it."
        )
    return Provenance(
        model=told.checkpoint,
        commit=commit,
        tokenizer=known.fingerprint,
        dtype=dtype,
        engine="api",
        # Provenance is published with datasets, and the address is not.
        device="service",
        n_layers=n_layers,
        hidden=hidden,
    )


def _check_revision(told: Told, revision: str | None) -> None:
    """A commit that the service tells is the one that was asked for, where that is a commit too."""
    if revision is None or told.revision is None or len(revision) != len(told.revision):
        return
    if revision != told.revision:
        raise InvalidInput(
            f"revision {revision} of {told.checkpoint} was asked for; the service has {told.revision}. Leave revision "
            "out, or ask a service that has it."
        )
