"""The error tree: one base, stable codes, builtin bases that people catch, and a drawing that is true."""

from __future__ import annotations

import inspect
import pickle
import re

import pytest

from streamtap import errors
from streamtap.errors import (
    CacheDamaged,
    CaptureMissed,
    EmptyPrompt,
    InvalidInput,
    InvalidPrompt,
    MissingExtra,
    NotCached,
    NotEnoughSpace,
    PromptTooLong,
    RowsDamaged,
    StreamtapError,
    UnsupportedSite,
)

CLASSES = [each for _, each in inspect.getmembers(errors, inspect.isclass) if issubclass(each, StreamtapError)]
CODES = {
    "AccessDenied": "access_denied",
    "ActivationQuotaExceeded": "activation_quota_exceeded",
    "ActivationsUnsupported": "activations_unsupported",
    "BadJson": "bad_json",
    "BudgetExceeded": "budget_exceeded",
    "CacheBusy": "cache_busy",
    "CacheDamaged": "cache_damaged",
    "CaptureInterrupted": "capture_failed",
    "CaptureMissed": "capture_failed",
    "CapturePromptTooLong": "activation_prompt_too_long",
    "ChatUnsupported": "chat_completions_unsupported",
    "CircuitOpen": "circuit_open",
    "ColdStart": "modal_cold_boot",
    "DatasetDamaged": "dataset_damaged",
    "DatasetExists": "dataset_exists",
    "DatasetNotFound": "dataset_not_found",
    "EmptyPrompt": "invalid_request",
    "EngineDead": "engine_dead",
    "EngineFailed": "upstream_server_error",
    "EngineOutOfMemory": "engine_out_of_memory",
    "EngineUnreachable": "upstream_unreachable",
    "FullVocabularyTooLong": "full_vocab_prompt_too_long",
    "HarvestCapacityExceeded": "harvest_capacity_exceeded",
    "HarvestConcurrencyExceeded": "harvest_concurrency_exceeded",
    "HarvestDamaged": "harvest_damaged",
    "HarvestFailed": "harvest_failed",
    "HarvestMismatch": "harvest_mismatch",
    "HarvestNotCancellable": "harvest_not_cancellable",
    "HarvestNotFound": "harvest_job_not_found",
    "HarvestQuotaExceeded": "harvest_quota_exceeded",
    "HarvestUnavailable": "harvest_unavailable",
    "HarvestUnsupported": "harvest_unsupported",
    "InvalidInput": "invalid_request",
    "InvalidKey": "invalid_api_key",
    "InvalidLayers": "invalid_request",
    "InvalidPositions": "invalid_request",
    "InvalidPrompt": "invalid_request",
    "InvalidRows": "invalid_request",
    "KeyDisabled": "key_disabled",
    "KeyRefused": "invalid_api_key",
    "KeyRevoked": "key_revoked",
    "LimitReached": "limit_reached",
    "MethodNotAllowed": "method_not_allowed",
    "MissingAuthorization": "missing_authorization",
    "MissingExtra": "missing_extra",
    "ModelNotFound": "model_not_found",
    "NotCached": "not_cached",
    "NotEnoughSpace": "not_enough_space",
    "NotFound": "not_found",
    "NotInDataset": "not_in_dataset",
    "NotServing": "not_serving",
    "PoolingMismatch": "pooling_mismatch",
    "PromptTooLong": "context_length_exceeded",
    "QueueFull": "queue_full",
    "RateLimited": "rate_limited",
    "RequestTooLarge": "request_too_large",
    "RowsDamaged": "cache_damaged",
    "ScopeDenied": "scope_denied",
    "ServerRestarting": "server_restarting",
    "SettingsError": "invalid_request",
    "SteeringNotFinite": "steering_not_finite",
    "SteeringUnsupported": "steering_unsupported",
    "StreamtapError": "internal_error",
    "TransferFailed": "transfer_failed",
    "Unsupported": "unsupported",
    "UnsupportedModel": "unsupported",
    "UnsupportedSite": "unsupported",
}


def test_codes_are_those_that_programs_know() -> None:
    assert {each.__name__: each.code for each in CLASSES} == CODES


def test_only_what_may_pass_by_itself_is_retryable() -> None:
    retryable = {each.__name__ for each in CLASSES if each.retryable}

    assert retryable == {
        "HarvestCapacityExceeded",
        "HarvestConcurrencyExceeded",
        "HarvestQuotaExceeded",
        "HarvestUnavailable",
        "ActivationQuotaExceeded",
        "BudgetExceeded",
        "CacheBusy",
        "CaptureInterrupted",
        "CircuitOpen",
        "ColdStart",
        "EngineDead",
        "EngineFailed",
        "EngineOutOfMemory",
        "EngineUnreachable",
        "LimitReached",
        "NotServing",
        "QueueFull",
        "RateLimited",
        "ServerRestarting",
        "TransferFailed",
    }


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    drawn: dict[str, str] = {}
    above: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        if match := re.search(r"^    ([│├└─ ]*)([A-Z]\w+)", line):
            depth = len(match[1]) // 4
            above[depth:] = [match[2]]
            drawn[match[2]] = above[depth - 1] if depth else "Exception"

    assert drawn == {each.__name__: each.__bases__[0].__name__ for each in CLASSES}


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [(InvalidInput, ValueError), (MissingExtra, ImportError), (NotCached, LookupError), (NotEnoughSpace, OSError)],
)
def test_builtin_errors_catch_ours(kind: type[Exception], builtin: type[Exception]) -> None:
    with pytest.raises(builtin, match="^because$"):
        raise kind("because")


@pytest.mark.parametrize(
    "error",
    [
        EmptyPrompt("prompt 3 is empty", index=3),
        PromptTooLong("prompt 4 is long", index=4),
        CaptureMissed("block 7 is gone", layer=7),
        RowsDamaged("two rows", places=(1, 5)),
        NotEnoughSpace("no room"),
        UnsupportedSite("no site"),
    ],
)
def test_an_error_of_a_worker_process_arrives_whole(error: StreamtapError) -> None:
    arrived = pickle.loads(pickle.dumps(error))

    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    assert vars(arrived) == vars(error)


def test_errors_say_whom_they_concern() -> None:
    assert InvalidPrompt("bad", index=2).index == 2
    assert CaptureMissed("bad", layer=5).layer == 5
    assert issubclass(RowsDamaged, CacheDamaged)
