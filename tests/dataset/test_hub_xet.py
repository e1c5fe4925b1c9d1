"""The same over Xet, which the Hub prefers for large files: the client's own library, with a store of files."""

from __future__ import annotations

import random
from pathlib import Path

from streamtap.dataset import names
from streamtap.dataset.hub_target import HubTarget
from streamtap.settings import Settings
from streamtap.testing.hub_server import HubServer, online_client

REPO = "tester/acts"
SHARDS = {names.hidden_file(layer, 0): random.Random(layer).randbytes(150_000) for layer in range(2)}
INDEX = random.Random(9).randbytes(3000)


def test_a_push_and_its_reading_by_xet(tmp_path: Path) -> None:
    settings = Settings(cache_dir=tmp_path / "cache", hub_cache_dir=tmp_path / "hf")
    with HubServer(tmp_path / "hub", xet=True) as hub, online_client(hub):
        for _again in range(2):
            target = HubTarget(REPO, token=hub.token, endpoint=hub.endpoint, settings=settings)
            target.look()
            push(target)
            target.close()
        came: list[int] = []
        source = target.source()

        for path, data in SHARDS.items():
            assert hub.read(REPO, path) == data
            assert source.read_range(path, 1000, 1100) == data[1000:1100]
            assert source.fetch(path, advance=came.append).read_bytes() == data
        assert sum(came) == sum(map(len, SHARDS.values()))
        assert len(hub.commits(REPO)) == 2
        assert any("xet-write-token" in request.path for request in hub.requests)
        assert any("xet-read-token" in request.path for request in hub.requests)
        assert [request.path for request in hub.requests if "/lfs/" in request.path] == []


def push(target: HubTarget) -> None:
    for path, data in SHARDS.items():
        file = target.room(path)
        file.write_bytes(data)
        target.put(path, file)
        assert not file.exists()
    index = target.room(names.INDEX)
    index.write_bytes(INDEX)
    target.publish({names.INDEX: index}, [], "Publish acts")
