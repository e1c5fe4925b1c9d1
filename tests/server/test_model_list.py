"""What `GET /v1/models` tells an engine elsewhere: which commit runs, which rows are chosen, whether jobs are done."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from streamtap.server.config import HarvestConfig, ModelConfig
from streamtap.server.surface.routes.models import Models
from streamtap.testing.stub_engine import StubPool
from streamtap.testing.stub_gateway import MODEL, StubGateway

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def _listed(folder: Path, *models: ModelConfig) -> list[dict[str, Any]]:
    async def main() -> list[dict[str, Any]]:
        gateway = StubGateway(folder, StubPool(), models=models)
        found: list[dict[str, Any]] = (await gateway.get("/v1/models")).json["data"]
        await gateway.close()
        return found

    return asyncio.run(main())


def _snapshot(hub: Path, name: str, commit: str) -> None:
    """A model of the Hub as its client keeps it: without weights, for nobody is to read them."""
    repo = hub / ("models--" + name.replace("/", "--"))
    (repo / "snapshots" / commit).mkdir(parents=True)
    (repo / "snapshots" / commit / "config.json").write_text("{}")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)


def test_the_commit_of_a_hub_model_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    _snapshot(tmp_path / "hub", "org/stub", COMMIT)

    here, pinned = _listed(tmp_path, MODEL, replace(MODEL, id="pinned", checkpoint="org/gone", revision=COMMIT[::-1]))

    assert here["revision"] == COMMIT
    assert pinned["revision"] == COMMIT[::-1]


def test_of_files_without_a_commit_none_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    elsewhere = ModelConfig(id="elsewhere", checkpoint="org/stub", engine="url", url="http://127.0.0.1:9/v1")
    _snapshot(tmp_path / "hub", "org/stub", COMMIT)

    listed = _listed(
        tmp_path,
        replace(MODEL, checkpoint=str(folder)),
        replace(MODEL, id="demo", checkpoint="demo"),
        replace(MODEL, id="absent", checkpoint="org/absent"),
        replace(MODEL, id="lost", checkpoint="/no/such/folder"),
        elsewhere,
    )

    assert [each.get("revision") for each in listed] == [None] * 5
    assert all("revision" not in each for each in listed)


def test_an_engine_that_is_not_ours_writes_a_token_behind_each_prompt(tmp_path: Path) -> None:
    ours, other = (each["capabilities"] for each in _listed(tmp_path, MODEL, replace(MODEL, id="v", engine="vllm")))

    assert (ours["least_max_tokens"], other["least_max_tokens"]) == (0, 1)
    for each in (ours, other):
        assert (each["output_positions"], each["output_dtypes"]) == (True, ["bfloat16", "float32"])
    assert other["harvest"] is False


def test_it_is_told_what_runs_a_model_and_whether_as_we_would(tmp_path: Path) -> None:
    listed = _listed(
        tmp_path,
        replace(MODEL, command=()),
        replace(MODEL, id="fp8", command=(), engine="vllm", arguments=("--quantization", "fp8")),
        replace(MODEL, id="own", command=("engine", "{port}")),
        ModelConfig(id="elsewhere", checkpoint="org/stub", engine="url", url="http://127.0.0.1:9/v1"),
    )

    assert [(each["engine"], each["own_arguments"]) for each in listed] == [
        ("transformers", False),
        ("vllm", True),
        ("transformers", True),
        ("url", False),
    ]
    assert "quantization" not in str(listed)


def test_a_gateway_without_workers_offers_no_harvest(tmp_path: Path) -> None:
    gateway = StubGateway(tmp_path, StubPool())
    service = gateway.app.state.service
    idle = replace(service, config=replace(gateway.config, harvest=HarvestConfig(workers=0)))

    (able, _), (unable, _) = (
        [each["capabilities"] for each in map(Models(one)._described, one.catalog.values())] for one in (service, idle)
    )
    asyncio.run(gateway.close())

    assert (able["harvest"], able["max_harvest_prompts"]) == (True, 4096)
    assert unable["harvest"] is False
    assert "max_harvest_prompts" not in unable
