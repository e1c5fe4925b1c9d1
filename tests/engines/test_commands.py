"""Command lines of engine processes, and the variables that they get."""

from __future__ import annotations

import pytest

from streamtap.engines.commands import VllmOptions, engine_environment, prefills_whole, vllm_command


def _flags(**options: object) -> list[str]:
    command = vllm_command("/m", name="org/m", port=80, options=VllmOptions(**options))  # type: ignore[arg-type]
    assert command[:9] == ["vllm", "serve", "/m", "--served-model-name", "org/m", "--host", "127.0.0.1", "--port", "80"]
    return command[9:]


def test_an_engine_that_captures_keeps_no_prefix_and_cuts_no_prompt() -> None:
    plain = ["--dtype", "auto", "--max-logprobs=-1"]

    assert _flags(captures=False) == plain
    assert _flags() == [*plain, "--no-enable-prefix-caching", "--no-enable-chunked-prefill"]


def test_one_model_over_many_devices() -> None:
    flags = _flags(tensor_parallel_size=8, pipeline_parallel_size=2, distributed_executor="ray")

    assert " ".join(flags).startswith(
        "--dtype auto --tensor-parallel-size 8 --pipeline-parallel-size 2 --distributed-executor-backend ray "
    )


def test_one_that_parks_may_be_put_to_sleep() -> None:
    assert "--enable-sleep-mode" in _flags(parks=True)
    assert "--enable-sleep-mode" not in _flags()
    assert engine_environment("k", captures=True, parks=True)["VLLM_SERVER_DEV_MODE"] == "1"
    assert "VLLM_SERVER_DEV_MODE" not in engine_environment("k", captures=True)


def test_the_key_is_in_the_environment_and_in_no_argument() -> None:
    assert engine_environment("secret", captures=True) == {"STREAMTAP_WORKER_KEY": "secret", "VLLM_API_KEY": "secret"}
    assert engine_environment("secret", captures=False)["VLLM_LENS_DISABLE"] == "1"
    assert not any("key" in flag for flag in _flags(parks=True))


@pytest.mark.parametrize(
    ("arguments", "whole"),
    [
        ((), True),
        (("--max-num-batched-tokens", "8192"), True),
        (("--enable-chunked-prefill",), False),
        (("--enable_chunked_prefill=True",), False),
        (("--no-enable-chunked-prefill",), True),
        (("--enable-ch",), False),
        (("--long-prefill-token-threshold", "64"), False),
        (("--long_prefill=64",), False),
        (("--prefill-context-parallel-size=2",), False),
        (("-pcp", "2"), False),
        (("--scheduler-cls", "my.Scheduler"), False),
        (("--scheduling-policy", "priority", "--max-num-seqs", "8"), True),
    ],
)
def test_whether_a_prompt_runs_in_one_piece(arguments: tuple[str, ...], whole: bool) -> None:
    assert prefills_whole(arguments) is whole
