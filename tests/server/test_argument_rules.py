"""``arguments`` of a model: what has a key of its own, and what would make rows wrong, is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from streamtap.server.config import ModelConfig
from streamtap.server.toml.argument_rules import argument_faults


def _faults(*arguments: str, engine: str = "vllm", **fields: Any) -> list[str]:
    model: Any = ModelConfig(id="m", checkpoint="org/m", arguments=arguments, engine=engine, **fields)  # type: ignore[arg-type]
    return list(argument_faults(model))


@pytest.mark.parametrize(
    ("word", "flag", "reason"),
    [
        ("--speculative-config", "--speculative-config", "drafted tokens"),
        ("--speculative_config={}", "--speculative-config", "drafted tokens"),
        ("--specul", "--speculative-config", "drafted tokens"),
        ("--speculative-config.method", "--speculative-config", "drafted tokens"),
        ("-sc", "--speculative-config", "drafted tokens"),
        ("--spec-method=ngram", "--spec-method", "drafted tokens"),
        ("--kv-transfer-config", "--kv-transfer-config", "ran elsewhere"),
        ("--kv-tra", "--kv-transfer-config", "ran elsewhere"),
        ("--kv_offloading_size", "--kv-offloading-size", "are fetched"),
        ("--kv-sharing-fast-prefill", "--kv-sharing-fast-prefill", "last token alone"),
        ("--worker-extension-cls", "--worker-extension-cls", "vllm-lens takes its place"),
        ("--disable-log-stats", "--disable-log-stats", "interrupted"),
        ("--disable_log_s", "--disable-log-stats", "interrupted"),
    ],
)
def test_flags_that_cost_true_rows_are_for_completions_alone(word: str, flag: str, reason: str) -> None:
    (told,) = _faults("--seed", "1", word)

    assert told.startswith(f"{flag} is not taken of a model that captures: ")
    assert reason in told
    assert "activations = false" in told
    assert _faults(word, command=("run", "{port}")) == [told]
    assert _faults(word, activations=False) == []


@pytest.mark.parametrize(
    ("word", "flag", "key"),
    [
        ("--tensor-parallel-size", "--tensor-parallel-size", "tensor_parallel_size"),
        ("--tensor_parallel_size=8", "--tensor-parallel-size", "tensor_parallel_size"),
        ("--tensor", "--tensor-parallel-size", "tensor_parallel_size"),
        ("-tp", "--tensor-parallel-size", "tensor_parallel_size"),
        ("-pp=2", "--pipeline-parallel-size", "pipeline_parallel_size"),
        ("--distributed-executor-backend=ray", "--distributed-executor-backend", "distributed_executor"),
        ("--enable-sleep-mode", "--enable-sleep-mode", "park"),
        ("--model", "--model", "checkpoint"),
        ("--served-model-name", "--served-model-name", "name"),
        ("--max-model-len", "--max-model-len", "max_model_len"),
        ("--dtype=float32", "--dtype", "dtype"),
        ("--rev", "--revision", "revision"),
    ],
)
def test_what_has_a_key_of_its_own_is_set_by_it(word: str, flag: str, key: str) -> None:
    (told,) = _faults(word, activations=False)

    assert told.startswith(f"{flag} has a key of its own")
    assert told.endswith(f"set {key}")
    # There that key is not read.
    assert _faults(word, command=("run", "{port}")) == []


@pytest.mark.parametrize("word", ["--host", "--port=1", "--uds", "--api-key=hunter2"])
def test_what_the_gateway_sets_is_its_own(word: str) -> None:
    for engine in ("vllm", "transformers"):
        (told,) = _faults(word, engine=engine)
        assert told == f"{word.partition('=')[0]} is set by the gateway; remove it"


def test_a_file_of_flags_is_not_taken() -> None:
    (told,) = _faults("--config", "more.yaml")

    assert "write them here" in told


def test_our_workers_flags_have_keys_too() -> None:
    (told,) = _faults("--max-batch-tokens", "9", engine="transformers")
    assert told.endswith("set max_batch_tokens")
    assert _faults("--device=cpu", engine="transformers")[0].endswith("set device")
    assert _faults("--grace-seconds", "9", engine="transformers") == []


def test_all_else_is_taken() -> None:
    others = ["--gpu-memory-utilization", "0.9", "--enable-prefix-caching", "--enable-chunked-prefill", "-O3", "-1"]
    others += [
        "--config-format",
        "hf",
        "--no-enable-sleep-mode",
        "--worker-cls",
        "auto",
        "--model-impl",
        "x",
        "-",
        "--",
    ]
    others += ["--kv-cache-dtype", "auto", "--tokenizer=x", "-q", "fp8", "--hf-config-path", "p", "id = 3", "-dp", "2"]

    assert _faults(*others) == []
