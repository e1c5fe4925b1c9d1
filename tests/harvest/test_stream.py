"""Rows of a harvest as batches for training, shuffled (case V26)."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
import sys
import threading
import tracemalloc
from collections import Counter
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from streamtap.activations import to_torch
from streamtap.errors import HarvestMismatch, InvalidInput, InvalidLayers
from streamtap.harvest import stream_reading
from streamtap.harvest.stream import ActivationStream
from streamtap.harvested.joined import JoinedRuns
from streamtap.harvested.reader import HarvestedRun
from streamtap.spec import Projection
from streamtap.testing.characters import SPECIAL_IDS
from streamtap.testing.fake_engine import FakeEngine

SMALL: dict[str, Any] = {"batch_rows": 16, "shuffle_rows": 128}


def rows_of(batches: Iterable[torch.Tensor]) -> list[bytes]:
    return [row.numpy().tobytes() for batch in batches for row in batch]


def expected(run: HarvestedRun | JoinedRuns, layer: int) -> Counter[bytes]:
    return Counter(row.tobytes() for row in run.activations(layers=layer).acts[layer])


def values(batches: list[Any]) -> list[list[float]]:
    return [batch.flatten().tolist() for batch in batches]


@pytest.mark.parametrize("compression", ["none", "zstd"])
@pytest.mark.parametrize("pooling", ["none", "mean"])
def test_a_pass_gives_every_row_once(runs: Any, compression: str, pooling: str) -> None:
    run = runs(compression=compression, pooling=pooling)
    stream = ActivationStream(run, layers=[3], **SMALL)
    batches = list(stream)

    assert isinstance(stream, IterableDataset)
    assert (stream.layers, stream.width) == ((3,), 8)
    assert all(batch.shape == (16, 8) and batch.dtype == torch.float32 for batch in batches[:-1])
    assert Counter(rows_of(batches)) == expected(run, 3)
    assert stream.n_rows == sum(len(batch) for batch in batches)


def test_rows_of_several_layers_stay_together(runs: Any) -> None:
    run = runs()
    pairs = {
        low.tobytes(): high.tobytes()
        for low, high in zip(*(run.activations(layers=layer).acts[layer] for layer in (1, 3)), strict=True)
    }
    batches = list(ActivationStream(run, **SMALL))

    assert [sorted(batch) for batch in batches] == [[1, 3]] * len(batches)
    told = dict(zip(*(rows_of(batch[layer] for batch in batches) for layer in (1, 3)), strict=True))
    assert told == pairs


def test_bfloat16_rows_and_products_come_as_they_lie(runs: Any) -> None:
    run = runs(dtype="bfloat16")
    batch = torch.cat(list(ActivationStream(run, layers=1, **SMALL)))
    mine = to_torch(run.activations(layers=1).acts[1])
    assert batch.dtype == torch.bfloat16
    assert torch.equal(batch.float().sort(0).values, mine.float().sort(0).values)

    products = runs(projection=Projection.onto(np.eye(3, 8)), layers=[1])
    assert next(iter(ActivationStream(products, **SMALL))).shape == (16, 3)


def test_the_order_is_another_in_each_epoch_and_the_same_again(runs: Any) -> None:
    stream = ActivationStream(runs(), layers=[1], **SMALL)
    first, again = values(list(stream)), values(list(stream))
    stream.set_epoch(1)
    other = values(list(stream))
    stream.set_epoch(0)

    assert first == again == values(list(stream))
    assert first != other
    assert sorted(chain.from_iterable(first)) == sorted(chain.from_iterable(other))
    assert values(list(ActivationStream(runs(), layers=[1], seed=1, **SMALL))) != first


def test_prompts_are_mixed(runs: Any) -> None:
    """A batch of 16 rows of prompts of 3 to 19: read in order it would be of two or three."""
    run = runs(add_special_tokens=False)
    owner = {row.tobytes(): i for i in range(len(run)) for row in run.prompt(i, 1)[1]}
    stream = ActivationStream(run, layers=[1], batch_rows=16, shuffle_rows=512)
    batches = [[owner[row.numpy().tobytes()] for row in batch] for batch in stream]

    assert min(len(set(owners)) for owners in batches[:-1]) >= 10
    # And the blocks are no stretches of the corpus.
    assert max(abs(np.mean(owners) - 45) for owners in batches[:-1]) < 25


def test_one_shard_of_one_row_ends(harvest: Any, tmp_path: Path) -> None:
    """SAELens #277: a single buffer looped for ever, drawing two different numbers out of one."""
    run = harvest(tmp_path, ["a"], add_special_tokens=False)
    assert [batch.shape for batch in ActivationStream(run, layers=[1])] == [(1, 8)]


def test_the_bytes_on_disk_stay_as_they_were_published(runs: Any) -> None:
    run = runs()
    list(ActivationStream(run, **SMALL))
    run.verify()


@pytest.mark.parametrize("taken", [0, 1, 8, 13, 30])
def test_it_goes_on_where_it_was(runs: Any, taken: int) -> None:
    stream = ActivationStream(runs(), layers=[1], seed=3, **SMALL)
    stream.set_epoch(5)
    every = values(list(stream))
    stream.set_epoch(6)
    stream.set_epoch(5)
    iterator = iter(stream)
    for _ in range(taken):
        next(iterator)
    state = json.loads(json.dumps(stream.state_dict()))
    iterator.close()

    again = ActivationStream(runs(), layers=[1], seed=3, **SMALL)
    again.load_state_dict(state)
    assert again.state_dict() == state
    again.set_epoch(5)
    assert values(list(again)) == every[taken:]
    assert values(list(again)) == every


def test_the_end_of_a_pass_is_a_state_too(runs: Any) -> None:
    stream = ActivationStream(runs(), layers=[1], **SMALL)
    n_batches = len(list(stream))
    state = stream.state_dict()
    stream.load_state_dict(state)
    assert state["batches"] == n_batches
    assert list(stream) == []
    stream.load_state_dict(state)
    stream.set_epoch(1)
    assert len(list(stream)) == n_batches


@pytest.mark.parametrize("change", [{"seed": 2}, {"batch_rows": 8}, {"layers": [3]}, {"drop_special": True}])
def test_a_state_of_another_order_is_refused(runs: Any, change: dict[str, Any]) -> None:
    state = ActivationStream(runs(), **{"layers": [1], **SMALL}).state_dict()
    other = ActivationStream(runs(), **{"layers": [1], **SMALL, **change})
    with pytest.raises(HarvestMismatch, match=next(iter(change))):
        other.load_state_dict(state)
    with pytest.raises(HarvestMismatch, match="runs"):
        ActivationStream(runs(pooling="mean"), layers=[1], **SMALL).load_state_dict(state)


def test_normalised_rows_have_mean_zero_and_spread_one(runs: Any) -> None:
    run = runs(dtype="bfloat16", add_special_tokens=False)
    rows = torch.cat(list(ActivationStream(run, layers=[3], normalise=True, **SMALL))).double()

    assert rows.mean(0).abs().max() < 1e-3
    assert (rows.std(0, correction=0) - 1).abs().max() < 1e-3
    found = run.statistics()
    plain = next(iter(ActivationStream(run, layers=[3], **SMALL)))
    told = next(iter(ActivationStream(run, layers=[3], normalise=True, **SMALL)))
    assert told.dtype == torch.float32
    assert np.allclose(told, (plain.float().numpy() - found["mean"][1]) / found["std"][1], atol=1e-6)


def test_a_value_that_never_differs_is_normalised_to_zero(harvest: Any, tmp_path: Path) -> None:
    run = harvest(tmp_path, ["same"] * 9, pooling="last_token")
    rows = torch.cat(list(ActivationStream(run, layers=[1], normalise=True)))
    assert torch.isfinite(rows).all()
    assert rows.abs().max() < 1e-3


@pytest.mark.parametrize("asked", [{}, {"compression": "zstd"}, {"positions": ":3"}, {"pooling": "first_token"}])
def test_special_tokens_are_left_out(runs: Any, asked: dict[str, Any]) -> None:
    run = runs(**asked)
    acts = run.activations(layers=1)
    kept = acts.acts[1][~np.isin(acts.token_ids, SPECIAL_IDS)]
    if asked.get("pooling"):  # every row stands on BOS
        with pytest.raises(InvalidInput, match="special token"):
            ActivationStream(run, drop_special=True)
        return
    stream = ActivationStream(run, layers=[1], drop_special=True, **SMALL)
    batches = list(stream)

    assert 0 < len(kept) < len(acts.token_ids)
    assert stream.n_rows == len(kept)
    assert all(len(batch) == 16 for batch in batches[:-1])
    assert Counter(rows_of(batches)) == Counter(row.tobytes() for row in kept)


def test_a_mean_stands_on_no_special_token(runs: Any) -> None:
    run = runs(pooling="mean")
    assert ActivationStream(run, drop_special=True).n_rows == 90


def test_a_run_that_does_not_name_its_special_tokens_is_refused(runs: Any, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(runs().place.url, tmp_path / "run"))
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["tokenizer_limits"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(InvalidInput, match="special"):
        ActivationStream(folder, drop_special=True)
    assert len(list(ActivationStream(folder))) > 0


@pytest.mark.parametrize(
    ("named", "kind"),
    [
        ({"batch_rows": 0}, InvalidInput),
        ({"shuffle_rows": 2.5}, InvalidInput),
        ({"seed": -1}, InvalidInput),
        ({"layers": [2]}, InvalidLayers),
    ],
)
def test_what_cannot_be_is_refused(runs: Any, named: dict[str, Any], kind: type[Exception]) -> None:
    with pytest.raises(kind, match="|".join([*named, "layer"])):
        ActivationStream(runs(), **named)
    stream = ActivationStream(runs())
    with pytest.raises(InvalidInput, match="epoch"):
        stream.set_epoch(-1)


def test_threads_end_with_the_iteration(runs: Any) -> None:
    iterator = iter(ActivationStream(runs(), layers=[1], **SMALL))
    next(iterator)
    iterator.close()
    assert not [each.name for each in threading.enumerate() if each.name.startswith("streamtap-stream")]


def test_a_stream_may_be_copied(runs: Any) -> None:
    stream = ActivationStream(runs(), layers=[1], **SMALL)
    assert values(list(copy.deepcopy(stream))) == values(list(stream))


class _Halves(ActivationStream):
    """Somebody's own stream."""

    def __iter__(self) -> Any:
        return (batch.half() for batch in super().__iter__())


def test_a_class_of_ones_own_is_a_stream_too(runs: Any) -> None:
    stream = _Halves(runs(), layers=[1], **SMALL)
    batches = list(DataLoader(stream, batch_size=None))

    assert isinstance(stream, IterableDataset)
    assert batches[0].dtype == torch.float16
    assert type(copy.deepcopy(stream)) is type(stream)


def test_the_module_does_not_load_torch() -> None:
    code = "import sys, streamtap.harvest.stream; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_torch_it_says_what_to_install(runs: Any) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from streamtap.harvest.stream import ActivationStream\n"
        "from streamtap.errors import MissingExtra\n"
        f"try: ActivationStream({runs().place.url!r})\n"
        "except MissingExtra as error: assert 'streamtap[local]' in str(error)\n"
        "else: sys.exit(1)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_memory_does_not_grow_with_the_run(harvest: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The buffer, what is read ahead and a few batches are held, whatever lies in the files."""
    monkeypatch.setattr(stream_reading, "_AHEAD_BYTES", 1 << 18)
    engine = FakeEngine(n_layers=2, hidden=256)
    peaks = []
    for count in (60, 240):
        run = harvest(tmp_path / str(count), [f"{i:03}" * 20 for i in range(count)], engine, layers=[1], shard_size=20)
        stream = ActivationStream(run, batch_rows=64, shuffle_rows=512)
        tracemalloc.start()
        assert sum(len(batch) for batch in stream) == stream.n_rows == count * 61
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()

    buffer, row_bytes = 512 * 1024, 1024
    assert peaks[0] < 240 * 61 * row_bytes / 3
    assert peaks[1] < peaks[0] + buffer / 2
