"""nnsight is held to what every engine is: in this process, rehearsed, and as jobs of the stand-in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from streamtap.engines.nnsight.engine import NnsightEngine
from streamtap.engines.opening import load_engine
from streamtap.engines.references import ModelReference
from streamtap.testing import EngineSubject, EngineSuite, PlainReference
from streamtap.testing.ndif_server import NdifServer
from streamtap.testing.tokenizers import tiny_tokenizer

Engines = Iterator[EngineSubject]
KEY = "11111111-2222-3333-4444-555555555555"


def subject_of(opened: Callable[[], NnsightEngine], model: Any, **more: Any) -> Engines:
    engine = opened()
    yield EngineSubject(engine, PlainReference(model), another=opened, **more)
    engine.close()


class TestHere(EngineSuite):
    @pytest.fixture(scope="class")
    @classmethod
    def subject(cls, model: Any) -> Engines:
        yield from subject_of(lambda: NnsightEngine(model, tiny_tokenizer(), name="tiny"), model)


class TestHereFromFiles(EngineSuite):
    @pytest.fixture(scope="class")
    @classmethod
    def subject(cls, model: Any, whole_folder: Path) -> Engines:
        def opened() -> Any:
            return load_engine(str(whole_folder), backend="nnsight", remote=False, device="cpu", batch_size=3)

        yield from subject_of(opened, model)


class TestRehearsed(EngineSuite):
    @pytest.fixture(scope="class")
    @classmethod
    def subject(cls, model: Any, whole_folder: Path) -> Engines:
        yield from subject_of(lambda: NnsightEngine.load(str(whole_folder), remote="local", device="cpu"), model)


class RemoteSuite(EngineSuite):
    dtype = "float32"

    @pytest.fixture(scope="class")
    @classmethod
    def opened(cls, ndif: NdifServer, bare_folder: Path) -> Callable[[], NnsightEngine]:
        known = ModelReference("org/tiny", bare_folder, None, "sha256:of-files")
        options: dict[str, Any] = {"remote": ndif.url, "api_key": KEY, "dtype": cls.dtype}
        return lambda: NnsightEngine.load("org/tiny", reference=known, **options)


class TestAsJobs(RemoteSuite):
    @pytest.fixture(scope="class")
    @classmethod
    def subject(cls, opened: Callable[[], NnsightEngine], model: Any) -> Engines:
        yield from subject_of(opened, model)


class TestAsJobsInBfloat16(RemoteSuite):
    dtype = "auto"

    @pytest.fixture(scope="class")
    @classmethod
    def subject(cls, opened: Callable[[], NnsightEngine], model: Any) -> Engines:
        yield from subject_of(opened, model, tolerance=4e-3)
