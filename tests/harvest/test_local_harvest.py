"""``harvest_prompts``: any iterable of prompts to a reader of their rows, in one call."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from streamtap.errors import HarvestFailed, InvalidInput, InvalidPrompt
from streamtap.harvest.cutting import Cutting
from streamtap.harvest.local import harvest_prompts, spool_of
from streamtap.harvest.plan import Tokenised
from streamtap.harvest.reading_ahead import read_ahead
from streamtap.harvest.rows_done import RowsDone, RunProgress
from streamtap.harvest.standing import Progress
from streamtap.harvest.windows import Document, windows
from streamtap.harvested.folder_place import FolderPlace
from streamtap.harvested.opening import open_place
from streamtap.testing.characters import BOS
from streamtap.testing.fake_engine import FakeEngine

PROMPTS = [f"prompt {i} {'x' * (i * 7 % 23)}" for i in range(40)]


def test_prompt_i_has_its_rows(tmp_path: Path) -> None:
    engine = FakeEngine()
    run = harvest_prompts(iter(PROMPTS), engine=engine, out=tmp_path / "run", layers=[0, 3], run_id="mine")

    assert (len(run), run.layers, run.manifest.run_id) == (40, (0, 3), "mine")
    for i, text in enumerate(PROMPTS):
        ids = engine.tokenizer.read(text, i)
        assert np.array_equal(run.token_ids(i), ids)
        for layer, rows in run.prompt(i).items():
            assert np.array_equal(rows, engine.rows(ids, layer).astype(ml_dtypes.bfloat16))
    run.verify()
    assert not engine.closed
    assert not (tmp_path / "run" / ".spool").exists()


def test_every_option_reaches_the_run(tmp_path: Path) -> None:
    directions = np.random.default_rng(0).normal(size=(2, 8))
    run = harvest_prompts(
        PROMPTS,
        engine=FakeEngine(),
        out=tmp_path,
        layers="1-2",
        positions="-2:",
        pooling="mean",
        project_onto=directions,
        add_special_tokens=False,
        context=9,
        max_tokens=100,
        shard_size=3,
        batch_size=2,
        compression="zstd",
    )

    manifest = run.manifest
    assert manifest.layer_indices == (1, 2)
    assert manifest.capture == {"positions": "-2:", "pooling": "mean"}
    assert (manifest.contents, manifest.compression, manifest.add_special_tokens) == ("projections", "zstd", False)
    assert manifest.projection is not None
    assert manifest.projection["directions"] == 2
    assert [len(shard.prompt_indices) for shard in manifest.shards] == [3, 3, 3, 2]
    assert run.prompt(5)[2].shape == (1, 2)
    assert BOS not in run.token_ids(0)
    assert {len(run.token_ids(i)) for i in range(11)} == {9}
    assert {each["kept"] for each in manifest.truncated_prompts} == {9}


@pytest.mark.parametrize("pack", [False, True])
def test_windows_of_documents_say_where_they_come_from(tmp_path: Path, pack: bool) -> None:
    documents = [Document(0, "a" * 30), Document(1, None), Document(2, "hello"), Document(3, "b" * 9)]
    engine = FakeEngine()
    run = harvest_prompts(documents, engine=engine, out=tmp_path, context=8, chunk=not pack, pack=pack, shard_size=2)

    expected = list(windows(documents, engine.tokenizer, context=8, pack=pack))
    assert len(run) == len(expected)
    for i, each in enumerate(expected):
        assert np.array_equal(run.token_ids(i), each.token_ids)
        found, segments = run.segments(i), each.segments
        assert found is not None
        assert segments is not None
        for name in ("documents", "offsets", "starts"):
            assert np.array_equal(getattr(found, name), getattr(segments, name))


def test_it_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    engine, calls, seen = FakeEngine(), iter(range(100)), list[RunProgress]()
    with pytest.raises(HarvestFailed):
        harvest_prompts(PROMPTS, engine=engine, out=tmp_path, shard_size=8, should_stop=lambda: next(calls) >= 5)
    run = harvest_prompts(PROMPTS, engine=engine, out=tmp_path, shard_size=8, on_progress=seen.append)

    assert len(engine.runs) <= 48
    assert (len(run), seen[-1].prompts_done, seen[-1].rows_done) == (40, 40, 40)
    assert seen[-1].tokens_found > 0


def test_documents_of_a_run_that_is_told_count_as_rows_of_the_input(tmp_path: Path) -> None:
    seen: list[RunProgress] = []
    documents = [Document(i, "abcdefghij" if i % 2 else None) for i in range(20)]
    harvest_prompts(
        documents, engine=FakeEngine(), out=tmp_path, context=4, chunk=True, shard_size=4, on_progress=seen.append
    )

    assert [each.rows_done for each in seen] == [2, 4, 6, 8, 10, 12, 14, 16, 18, 20]
    assert [each.prompts_done for each in seen] == [4 * (i + 1) for i in range(10)]


def test_rows_that_were_passed_are_not_kept() -> None:
    rows = RowsDone(Tokenised(np.arange(3, dtype=np.int32)) for _ in range(100))
    for i, _ in enumerate(rows):
        rows.progress(Progress(prompts_done=i + 1))
        assert len(rows._passed) == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"context": 65}, "context must be at most the model's, 64 tokens; got 65"),
        ({"context": 0}, "context must be a whole number of tokens, at least 1; got 0"),
        ({"max_tokens": -3}, "max_tokens must be a whole number of tokens, at least 1; got -3"),
        ({"max_tokens": 3}, "the first has 11 tokens, more than max_tokens=3"),
        ({"device": "cpu"}, "device cannot be set for an engine"),
        ({"model": "other"}, "model cannot be set for an engine"),
        ({"cluster": "auto"}, "machines of a cluster load the model themselves"),
        ({"layers": [9]}, "layer 9 is not in the model"),
        ({"project_onto": np.ones((1, 3))}, "directions are 3 wide; rows of fake are 8"),
        ({"shard_size": 0}, "shard_size must be a whole number"),
    ],
)
def test_what_cannot_be_leaves_nothing_behind(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        harvest_prompts(["prompt 0 a", "b"], engine=FakeEngine(), out=tmp_path / "run", **options)

    assert not list(tmp_path.rglob("run.json"))
    assert len(harvest_prompts(["prompt 0 a"], engine=FakeEngine(), out=tmp_path / "run")) == 1


def test_a_model_that_names_no_context_needs_one_for_windows(tmp_path: Path) -> None:
    engine = FakeEngine(context_tokens=None)  # type: ignore[arg-type]

    with pytest.raises(InvalidInput, match="say how long a window is with context"):
        harvest_prompts(PROMPTS, engine=engine, out=tmp_path, chunk=True)
    assert len(harvest_prompts(PROMPTS, engine=engine, out=tmp_path, chunk=True, context=4)) > 40
    assert next(iter(Cutting().tokenised(["a" * 99], engine.tokenizer, add_special_tokens=True))).cut_from == 0


def test_a_bad_prompt_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidPrompt, match="prompt 2"):
        harvest_prompts(["a", "b", ""], engine=FakeEngine(), out=tmp_path)


def test_the_spool_is_beside_the_run_or_for_a_store_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STREAMTAP_CACHE_DIR", str(tmp_path / "cache"))

    assert spool_of(FolderPlace(tmp_path / "run")) == tmp_path / "run" / ".spool"
    one, other = (spool_of(open_place(f"s3://bucket/{name}")) for name in ("a", "b"))
    assert one.parent == other.parent == tmp_path / "cache" / "harvest"
    assert one != other


def test_reading_ahead_gives_the_same_and_no_more_than_it_may() -> None:
    taken: list[int] = []

    def source() -> Iterator[int]:
        for i in range(1000):
            taken.append(i)
            yield i

    with read_ahead(source(), 10) as items:
        first = [next(items) for _ in range(5)]
        time.sleep(0.1)
        assert len(taken) <= 5 + 10 + 2
        assert [*first, *items] == list(range(1000))


def test_an_error_of_the_source_comes_after_what_it_gave(capfd: pytest.CaptureFixture[str]) -> None:
    def source() -> Iterator[int]:
        yield from range(5)
        raise InvalidPrompt("prompt 5 is no prompt", index=5)

    found: list[int] = []
    with read_ahead(source(), 2) as items, pytest.raises(InvalidPrompt, match="prompt 5"):
        found.extend(items)
    assert found == [0, 1, 2, 3, 4]
    assert capfd.readouterr() == ("", "")


def test_leaving_early_ends_the_reader() -> None:
    before = set(threading.enumerate())
    ended: list[bool] = []

    def source() -> Iterator[int]:
        try:
            while True:
                yield 1
        finally:
            ended.append(True)

    with read_ahead(source(), 3) as items:
        next(items)
    for _ in range(50):
        if set(threading.enumerate()) <= before:
            break
        time.sleep(0.05)
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("prompts", ["one text", [{"role": "user", "content": "hi"}]])
def test_one_prompt_is_not_several(tmp_path: Path, prompts: Any) -> None:
    with pytest.raises(InvalidInput, match="prompts must be several; got .* Wrap it"):
        harvest_prompts(prompts, engine=FakeEngine(), out=tmp_path / "run")
    assert len(harvest_prompts([prompts], engine=FakeEngine(), out=tmp_path / "run")) == 1


def test_a_place_that_takes_no_files_is_told_before_a_model_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")

    with pytest.raises(InvalidInput, match="run cannot be written to"):
        harvest_prompts(["a"], model="no/such-model", out=tmp_path / "file" / "run")
