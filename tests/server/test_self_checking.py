from __future__ import annotations

import asyncio
import json
import os
import sys
import textwrap
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamtap.engines.references import find_model
from streamtap.engines.self_check_reference import Reference, keep_reference, reference_ids
from streamtap.engines.tokenizing import PromptTokenizer
from streamtap.errors import EngineFailed
from streamtap.server.config import ModelConfig, ServerConfig, Timing
from streamtap.server.pool.pool import Pool
from streamtap.server.pool.self_checking import LABEL, STAGE
from streamtap.settings import Settings
from streamtap.testing.fake_engine import FakeEngine

QUICK = Timing(restart_backoff_seconds=0.05, stop_seconds=5)

#: Rows of the fake engine process as a faulty engine would give them; ``plain`` are the right ones.
FAULTS = {
    "right": "plain(self, ids, layer)",
    "shifted": "plain(self, ids, layer + 1)",
    "zeros": "plain(self, ids, layer) * (layer != 2)",
    "nan": "plain(self, ids, layer) * (np.nan if layer == 2 else 1)",
    "noise": "plain(self, ids, layer + 10)",
    "wide": "np.concatenate([plain(self, ids, layer)] * 2, axis=1)",
}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelConfig:
    """The fake engine's model by its config, with its reference kept; no torch is needed to compare with that."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    about = {"model_type": "llama", "num_hidden_layers": 4, "hidden_size": 8, "vocab_size": 97}
    (folder / "config.json").write_text(json.dumps(about))
    monkeypatch.setenv("STREAMTAP_CACHE_DIR", str(tmp_path / "cache"))
    ids = reference_ids(PromptTokenizer(None, vocabulary=97))
    right = FakeEngine(n_layers=4, hidden=8, dtype="bfloat16")
    rows = np.stack([right.rows(ids, layer).astype(np.float32) for layer in range(4)])
    settings = Settings.from_environment()
    commit = find_model(str(folder), settings=settings).commit or ""
    keep_reference(Reference(rows, ids, "fake", commit, "by hand"), str(folder), settings=settings)
    return ModelConfig(id="m", checkpoint=str(folder), name="org/model", self_check=True)


def _with_fault(model: ModelConfig, folder: Path, fault: str) -> ModelConfig:
    script = folder / f"{fault}.py"
    script.write_text(
        textwrap.dedent(f"""
            import numpy as np
            from streamtap.testing import fake_engine, fake_worker

            plain = fake_engine.FakeEngine.rows

            def rows(self, ids, layer, *, exact=False):
                return ({FAULTS[fault]}).astype(plain(self, ids, layer).dtype)

            fake_engine.FakeEngine.rows = rows
            fake_worker.end_process(fake_worker.main())
        """)
    )
    return replace(model, command=(sys.executable, str(script), "--port={port}", "--served-model-name={name}"))


def _play(
    folder: Path, model: ModelConfig, part: Callable[[Pool], Awaitable[None]], timing: Timing = QUICK, **config: Any
) -> None:
    async def main() -> None:
        pool = Pool(ServerConfig(models=(model,), data_dir=folder, timing=timing, **config))
        try:
            await part(pool)
        finally:
            await pool.close()

    asyncio.run(asyncio.wait_for(main(), 120))


async def _lease(pool: Pool, role: Any = "activations") -> str:
    """Use an engine; the address that it had."""
    async with pool.lease("m", role) as endpoint:
        return endpoint.base_url


async def _leased(pool: Pool, role: Any = "activations") -> list[tuple[str, str]]:
    """Use an engine; the stages that clients saw on the way, with their labels."""
    user = asyncio.ensure_future(_lease(pool, role))
    seen = []
    while not user.done():
        view = pool.boot("m", role)
        if (stage := (view["stage"], view["stage_label"])) not in seen:
            seen.append(stage)
        await asyncio.sleep(0.01)
    await user
    return seen


def _log(folder: Path) -> str:
    return (folder / "logs" / "m-self-check.log").read_text()


def _processes_of(folder: Path) -> list[int]:
    """Processes that name the test's folder on their command lines."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = file.read_bytes()
        except OSError:
            continue
        if os.fsencode(folder) in words and int(file.parts[2]) != os.getpid():
            found.append(int(file.parts[2]))
    return found


def test_a_right_engine_starts_after_it_was_compared(tmp_path: Path, model: ModelConfig) -> None:
    async def part(pool: Pool) -> None:
        seen = await _leased(pool)
        assert (STAGE, LABEL) in seen
        assert seen.index((STAGE, LABEL)) > seen.index(("starting", "Starting the engine's process"))
        assert pool.is_ready("m", "activations")

    _play(tmp_path, _with_fault(model, tmp_path, "right"), part)
    log = _log(tmp_path)
    assert "==== " in log
    assert "self-check of m, start 1" in log
    assert log.rstrip().endswith("passed")
    assert "engine     org/model, bfloat16" in log


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("shifted", "layer 0 of org/model is layer 1's output: it is shifted by one; so it is with 3 of 4 layers."),
        ("zeros", "org/model gives no whole capture: block 2 put out only zeros for prompt 0, which no working device"),
        ("noise", "layer 0 of org/model is not the model's: cosine "),
        ("nan", "org/model gives no whole capture: "),
        ("wide", "org/model gives no whole capture: "),
    ],
    ids=lambda value: value if " " not in value else "",
)
def test_a_faulty_engine_is_refused_by_name_and_stopped(
    tmp_path: Path, model: ModelConfig, fault: str, said: str
) -> None:
    async def part(pool: Pool) -> None:
        user = asyncio.ensure_future(_leased(pool))
        with pytest.raises(EngineFailed) as caught:
            await user
        start = "the engine of 'm' for activations was stopped, for its rows are not the model's: "
        assert str(caught.value).startswith(start + said)
        assert str(tmp_path) not in str(caught.value)
        assert pool.states()[-1]["state"] == "failed"
        assert not pool.is_ready("m", "activations")
        assert _processes_of(tmp_path) == []

    _play(tmp_path, _with_fault(model, tmp_path, fault), part)
    assert _log(tmp_path).splitlines()[-1].startswith("refused: ")


def test_the_stage_is_seen_before_the_refusal(tmp_path: Path, model: ModelConfig) -> None:
    async def part(pool: Pool) -> None:
        user = asyncio.ensure_future(_lease(pool))
        seen = set()
        while not user.done():
            seen.add(pool.boot("m", "activations")["stage_label"])
            await asyncio.sleep(0.01)
        with pytest.raises(EngineFailed):
            await user
        assert "Comparing with the reference" in seen

    _play(tmp_path, _with_fault(model, tmp_path, "shifted"), part)


def test_only_an_engine_for_activations_is_compared_and_only_where_it_is_asked(
    tmp_path: Path, model: ModelConfig
) -> None:
    faulty = _with_fault(model, tmp_path, "shifted")

    async def completions(pool: Pool) -> None:
        assert (STAGE, LABEL) not in await _leased(pool, "completions")

    async def shared(pool: Pool) -> None:
        with pytest.raises(EngineFailed, match="is shifted by one"):
            await _lease(pool, "completions")

    async def unasked(pool: Pool) -> None:
        assert (STAGE, LABEL) not in await _leased(pool)

    _play(tmp_path / "a", faulty, completions)
    _play(tmp_path / "b", faulty, shared, engines="shared")
    _play(tmp_path / "c", replace(faulty, self_check=False), unasked)


def test_an_engine_elsewhere_is_compared_with_its_key(tmp_path: Path, model: ModelConfig) -> None:
    async def part(pool: Pool, said: str | None) -> None:
        async with pool.lease("m", "completions") as engine:
            key = tmp_path / "key"
            key.write_text(engine.headers["Authorization"].removeprefix("Bearer "))
            far = replace(model, engine="url", url=engine.base_url, api_key_file=key)
            other = Pool(ServerConfig(models=(far,), data_dir=tmp_path / "other", timing=QUICK))
            try:
                if said is None:
                    assert (STAGE, LABEL) in await _leased(other)
                else:
                    with pytest.raises(EngineFailed, match=said):
                        await _lease(other)
            finally:
                await other.close()
            assert engine.base_url == (await _lease(pool, "completions"))
            assert key.read_text() not in _log(tmp_path / "other")

    _play(tmp_path, _with_fault(model, tmp_path, "right"), lambda pool: part(pool, None))
    _play(tmp_path, _with_fault(model, tmp_path, "shifted"), lambda pool: part(pool, "is shifted by one"))


def test_a_check_that_cannot_be_made_is_no_verdict_and_tells_no_path(tmp_path: Path, model: ModelConfig) -> None:
    (Path(model.checkpoint) / "config.json").unlink()

    async def part(pool: Pool) -> None:
        with pytest.raises(EngineFailed) as caught:
            await _lease(pool)
        assert str(caught.value) == (
            "the engine of 'm' for activations could not be compared with the float32 reference; "
            "m-self-check.log says why."
        )

    _play(tmp_path, _with_fault(model, tmp_path, "right"), part)
    assert "has no config.json" in _log(tmp_path)


def _slow_to_compare(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """A check that takes for ever, in a process whose command line names ``folder``."""
    from streamtap.server.pool import self_checking

    code = "import time; time.sleep(600)"
    monkeypatch.setattr(self_checking, "_command", lambda *_: [sys.executable, "-c", code, str(folder)])


def test_a_check_that_takes_too_long_is_ended(
    tmp_path: Path, model: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    _slow_to_compare(monkeypatch, tmp_path)

    async def part(pool: Pool) -> None:
        with pytest.raises(
            EngineFailed, match='was not ready in time: it still stands at "Comparing with the reference"'
        ):
            await _lease(pool)
        assert _processes_of(tmp_path) == []

    _play(tmp_path, _with_fault(model, tmp_path, "right"), part, replace(QUICK, start_seconds=4))


def test_closing_in_the_middle_of_a_check_leaves_nothing(
    tmp_path: Path, model: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    _slow_to_compare(monkeypatch, tmp_path)

    async def part(pool: Pool) -> None:
        user = asyncio.ensure_future(_lease(pool))
        while pool.boot("m", "activations")["stage"] != STAGE or len(_processes_of(tmp_path)) < 4:
            assert not user.done()
            await asyncio.sleep(0.02)
        checks = [pid for pid in _processes_of(tmp_path) if b"time.sleep" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        # Requests of other engines go first.
        assert {os.getpriority(os.PRIO_PROCESS, pid) for pid in checks} == {10}
        began = time.monotonic()
        await pool.close()
        await asyncio.wait([user])
        assert time.monotonic() - began < 10
        assert user.exception() is not None
        assert _processes_of(tmp_path) == []

    _play(tmp_path, _with_fault(model, tmp_path, "right"), part)


def test_a_real_worker_is_compared_with_the_real_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from streamtap.testing.models import tiny_model
    from streamtap.testing.tokenizers import tiny_tokenizer

    monkeypatch.setenv("STREAMTAP_CACHE_DIR", str(tmp_path / "cache"))
    folder = tmp_path / "tiny"
    tiny_model("llama", std=0.1).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    model = ModelConfig(id="m", checkpoint=str(folder), dtype="bfloat16", device="cpu", self_check=True)

    async def part(pool: Pool) -> None:
        assert (STAGE, LABEL) in await _leased(pool)

    _play(tmp_path, model, part)
    _play(tmp_path, model, part)
    log = _log(tmp_path)
    assert log.count("passed") == 2
    assert log.count("in float32 on the CPU once") == 1
