"""Every error that Streamtap raises.

::

    StreamtapError
    ├── InvalidInput (ValueError)      the caller asked for something that cannot be
    │   ├── InvalidLayers              a layer spec that does not fit the model
    │   ├── InvalidPositions           a position spec that does not fit a prompt
    │   ├── InvalidPrompt              a prompt that cannot be run, named by its index
    │   │   ├── EmptyPrompt
    │   │   ├── PromptTooLong
    │   │   ├── CapturePromptTooLong   more rows than one capture may have
    │   │   └── FullVocabularyTooLong  too long for log-probabilities of the whole vocabulary
    │   ├── InvalidRows                rows or labels that a probe cannot learn from
    │   ├── SettingsError              a setting with a value that means nothing
    │   ├── BadJson                    a body that is not JSON
    │   ├── ModelNotFound              a server that has no model of that id
    │   └── SteeringNotFinite          a steering vector that drove the stream out of range
    ├── Unsupported                    what this model or engine cannot do
    │   ├── UnsupportedModel           blocks not found, or not a decoder-only model
    │   ├── UnsupportedSite            a site other than a block's output
    │   ├── ActivationsUnsupported     a model without an engine for activations
    │   ├── SteeringUnsupported        a steering vector that this engine cannot apply
    │   ├── ChatUnsupported            chat completions, which have no defined positions
    │   └── HarvestUnsupported         a model without an engine for bulk harvests
    ├── CaptureMissed                  a capture that is not whole, or not finite
    │   └── CaptureInterrupted         one beside which a working engine interrupted a request
    ├── EngineOutOfMemory              one prompt alone does not fit the device
    ├── MissingExtra (ImportError)     an optional dependency is not installed
    ├── NotCached (LookupError)        rows that the cache does not hold
    │   └── PoolingMismatch            they are there under another pooling only
    ├── CacheDamaged                   stored bytes that do not match their checksum
    │   └── RowsDamaged                rows of prompts that are named, and were set aside
    ├── CacheBusy                      another process holds what this one needs
    ├── NotEnoughSpace (OSError)       the disk cannot take what the run would write
    ├── DatasetNotFound (LookupError)  no dataset there, or none that this token may see
    ├── NotInDataset (LookupError)     prompts or layers that a dataset does not hold
    ├── DatasetDamaged                 files that do not fit the dataset's own index and hashes
    ├── DatasetExists                  a place to publish to that holds something else
    ├── TransferFailed                 a server or network that failed for longer than we wait
    │   └── AccessDenied               the server refuses this token, or its absence
    ├── KeyRefused                     an API key that a server does not take
    │   ├── MissingAuthorization
    │   ├── InvalidKey
    │   ├── KeyRevoked
    │   ├── KeyDisabled                paused, or not yet in use
    │   └── ScopeDenied                a key without the scope that this needs
    ├── NotFound (LookupError)         no such address
    │   └── HarvestNotFound            no such job, or none of this key's
    ├── HarvestNotCancellable          a job that is over
    ├── HarvestFailed                  a job that ended without its files
    ├── HarvestDamaged                 files of a run that do not fit its manifest
    ├── HarvestMismatch                a place that holds another run
    ├── MethodNotAllowed
    ├── RequestTooLarge
    ├── LimitReached                   a limit of the server; ``retry_after_seconds`` says when to come back
    │   ├── QueueFull
    │   ├── RateLimited
    │   ├── BudgetExceeded             tokens of the day or month
    │   ├── ActivationQuotaExceeded    captures of the month
    │   ├── HarvestQuotaExceeded       harvests of the month
    │   ├── HarvestConcurrencyExceeded the key runs as many at once as it may
    │   └── HarvestCapacityExceeded    all keys together do
    ├── EngineFailed                   the process that runs the model
    │   ├── EngineUnreachable
    │   └── EngineDead                 it ended in the middle of the request
    └── NotServing                     a server that will serve this later
        ├── CircuitOpen                the engine failed too often just now
        ├── ColdStart                  the engine was not ready in time
        ├── HarvestUnavailable         nothing takes jobs just now
        └── ServerRestarting

Each class has a stable ``code`` for programs and ``retryable``, which says whether the
same call may succeed later with nothing changed.
"""

from __future__ import annotations

from typing import Any, ClassVar


class StreamtapError(Exception):
    """Base of the tree; catch it to catch all of ours."""

    code: ClassVar[str] = "internal_error"
    retryable: ClassVar[bool] = False
    retry_after_seconds: int | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Rebuild from the message and the attributes: a worker process's error must reach its parent."""
        return _rebuilt, (type(self), self.args), dict(self.__dict__)


class InvalidInput(StreamtapError, ValueError):
    """What was asked for cannot be; the message says what was expected and what came."""

    code = "invalid_request"


class InvalidLayers(InvalidInput):
    """A layer spec that does not fit the model's depth."""


class InvalidPositions(InvalidInput):
    """A position spec that does not fit a prompt."""


class InvalidPrompt(InvalidInput):
    """A prompt that cannot be run.

    ``index`` is its place in the list that the caller gave, from 0.
    """

    def __init__(self, message: str, *, index: int) -> None:
        super().__init__(message)
        self.index = index


class EmptyPrompt(InvalidPrompt):
    """A prompt without a single token."""


class PromptTooLong(InvalidPrompt):
    """A prompt of more tokens than the model's context; ``truncate=`` cuts it when asked."""

    code = "context_length_exceeded"


class InvalidRows(InvalidInput):
    """Rows or labels that a probe cannot learn from or predict on."""


class SettingsError(InvalidInput):
    """A setting whose value means nothing; the message names the variable."""


class Unsupported(StreamtapError):
    """Something that this model or engine cannot do; the message says which can."""

    code = "unsupported"


class UnsupportedModel(Unsupported):
    """The decoder blocks were not found, or the model is not decoder-only."""


class UnsupportedSite(Unsupported):
    """A site other than a decoder block's output was asked for."""


class CaptureMissed(StreamtapError):
    """A capture that lacks a layer or position, or holds a value that is not finite.

    ``layer`` is the first block it concerns.
    """

    code = "capture_failed"

    def __init__(self, message: str, *, layer: int) -> None:
        super().__init__(message)
        self.layer = layer


class CaptureInterrupted(CaptureMissed):
    """A capture during which the engine, short of memory, began a request anew: its rows may be other positions'."""

    retryable = True


class EngineOutOfMemory(StreamtapError):
    """One prompt alone does not fit into the device's memory."""

    code = "engine_out_of_memory"
    retryable = True


class MissingExtra(StreamtapError, ImportError):
    """An optional dependency is not installed; the message is the command that adds it."""

    code = "missing_extra"


class NotCached(StreamtapError, LookupError):
    """Rows that the cache does not hold; the message counts them."""

    code = "not_cached"


class PoolingMismatch(NotCached):
    """The rows are stored under another pooling than the one asked for."""

    code = "pooling_mismatch"


class CacheDamaged(StreamtapError):
    """Stored bytes that do not match their checksum."""

    code = "cache_damaged"


class RowsDamaged(CacheDamaged):
    """Rows that do not match their checksums; they were set aside, so a new run writes them again.

    ``places`` are the indices of their prompts in the list that was asked for.
    """

    def __init__(self, message: str, *, places: tuple[int, ...]) -> None:
        super().__init__(message)
        self.places = places


class CacheBusy(StreamtapError):
    """Another process holds what this one needs for longer than it was willing to wait."""

    code = "cache_busy"
    retryable = True


class NotEnoughSpace(StreamtapError, OSError):
    """The disk has less free space than the run would write."""

    code = "not_enough_space"


class DatasetNotFound(StreamtapError, LookupError):
    """No dataset under that name, or none that this token may see."""

    code = "dataset_not_found"


class NotInDataset(StreamtapError, LookupError):
    """Prompts or layers that a dataset does not hold; the message counts and names them."""

    code = "not_in_dataset"


class DatasetDamaged(StreamtapError):
    """Files that do not fit what the dataset's index says of them; the message names the first."""

    code = "dataset_damaged"


class DatasetExists(StreamtapError):
    """The place to publish to holds something else; the message says which argument replaces it."""

    code = "dataset_exists"


class TransferFailed(StreamtapError):
    """A server or network that failed, or asked to wait, for longer than we were willing to."""

    code = "transfer_failed"
    retryable = True


class AccessDenied(TransferFailed):
    """The server refuses this token, or asks for one; its text never holds the token."""

    code = "access_denied"
    retryable = False


class CapturePromptTooLong(InvalidPrompt):
    """More positions than one capture may have; the message states the cap and the positions counted."""

    code = "activation_prompt_too_long"


class FullVocabularyTooLong(InvalidPrompt):
    """A prompt too long for the log-probabilities of the whole vocabulary."""

    code = "full_vocab_prompt_too_long"


class BadJson(InvalidInput):
    """A request body that is not JSON."""

    code = "bad_json"


class ModelNotFound(InvalidInput):
    """The server has no model of that id; the message names those that it has."""

    code = "model_not_found"


class SteeringNotFinite(InvalidInput):
    """A steering vector drove the residual stream out of the range of the model's dtype."""

    code = "steering_not_finite"


class ActivationsUnsupported(Unsupported):
    """The model has no engine for activations."""

    code = "activations_unsupported"


class SteeringUnsupported(Unsupported):
    """A steering vector that this engine cannot apply as it was asked."""

    code = "steering_unsupported"


class ChatUnsupported(Unsupported):
    """Chat completions: whose template wrote which token is not defined there."""

    code = "chat_completions_unsupported"


class HarvestUnsupported(Unsupported):
    """The model has no engine for bulk harvests; the message says which models have."""

    code = "harvest_unsupported"


class KeyRefused(StreamtapError):
    """An API key that the server does not take; no text holds the key."""

    code = "invalid_api_key"


class MissingAuthorization(KeyRefused):
    """No key was sent."""

    code = "missing_authorization"


class InvalidKey(KeyRefused):
    """The server knows no such key."""


class KeyRevoked(KeyRefused):
    """The key was revoked for good."""

    code = "key_revoked"


class KeyDisabled(KeyRefused):
    """The key is paused."""

    code = "key_disabled"


class ScopeDenied(KeyRefused):
    """The key lacks the scope that this needs; the message names it."""

    code = "scope_denied"


class NotFound(StreamtapError, LookupError):
    """The server has nothing at that address."""

    code = "not_found"


class HarvestNotFound(NotFound):
    """No job of that id, or one of another key."""

    code = "harvest_job_not_found"


class HarvestNotCancellable(StreamtapError):
    """The job is over already; its state does not change any more."""

    code = "harvest_not_cancellable"


class HarvestFailed(StreamtapError):
    """The job ended without its files: it failed, or was cancelled."""

    code = "harvest_failed"


class HarvestDamaged(StreamtapError):
    """Files of a harvest that do not fit what its manifest says; the message names the first."""

    code = "harvest_damaged"


class HarvestMismatch(StreamtapError):
    """The place holds a run of other prompts, layers or model; the message says what differs."""

    code = "harvest_mismatch"


class MethodNotAllowed(StreamtapError):
    """The address takes other methods."""

    code = "method_not_allowed"


class RequestTooLarge(StreamtapError):
    """A request body larger than the server takes."""

    code = "request_too_large"


class LimitReached(StreamtapError):
    """A limit of the server; ``retry_after_seconds`` says when to come back."""

    code = "limit_reached"
    retryable = True


class QueueFull(LimitReached):
    """The key has as many requests running and waiting as it may have."""

    code = "queue_full"


class RateLimited(LimitReached):
    """The key started as many requests in this minute as it may."""

    code = "rate_limited"


class BudgetExceeded(LimitReached):
    """The tokens of this day or month are used up."""

    code = "budget_exceeded"


class ActivationQuotaExceeded(LimitReached):
    """The captures of this month are used up; the message says used/limit."""

    code = "activation_quota_exceeded"


class HarvestQuotaExceeded(LimitReached):
    """The harvests of this month are used up; the message says used/limit."""

    code = "harvest_quota_exceeded"


class HarvestConcurrencyExceeded(LimitReached):
    """The key has as many harvests of this lane under way as it may."""

    code = "harvest_concurrency_exceeded"


class HarvestCapacityExceeded(LimitReached):
    """All keys together have as many harvests of large models under way as there may be."""

    code = "harvest_capacity_exceeded"


class EngineFailed(StreamtapError):
    """The engine's process answered with an error of its own."""

    code = "upstream_server_error"
    retryable = True


class EngineUnreachable(EngineFailed):
    """The engine's process does not answer."""

    code = "upstream_unreachable"


class EngineDead(EngineFailed):
    """The engine's process ended in the middle of the request."""

    code = "engine_dead"


class NotServing(StreamtapError):
    """The server will serve this later; ``retry_after_seconds`` says when to come back."""

    code = "not_serving"
    retryable = True


class CircuitOpen(NotServing):
    """The engine failed too often just now, and is left alone for a while."""

    code = "circuit_open"


class ColdStart(NotServing):
    """The engine was not ready in time; it goes on starting."""

    code = "modal_cold_boot"


class HarvestUnavailable(NotServing):
    """Nothing takes harvest jobs just now."""

    code = "harvest_unavailable"


class ServerRestarting(NotServing):
    """The server is about to stop."""

    code = "server_restarting"


def _rebuilt(kind: type[StreamtapError], args: tuple[Any, ...]) -> StreamtapError:
    error = kind.__new__(kind, *args)
    error.args = args
    return error
