"""``streamtap dataset from-harvest``: a harvest on disk becomes a dataset."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from streamtap.cli.main import main
from streamtap.engines.transformers import TransformersEngine
from streamtap.harvest.asked import HarvestAsk
from streamtap.harvest.plan import read_prompts
from streamtap.harvest.run import run_harvest
from streamtap.harvested.folder_place import FolderPlace
from streamtap.harvested.reader import HarvestedRun
from streamtap.testing.models import tiny_model
from streamtap.testing.tokenizers import tiny_tokenizer
from streamtap.workbench.dataset_rows import load_activations
from streamtap.workbench.open_dataset import fetch_dataset_metadata

TEXTS = ["The cat sat.", "Hello there", "A third one"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> HarvestedRun:
    root = tmp_path_factory.mktemp("harvest")
    tiny_model("llama").save_pretrained(root / "model")
    tiny_tokenizer().save_pretrained(root / "model")
    engine = TransformersEngine.load(str(root / "model"))
    ask = HarvestAsk(layers=[0, 1], pooling="last_token", dtype="float32", shard_size=2)
    run_harvest(engine, read_prompts(TEXTS, engine.tokenizer), FolderPlace(root / "run"), ask, spool=root / "spool")
    return HarvestedRun.open(root / "run")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def told(*arguments: Any, code: int = 0) -> Result:
    result = CliRunner().invoke(main, ["dataset", "from-harvest", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result


def test_a_harvest_becomes_a_dataset(run: HarvestedRun, here: Path) -> None:
    result = told(run.place.url, "--repo", "./set", "--layers", "1", "--description", "Of a harvest.")

    assert result.stdout.strip().endswith("set")
    acts = load_activations("./set")
    assert set(acts) == {1}
    assert np.array_equal(acts[1], np.concatenate([run.prompt(i, 1)[1] for i in range(3)]))
    assert "Of a harvest." in (here / "set" / "README.md").read_text()


def test_texts_and_labels_come_from_the_file_that_was_harvested(run: HarvestedRun, here: Path) -> None:
    rows = [{"said": text, "label": i % 2, "domain": "odd"} for i, text in enumerate(TEXTS)]
    (here / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    about = ["--column", "said", "--label-column", "label", "--metadata-columns", "domain"]
    told(run.place.url, "--repo", "./set", "--prompts", "prompts.jsonl", *about, "--shuffle")

    found = fetch_dataset_metadata("./set")
    assert "domain" in found.columns
    labels = load_activations("./set", return_labels=True)[1]
    assert sorted(labels.tolist()) == [0, 0, 1]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--label-column", "label"], "--label-column tells of a file; name it with --prompts"),
        (["--format", "jsonl"], "--format tells of a file"),
        (["--layers", "7"], "layer"),
        (["--prompts", "other.txt"], "prompt 1 is not the one"),
    ],
)
def test_what_cannot_be_is_one_sentence(run: HarvestedRun, here: Path, arguments: list[str], says: str) -> None:
    (here / "other.txt").write_text("The cat sat.\nHello THERE\nA third one\n")
    result = told(run.place.url, "--repo", "./set", *arguments, code=2)
    assert says in result.output
    assert "Traceback" not in result.output
    assert not (here / "set").exists()


def test_a_folder_without_a_harvest_is_told(here: Path) -> None:
    assert "holds no harvest" in told(here, "--repo", "./set", code=1).output
