"""A run is read as it was made, whatever it holds and wherever it lies."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from streamtap.errors import HarvestDamaged, InvalidLayers
from streamtap.harvest.plan import Segments, Tokenised
from streamtap.harvested.reader import HarvestedRun
from streamtap.spec import Projection

Make = Callable[..., Any]

KINDS: dict[str, dict[str, Any]] = {
    "all rows": {},
    "float32": {"dtype": "float32"},
    "packed": {"compression": "zstd"},
    "one layer": {"layers": [2]},
    "one prompt a file": {"shard_size": 1},
    "one file": {"shard_size": 100},
    "last position": {"positions": "last"},
    "some positions": {"positions": [-1]},
    "a range, packed": {"positions": "-2:", "compression": "zstd", "dtype": "float32"},
    "last token": {"pooling": "last_token"},
    "first token": {"pooling": "first_token"},
    "mean": {"pooling": "mean", "dtype": "float32"},
    "maximum": {"pooling": "max"},
    "mean of some": {"pooling": "mean", "positions": "-3:"},
    "projected": {"projection": Projection.onto(np.random.default_rng(0).standard_normal((3, 5)))},
}


@pytest.fixture(scope="module", params=KINDS, ids=str)
def made(request: pytest.FixtureRequest, make_run: Make) -> Any:
    return make_run(**KINDS[request.param])


@pytest.fixture(params=["near", "far"])
def run(request: pytest.FixtureRequest, made: Any, counted: Make) -> HarvestedRun:
    return HarvestedRun.open(made.folder if request.param == "near" else counted(made.folder))


def same(found: Any, expected: Any) -> bool:
    return bool(found.dtype == expected.dtype and found.shape == expected.shape and np.array_equal(found, expected))


def alike(found: Any, expected: Any, ask: Any) -> bool:
    """Products of a batch are rounded in another order than those of one prompt."""
    if ask.projection is None:
        return same(found, expected)
    return bool(found.dtype == np.float32 and np.allclose(found, expected, rtol=1e-5, atol=1e-6))


def test_each_prompt_is_as_it_was_made(made: Any, run: HarvestedRun) -> None:
    assert len(run) == len(made.prompts)
    assert run.layers == tuple(made.ask.layers)
    for i, prompt in enumerate(made.prompts):
        rows = run.prompt(i)
        assert list(rows) == list(made.ask.layers)
        for layer in made.ask.layers:
            expected = made.rows(i, layer)
            assert alike(rows[layer], expected, made.ask)
            assert same(run.prompt(i, [layer])[layer], rows[layer])
        assert same(run.token_ids(i), prompt.token_ids)
        assert same(run.positions(i), made.positions(i))
        assert run.segments(i) is None


@pytest.mark.parametrize(
    "indices", [None, [10, 0, 3, 3], [-1, 2], [], np.arange(11) % 2 == 1], ids=["all", "some", "end", "none", "mask"]
)
def test_many_prompts_at_once(made: Any, run: HarvestedRun, indices: Any) -> None:
    found = run.activations(indices)
    wanted = np.arange(11)[slice(None) if indices is None else np.asarray(indices) if len(indices) else slice(0)]

    assert found.index.tolist() == wanted.tolist()
    assert found.provenance == made.engine.provenance
    assert found.pooling == made.ask.pooling
    assert found.layers == tuple(made.ask.layers)
    for place, i in enumerate(wanted.tolist()):
        span = slice(found.offsets[place], found.offsets[place + 1])
        positions = made.positions(i)
        assert same(found.positions[span], positions)
        ids = made.prompts[i].token_ids
        assert found.token_ids[span].tolist() == [ids[at] if at >= 0 else -1 for at in positions]
        for layer in made.ask.layers:
            assert alike(found.prompt(place)[layer], made.rows(i, layer), made.ask)


def test_statistics_and_verify(made: Any, run: HarvestedRun) -> None:
    found = run.statistics()
    # All rows but those that stand on a BOS.
    kept = np.concatenate([made.prompts[i].token_ids[made.positions(i)] != 0 for i in range(11)])
    if made.ask.pooling in ("mean", "max"):
        kept[:] = True
    expected = [np.concatenate([made.rows(i, layer) for i in range(11)])[kept] for layer in made.ask.layers]

    assert found["layer_indices"].tolist() == list(made.ask.layers)
    wide = np.stack(expected).astype(np.float64)
    np.testing.assert_allclose(found["mean"], wide.mean(axis=1), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(found["std"], wide.std(axis=1), rtol=1e-5, atol=1e-7)
    assert found["mean"].dtype == found["std"].dtype == np.float32
    read: list[int] = []
    run.verify(read.append)
    assert sum(read) == sum(shard.bytes for shard in run.manifest.shards)


def test_file_after_file(made: Any, run: HarvestedRun) -> None:
    found = [i for shard in run.shards() for i in shard.indices]

    assert found == list(range(11))
    for shard in run.shards():
        assert len(shard) == len(shard.indices)
        for i in shard.indices:
            assert shard.n_rows(i) == len(made.positions(i))
            for layer, rows in shard.prompt(i).items():
                assert alike(rows, made.rows(i, layer), made.ask)
        with pytest.raises(IndexError, match=f"shard {shard.number} does not hold prompt 99"):
            shard.prompt(99)


def test_the_library_reads_the_files(make_run: Make) -> None:
    made = make_run(dtype="float32", positions="last")

    with safe_open(made.folder / "shard_00001.safetensors", framework="np") as opened:
        assert np.array_equal(opened.get_tensor("prompt_5")[1], made.rows(5, 2))
        assert opened.get_tensor("tokens_5").tolist() == made.prompts[5].token_ids.tolist()
        assert opened.get_tensor("positions_5").tolist() == made.positions(5).tolist()


def test_windows_of_documents(make_run: Make, counted: Make) -> None:
    parts = Segments(np.array([7, 1 << 40]), np.array([512, 0]), np.array([0, 3], np.int32))
    prompts = [Tokenised(np.arange(n, dtype=np.int32), segments=parts if n == 5 else None) for n in (3, 5, 2)]
    made = make_run(prompts=prompts, hidden=3, layers=[1])

    for place in (made.folder, counted(made.folder)):
        run = HarvestedRun.open(place)
        found = run.segments(-2)
        assert found is not None
        for name in ("documents", "offsets", "starts"):
            assert same(getattr(found, name), getattr(parts, name))
            assert getattr(found, name).flags.aligned
        assert run.segments(0) is None


def test_no_such_prompt_and_no_such_layer(make_run: Make) -> None:
    run = HarvestedRun.open(make_run().folder)

    for ask in (run.prompt, run.token_ids, run.positions, run.segments):
        for i in (11, -12):
            with pytest.raises(IndexError, match=rf"prompts 0 to 10; there is no prompt {i}"):
                ask(i)
    assert repr(run).endswith("activations of 11 prompts at layers [0, 2, 3])")
    with pytest.raises(IndexError):
        run.activations([3, 11])
    assert list(run.prompt(0, -1)) == [3]
    assert list(run.prompt(0, "all")) == [0, 2, 3]
    with pytest.raises(InvalidLayers, match=r"holds layers 0, 2, 3; it has no layer 1\."):
        run.prompt(0, [0, 1])
    with pytest.raises(InvalidLayers, match="4 blocks"):
        run.activations(layers=[9])


def test_rows_of_a_folder_are_views_that_cannot_be_changed(make_run: Make) -> None:
    rows = HarvestedRun.open(make_run().folder).prompt(3)[2]

    assert not rows.flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        rows[0, 0] = 1
    assert HarvestedRun.open(make_run().folder).activations().acts[2].flags.writeable


def test_several_threads_read_one_run(make_run: Make, counted: Make) -> None:
    made = make_run(n_prompts=60, compression="zstd", shard_size=3)
    run = HarvestedRun.open(counted(made.folder), cache_bytes=2000)

    def read(i: int) -> bool:
        return same(run.prompt(i)[2], made.rows(i, 2)) and same(run.token_ids(i), made.prompts[i].token_ids)

    before = threading.active_count()
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, np.random.default_rng(1).integers(0, 60, 400).tolist()))
    assert threading.active_count() < before + 10


def test_a_run_without_a_manifest_is_not_whole(make_run: Make, tmp_path: Path, counted: Make) -> None:
    made = make_run(folder=tmp_path / "run")
    (made.folder / "manifest.json").unlink()

    for place in (made.folder, str(made.folder), counted(made.folder)):
        with pytest.raises(HarvestDamaged, match="not whole yet.*Go on with the same command"):
            HarvestedRun.open(place)
    with pytest.raises(HarvestDamaged, match="holds no harvest: there is no manifest.json"):
        HarvestedRun.open(tmp_path / "nothing")


def test_a_run_of_another_server_is_read(make_run: Make, tmp_path: Path) -> None:
    made = make_run(folder=tmp_path / "run")
    file = made.folder / "manifest.json"
    said = json.loads(file.read_bytes())
    del said["provenance"]
    for shard in said["shards"]:
        shard["key"] = f"harvest/{said['run_id']}/{shard['key']}"
        del shard["digest"]
    said["news"] = 1
    file.write_text(json.dumps(said))
    run = HarvestedRun.open(made.folder)

    assert same(run.prompt(7)[3], made.rows(7, 3))
    assert (run.provenance.model, run.provenance.commit) == ("fake", "fake-1")
    assert list(run.prompt(7, [3])) == [3]
    run.verify()
