from __future__ import annotations

import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest

from streamtap.engines.worker import __main__ as command
from streamtap.engines.worker.model import ModelOptions
from streamtap.engines.worker.serving import ServingOptions
from streamtap.engines.worker.stages import Load
from streamtap.testing.fake_completer import FakeCompleter


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What ``serve`` was called with, in place of serving."""
    calls: list[Any] = []

    def serve(load: Load, options: ServingOptions) -> int:
        calls.extend([load, options])
        return 0

    monkeypatch.setattr(command, "serve", serve)
    return calls


def test_the_least_that_it_needs(started: list[Any]) -> None:
    assert command.main(["--model", "org/model", "--port", "1"]) == 0

    load, options = started
    assert load.__self__ == ModelOptions("org/model")
    assert options == ServingOptions(name="org/model", port=1)


def test_everything_that_it_takes(started: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMTAP_WORKER_KEY", "key-1")
    line = (
        "--model org/model --served-model-name name --host 127.0.0.2 --port 2 --revision r --dtype float32 "
        "--device cpu --max-model-len 64 --max-batch-tokens 128 --grace-seconds 1.5"
    )
    command.main(line.split())

    load, options = started
    assert load.__self__ == ModelOptions("org/model", "r", "float32", "cpu", 64, 128)
    assert options == ServingOptions(name="name", host="127.0.0.2", port=2, key="key-1", grace_seconds=1.5)
    assert "key-1" not in repr(options)


def test_loading_goes_stage_by_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, stages, given = FakeCompleter(), list[str](), dict[str, Any]()

    class Engine:
        @staticmethod
        def load(model: str, **options: Any) -> FakeCompleter:
            assert stages == ["loading_weights"]
            given.update(model=model, **options)
            return engine

    stub = ModuleType("streamtap.engines.transformers")
    stub.TransformersEngine = Engine  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, stub.__name__, stub)
    found = ModelOptions("demo", dtype="float32", max_model_len=64, max_batch_tokens=128).load(stages.append)

    assert found is engine
    assert stages == ["loading_weights", "warming_up"]
    assert given == {"model": "demo", "revision": None, "dtype": "float32", "device": "auto", "max_batch_tokens": 128}
    assert engine.tokenizer.context_length == 64
    assert len(engine.requests) == 1


def test_torch_is_not_imported_before_it_serves() -> None:
    code = "import sys, streamtap.engines.worker.__main__; print({'torch', 'transformers'} & set(sys.modules))"

    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
