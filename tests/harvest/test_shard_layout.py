"""Which tensors a shard's file holds, known before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from streamtap.errors import InvalidInput, InvalidLayers, InvalidPositions
from streamtap.harvest.asked import HarvestAsk
from streamtap.harvest.layout import ShardLayout
from streamtap.harvest.plan import ShardPlan, Tokenised, plan_shards, read_prompts
from streamtap.harvest.run import run_harvest
from streamtap.harvest.windows import windows
from streamtap.harvested.folder_place import FolderPlace
from streamtap.spec import Projection
from streamtap.testing.fake_engine import FakeEngine

BFLOAT16, FLOAT32, INT32, INT64 = map(np.dtype, (ml_dtypes.bfloat16, np.float32, np.int32, np.int64))
TOKENIZER = FakeEngine().tokenizer


def layout_of(ask: HarvestAsk, lengths: list[int] | None = None, first: int = 5) -> ShardLayout:
    prompts = tuple(Tokenised(np.arange(10, 10 + n, dtype=np.int32)) for n in lengths or [3, 6])
    return ShardLayout.of(ShardPlan(0, first, prompts), ask, ask.layer_indices(12), 16, TOKENIZER)


@pytest.mark.parametrize(
    ("asked", "rows"),
    [
        ({}, [(3, None), (6, None)]),
        ({"positions": "last"}, [(1, [2]), (1, [5])]),
        ({"positions": [0, -1]}, [(2, [0, 2]), (2, [0, 5])]),
        ({"positions": "-2:"}, [(2, [1, 2]), (2, [4, 5])]),
        ({"pooling": "last_token"}, [(1, [2]), (1, [5])]),
        ({"pooling": "first_token"}, [(1, [0]), (1, [0])]),
        ({"pooling": "first_token", "positions": "-2:"}, [(1, [1]), (1, [4])]),
        ({"pooling": "mean"}, [(1, None), (1, None)]),
        ({"pooling": "max", "positions": [1]}, [(1, None), (1, None)]),
    ],
)
def test_shapes_follow_positions_and_pooling(asked: dict[str, Any], rows: list[tuple[int, list[int] | None]]) -> None:
    layout = layout_of(HarvestAsk(layers=[2, 7], **asked))

    shapes = layout.shapes()
    numbers = dict(layout.numbers())
    for index, length, (n_rows, positions) in zip((5, 6), (3, 6), rows, strict=True):
        assert shapes[f"prompt_{index}"] == (BFLOAT16, (2, n_rows, 16))
        assert shapes[f"tokens_{index}"] == (INT32, (length,))
        assert (f"positions_{index}" in shapes) == (positions is not None)
        if positions is not None:
            assert numbers[f"positions_{index}"].tolist() == positions
            assert shapes[f"positions_{index}"] == (INT32, (n_rows,))


def test_width_and_dtype_follow_what_is_kept() -> None:
    onto = Projection.onto(np.eye(16)[:3])

    assert layout_of(HarvestAsk(layers=[0], projection=onto)).shapes()["prompt_5"] == (FLOAT32, (1, 3, 3))
    assert layout_of(HarvestAsk(layers=[0], dtype="float32")).shapes()["prompt_5"] == (FLOAT32, (1, 3, 16))
    assert layout_of(HarvestAsk()).layers == (3, 6, 9)
    assert layout_of(HarvestAsk(layers="all")).shapes()["prompt_6"] == (BFLOAT16, (12, 6, 16))


def test_a_position_that_a_prompt_lacks_is_named_by_the_whole_list() -> None:
    with pytest.raises(InvalidPositions, match="prompt 5: position 4 is outside its 3 tokens"):
        layout_of(HarvestAsk(layers=[0], positions=[4]))


@pytest.mark.parametrize(
    ("asked", "error", "said"),
    [
        ({"shard_size": 0}, InvalidInput, "shard_size must be a whole number, 1 to 4096; got 0"),
        ({"shard_size": 4097}, InvalidInput, "1 to 4096; got 4097"),
        ({"shard_size": True}, InvalidInput, "1 to 4096; got True"),
        ({"batch_size": 65}, InvalidInput, "batch_size must be a whole number, 1 to 64; got 65"),
        ({"compression": "gzip"}, InvalidInput, "compression must be 'none' or 'zstd'"),
        ({"dtype": "float16"}, InvalidInput, "dtype must be"),
        ({"positions": "role:user"}, InvalidInput, "the same for every prompt"),
        ({"positions": lambda ids: ids > 0}, InvalidInput, "the same for every prompt"),
        ({"pooling": "median"}, InvalidInput, "pooling"),
        ({"projection": Projection.onto(np.eye(65))}, InvalidInput, "at most 64 directions; got 65"),
    ],
)
def test_what_cannot_be_asked_is_refused(asked: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        HarvestAsk(**asked)


def test_layers_are_held_to_the_model() -> None:
    with pytest.raises(InvalidLayers, match="layer 12 is not in the model"):
        HarvestAsk(layers=[12]).layer_indices(12)
    with pytest.raises(InvalidInput, match="at least one layer"):
        HarvestAsk(layers=[]).layer_indices(12)
    assert HarvestAsk().layer_indices(1) == (0,)
    assert HarvestAsk().layer_indices(30) == (7, 15, 22)


def test_any_reader_of_safetensors_reads_a_shard(tmp_path: Path) -> None:
    """Also of windows, whose documents stand beside them; values lie aligned, for those who map the file."""
    engine = FakeEngine()
    prompts = windows(["abcdefgh", "", "ij"], engine.tokenizer, context=4, pack=True)
    ask = HarvestAsk(layers=[1, 2], positions="-2:")
    manifest = run_harvest(engine, prompts, FolderPlace(tmp_path), ask, spool=tmp_path / ".spool")

    path = tmp_path / manifest.shards[0].key
    held = load_file(path)
    assert manifest.n_prompts == 4
    assert held["documents_2"].tolist() == [0, 2]
    assert held["offsets_2"].tolist() == [6, 0]
    assert held["starts_2"].tolist() == [1, 3]
    assert held["positions_3"].tolist() == [0, 1]
    assert (held["documents_2"].dtype, held["offsets_2"].dtype, held["starts_2"].dtype) == (INT64, INT64, INT32)
    with safe_open(path, "pt") as file:
        assert set(file.keys()) == set(held)
        assert str(file.get_tensor("prompt_0").dtype) == "torch.bfloat16"
    header = int.from_bytes(path.read_bytes()[:8], "little")
    assert (8 + header) % 8 == 0


def test_shards_are_of_so_many_prompts_and_know_themselves() -> None:
    texts = [f"prompt {i}" for i in range(10)]
    plans = list(plan_shards(read_prompts(texts, TOKENIZER), 4))

    assert [(plan.number, plan.first, len(plan.prompts)) for plan in plans] == [(0, 0, 4), (1, 4, 4), (2, 8, 2)]
    assert [list(plan.indices) for plan in plans] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert sum(plan.n_tokens for plan in plans) == sum(len(text) + 1 for text in texts)
    assert len({plan.digest for plan in plans}) == 3
    assert [plan.digest for plan in plan_shards(read_prompts(texts, TOKENIZER), 4)] == [plan.digest for plan in plans]


def test_a_shard_of_the_same_tokens_from_elsewhere_is_another() -> None:
    def digest(documents: list[Any], **asked: Any) -> str:
        return next(plan_shards(windows(documents, TOKENIZER, context=8, **asked), 4)).digest

    assert digest(["ab", "cd"]) == digest(["ab", "cd"])
    assert digest(["", "ab", "cd"]) != digest(["ab", "cd"])
    assert digest(["abcd"], pack=True) != digest(["ab", "cd"], pack=True)
    cut = Tokenised(np.arange(5, dtype=np.int32), cut_from=9)
    whole = Tokenised(np.arange(5, dtype=np.int32))
    assert ShardPlan(0, 0, (cut,)).digest != ShardPlan(0, 0, (whole,)).digest


def test_prompts_are_read_as_shards_need_them() -> None:
    read: list[int] = []

    def prompts() -> Any:
        for i in range(100_000):
            read.append(i)
            yield f"prompt {i}"

    plans = plan_shards(read_prompts(prompts(), TOKENIZER), 8)
    for _ in range(3):
        next(plans)

    assert len(read) <= 1024
