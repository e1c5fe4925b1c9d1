"""Every error that Streamtap raises.

::

    StreamtapError
    ├── InvalidInput (ValueError)      the caller asked for something that cannot be
    │   ├── InvalidLayers              a layer spec that does not fit the model
    │   ├── InvalidPositions           a position spec that does not fit a prompt
    │   ├── InvalidPrompt              a prompt that cannot be run, named by its index
    │   │   ├── EmptyPrompt
    │   │   └── PromptTooLong
    │   ├── InvalidRows                rows or labels that a probe cannot learn from
    │   └── SettingsError              a setting with a value that means nothing
    ├── Unsupported                    what this model or engine cannot do
    │   ├── UnsupportedModel           blocks not found, or not a decoder-only model
    │   └── UnsupportedSite            a site other than a block's output
    ├── CaptureMissed                  a capture that is not whole, or not finite
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
    └── TransferFailed                 a server or network that failed for longer than we wait
        └── AccessDenied               the server refuses this token, or its absence

Each class has a stable ``code`` for programs and ``retryable``, which says whether the
same call may succeed later with nothing changed.
"""

from __future__ import annotations

from typing import Any, ClassVar


class StreamtapError(Exception):
    """Base of the tree; catch it to catch all of ours."""

    code: ClassVar[str] = "internal_error"
    retryable: ClassVar[bool] = False

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


def _rebuilt(kind: type[StreamtapError], args: tuple[Any, ...]) -> StreamtapError:
    error = kind.__new__(kind, *args)
    error.args = args
    return error
