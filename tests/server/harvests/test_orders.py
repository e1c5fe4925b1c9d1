"""What a gateway tells its workers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from streamtap.errors import SettingsError
from streamtap.server.config import HarvestConfig, ModelConfig, ServerConfig
from streamtap.server.harvests.orders import WorkerOrders, orders_of, read_orders
from streamtap.server.models.catalog import Served
from streamtap.testing.stub_gateway import FACTS, CharacterCounter

MODELS = (
    ModelConfig("a", "/models/a", name="org/a", revision="main", dtype="float32", device="cpu", max_batch_tokens=64),
    ModelConfig("b", "org/b", size="large"),
    ModelConfig("c", "org/c", engine="vllm"),
    ModelConfig("d", "org/d", activations=False),
)


def _orders(folder: Path) -> WorkerOrders:
    config = ServerConfig(models=MODELS, data_dir=folder, harvest=HarvestConfig(idle_seconds=7, lease_seconds=9))
    served = [Served(model, replace(FACTS, max_model_len=77), CharacterCounter(FACTS)) for model in MODELS]
    return orders_of(config, served)


def test_workers_hear_of_the_models_that_they_can_load(tmp_path: Path) -> None:
    orders = _orders(tmp_path)

    assert [*orders.of_lane("small")] == ["a"]
    assert [*orders.of_lane("large")] == ["b"]
    small = orders.of_lane("small")["a"]
    assert (small.name, small.checkpoint, small.context) == ("org/a", "/models/a", 77)
    assert (small.revision, small.dtype, small.device, small.max_batch_tokens) == ("main", "float32", "cpu", 64)
    assert (orders.root, orders.idle_seconds, orders.lease_seconds) == (str(tmp_path), 7, 9)
    assert orders.spools.startswith(str(tmp_path))


def test_the_file_says_it_all_and_is_private(tmp_path: Path) -> None:
    orders = _orders(tmp_path)
    file = orders.write(tmp_path)
    again = orders.write(tmp_path)

    assert file == again
    assert read_orders(file) == orders
    assert file.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


@pytest.mark.parametrize("text", ["", "[]", '{"models": [{}]}', '{"models": [], "unknown": 1}'])
def test_a_file_that_says_something_else_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "orders.json"
    file.write_text(text)

    with pytest.raises(SettingsError, match="does not say what a worker has to know"):
        read_orders(file)
    with pytest.raises(SettingsError):
        read_orders(tmp_path / "nothing")
