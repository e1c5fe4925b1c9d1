"""A source travels to where its engine runs, and opens there what the harvest was asked for."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from streamtap.engines import vllm_offline
from streamtap.engines.vllm_offline import VllmEngine
from streamtap.errors import InvalidInput
from streamtap.harvest.asked import HarvestAsk
from streamtap.harvest.engine_source import ModelSource
from streamtap.harvest.node_engine import NodeEngine
from streamtap.harvest.plan import Tokenised, plan_shards
from streamtap.harvest.standing import RunStanding, nobody
from streamtap.harvested.folder_place import FolderPlace
from streamtap.testing.stub_vllm import StubVllm, installed, stub_described

ASK = HarvestAsk(layers=[1, 2], shard_size=4, dtype="float32")
SOURCE = ModelSource("/a/model", {"backend": "vllm", "tensor_parallel_size": 2})
FORMULA = StubVllm.formula


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[StubVllm]]:
    monkeypatch.setattr(vllm_offline, "described_model", lambda *_args, **_named: stub_described())
    every: list[StubVllm] = []

    def opening(**options: Any) -> StubVllm:
        every.append(StubVllm(**options))
        return every[-1]

    with installed(opening):
        yield every


def test_a_copy_of_a_source_opens_the_backend_that_it_names(opened: list[StubVllm]) -> None:
    engine = copy.deepcopy(SOURCE).open()

    assert isinstance(engine, VllmEngine)
    assert opened[0].options["tensor_parallel_size"] == 2
    engine.close()


def test_a_backend_that_there_is_not_is_refused() -> None:
    with pytest.raises(InvalidInput, match="backend must be one of"):
        ModelSource("/a/model", {"backend": "vlm"}).open()


def test_an_engine_of_a_cluster_makes_shards_on_vllm(opened: list[StubVllm], tmp_path: Path) -> None:
    place = FolderPlace(tmp_path / "run")
    node = NodeEngine(SOURCE, place.url, ASK, str(tmp_path / "spool"))
    about = node.load()
    RunStanding(place, ASK, about, "run-1", nobody)
    node.join("run-1")
    prompts = [np.arange(4, 6 + i, dtype=np.int32) for i in range(4)]
    (plan,) = plan_shards([Tokenised(ids) for ids in prompts], ASK.shard_size)

    node.shard(plan)
    node.close()

    tensors = load_file(place.folder / "shard_00000.safetensors")
    for i, ids in enumerate(prompts):
        np.testing.assert_array_equal(tensors[f"prompt_{i}"], np.stack([FORMULA.rows(ids, layer) for layer in (1, 2)]))
    assert about.engine == "vllm"
    assert opened[0].closed == 1
