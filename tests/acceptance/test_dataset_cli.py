"""``streamtap dataset`` from end to end, against a local folder and the local Hub."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from streamtap import UnifiedCache, load_activations
from streamtap.cli.main import main
from streamtap.testing import FakeEngine, HubServer

SAMPLES = Path(__file__).parents[1] / "dataset" / "samples"
INDEX = "index/train-00000-of-00001.parquet"
LAYERS, HIDDEN = 4, 8
#: The second comes twice, with two labels.
TEXTS = ["The cat sat.", "Hello there", "A third one", "Hello there", "The last"]
ROWS: list[dict[str, Any]] = [
    {"text": text, "label": label, "domain": "even" if label % 2 == 0 else "odd", "weight": label / 4}
    for label, text in enumerate(TEXTS, start=8)
]
#: One sentence, whatever went wrong.
SENTENCE = re.compile(r"error: [^\n]+\n")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    with UnifiedCache(FakeEngine(LAYERS, HIDDEN), cache_logits=True, logit_top_k=3, cache_dir=folder) as made:
        made.warmup(TEXTS)
    return folder


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Each test has an empty folder and a machine of its own."""
    monkeypatch.setenv("STREAMTAP_CACHE_DIR", str(tmp_path / "machine"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hf"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


@pytest.fixture
def jsonl(here: Path) -> str:
    (here / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return "prompts.jsonl"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    with HubServer(tmp_path_factory.mktemp("hub"), token="hf_cli") as server:
        yield server


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["dataset", *map(str, arguments)])


def push(name: str, file: str, cache: Path, *options: str) -> Result:
    return run("push", name, file, "--model", "fake", "--cache-dir", cache, *options)


def done(result: Result) -> str:
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    return result.stdout


def refused(result: Result, code: int) -> str:
    assert (result.exit_code, result.stdout) == (code, ""), result.output
    assert SENTENCE.fullmatch(result.stderr), result.stderr
    return result.stderr


def index_of(folder: Path) -> pa.Table:
    return pq.read_table(folder / INDEX)


def test_push_then_load(jsonl: str, cache: Path, here: Path) -> None:
    options = ["--label-column", "label", "--metadata-columns", "domain, weight", "--description", "Some cats."]
    said = done(push("./set", jsonl, cache, *options))
    loaded = done(run("load", "./set", "--layers", "1,3", "--out", "acts.npz"))

    index = index_of(here / "set")
    found = zip(*(index[name].to_pylist() for name in ("text", "label", "domain", "weight")), strict=True)
    assert Path(said.strip()).resolve() == here / "set"
    assert sorted(found) == sorted(tuple(row.values()) for row in ROWS)
    assert [str(index.schema.field(name).type) for name in ("label", "weight")] == ["int32", "double"]
    assert "Some cats." in (here / "set" / "README.md").read_text()
    lines = loaded.splitlines()
    assert [line.split()[:4] for line in lines[1:3]] == [["1", "5", "x", "8"], ["3", "5", "x", "8"]]
    assert lines[3] == "labels: 8 (1), 9 (1), 10 (1), 11 (1), 12 (1)"
    assert re.fullmatch(r"wrote [\d.]+ k?B to acts\.npz", lines[4])
    arrays, acts = np.load("acts.npz"), load_activations("./set", layers=[1, 3])
    assert set(arrays) == {"layer_1", "layer_3", "labels"}
    assert all(np.array_equal(arrays[f"layer_{layer}"], acts[layer]) for layer in acts)
    assert arrays["labels"].tolist() == index["label"].to_pylist()


def test_a_prompt_that_comes_twice_keeps_both_its_labels(jsonl: str, cache: Path) -> None:
    done(push("./set", jsonl, cache, "--label-column", "label"))
    acts, labels = load_activations("./set", prompts=TEXTS, return_labels=True)

    assert labels.tolist() == [8, 9, 10, 11, 12]
    with UnifiedCache(FakeEngine(LAYERS, HIDDEN), cache_dir=cache) as rows:
        assert np.array_equal(acts[2], rows.activations(TEXTS, layer=2))


@pytest.mark.parametrize("ending", ["csv", "tsv", "parquet"])
def test_labels_and_metadata_of_a_table(ending: str, cache: Path, here: Path) -> None:
    columns = {name: [row[name] for row in ROWS] for name in ROWS[0]} | {"label": ["7", "8", None, "10", "11"]}
    if ending == "parquet":
        pq.write_table(pa.table(columns), "prompts.parquet")
    else:
        with open(f"prompts.{ending}", "w", newline="") as file:
            writer = csv.writer(file, delimiter="," if ending == "csv" else "\t")
            writer.writerows([columns, *zip(*columns.values(), strict=True)])
    options = ["--label-column", "label", "--metadata-columns", "weight,domain", "--no-shuffle"]
    done(push("./set", f"prompts.{ending}", cache, *options))
    index = index_of(here / "set")

    assert index["text"].to_pylist() == TEXTS
    assert index["weight"].to_pylist() == columns["weight"]
    assert index["domain"].to_pylist() == columns["domain"]
    # CSV says nothing of kinds: what are numbers all through are numbers.
    assert index["label"].to_pylist() == (columns["label"] if ending == "parquet" else [7, 8, None, 10, 11])
    said = done(run("load", "./set", "--layers", "0"))
    assert said.endswith("labels: 10 (1), 11 (1), 7 (1), 8 (1); 1 null\n" if ending == "parquet" else "1 null\n")


def test_inspect(jsonl: str, cache: Path) -> None:
    done(push("./set", jsonl, cache, "--label-column", "label", "--layers", "0-2"))
    text, found = done(run("inspect", "./set")), json.loads(done(run("inspect", "./set", "--json")))

    assert re.search(r"^layers +0-2 \(3 layers\)$", text, re.MULTILINE)
    assert re.search(r"^rows +one a prompt, last_token; hidden 8, float32$", text, re.MULTILINE)
    assert re.search(r"^one layer +[\d.]+ B to download$", text, re.MULTILINE)
    assert re.search(r"^logits +the 3 largest of the last position$", text, re.MULTILINE)
    assert re.search(r"^columns +text \(string\), label \(int32\), ", text, re.MULTILINE)
    assert (found["model_name"], found["num_prompts"], found["available_layers"]) == ("fake", 5, [0, 1, 2])
    sizes = {file.stem: file.stat().st_size for file in Path("set/tensors").iterdir()}
    assert found["layer_bytes"] == {str(layer): sizes[f"hidden_layer{layer:03d}_shard000"] for layer in range(3)}
    assert found["total_bytes"] == sum(sizes.values())
    assert found["index_bytes"] == Path("set", INDEX).stat().st_size


def test_pull_then_work_without_the_model(jsonl: str, cache: Path) -> None:
    done(push("./set", jsonl, cache))
    said = done(run("pull", "./set", "--layers", "2", "--cache-dir", "pulled"))

    assert said == "pulled 5 prompts into the cache.\n"
    with UnifiedCache("fake", layers=[2], cache_dir="pulled") as pulled:
        assert pulled.warmup(TEXTS).activations_cached == 5
        assert np.array_equal(pulled.activations(TEXTS, 2), load_activations("./set", prompts=TEXTS)[2])


def test_verify(jsonl: str, cache: Path, here: Path) -> None:
    done(push("./set", jsonl, cache))
    assert done(run("verify", "./set")).endswith("everything is as the manifest and the index say.\n")
    shard = here / "set" / "tensors" / "hidden_layer002_shard000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\xff")
    result = run("verify", "./set")

    assert (result.exit_code, result.stderr) == (1, "")
    assert "tensors/hidden_layer002_shard000.safetensors" in result.stdout
    assert "everything" not in result.stdout
    said = refused(run("load", "./set", "--layers", "2"), 1)
    assert "hidden_layer002_shard000.safetensors of" in said
    done(run("load", "./set", "--layers", "1"))


def test_an_older_dataset_is_read_with_one_line_of_warning_and_upgraded(here: Path) -> None:
    shutil.copytree(SAMPLES / "v1-2-pooled-logits", here / "old")
    before, first = run("inspect", "./old"), run("load", "./old")
    assert (before.exit_code, first.exit_code) == (0, 0)
    for result in (before, first):
        assert re.fullmatch(r"warning: [^\n]*streamtap dataset upgrade[^\n]*\n", result.stderr)

    dry = done(run("upgrade", "./old", "--dry-run"))
    assert (here / "old" / "lmprobe_info.json").exists()
    assert done(run("upgrade", "./old")) == dry
    assert not (here / "old" / "lmprobe_info.json").exists()
    assert done(run("load", "./old")) == first.stdout
    assert done(run("upgrade", "./old")) == dry
    pulled = run("pull", "./old", "--cache-dir", "pulled")
    assert re.fullmatch(r"warning: \./old does not record [^\n]+\n", pulled.stderr)


def test_the_hub_of_the_environment(jsonl: str, cache: Path, hub: HubServer) -> None:
    """In processes of their own, which know the Hub and the token by their environment alone."""
    pushed = elsewhere(hub, "push", "tester/acts", jsonl, "--model", "fake", "--cache-dir", str(cache), "--private")
    loaded = elsewhere(hub, "load", "tester/acts", "--layers", "3")
    stranger = elsewhere(hub, "inspect", "tester/acts", "--refresh", HF_TOKEN="")

    assert (pushed.returncode, pushed.stdout) == (0, f"{hub.endpoint}/datasets/tester/acts\n"), pushed.stderr
    assert (loaded.returncode, loaded.stderr) == (0, "")
    assert loaded.stdout.splitlines()[1].split()[:4] == ["3", "5", "x", "8"]
    assert [each.path for each in hub.requests if "logits" in each.path and each.method == "GET"] == []
    assert (stranger.returncode, stranger.stdout) == (1, "")
    assert stranger.stderr.startswith("error: the Hub shows no dataset tester/acts: either there is none of that name")
    assert SENTENCE.fullmatch(stranger.stderr)


def elsewhere(hub: HubServer, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "streamtap", "dataset", *arguments]
    environment = {**os.environ, **hub.environment, **environment}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--model", "other"], 1, "other"),
        (["--layers", "9"], 2, "layer 9"),
        (["--label-column", "score"], 2, "prompts.jsonl, line 1 has no 'score'; it has 'text', 'label'"),
        (["--metadata-columns", "domain,text"], 2, "metadata key 'text' is a column of the format itself"),
        (["--label-column", "weight"], 2, "label 1 is a float"),
        (["--tensors", "hidden"], 2, "tensors must be some of 'hidden_layers', 'logits_topk'"),
        (["--shard-max-bytes", "3B"], 2, "shard_max_bytes must hold at least one row of 32 bytes; got 3"),
        (["--private"], 2, "private= is for the Hub"),
        (["--pooling", "median"], 2, "median"),
        (["--column", "domains"], 2, "domains"),
    ],
)
def test_a_push_that_cannot_be_is_one_sentence(
    arguments: list[str], code: int, said: str, jsonl: str, cache: Path, here: Path
) -> None:
    """The option that comes last is the one that counts."""
    assert said in refused(push("./set", jsonl, cache, *arguments), code)
    assert not (here / "set").exists()


@pytest.mark.parametrize("size", ["much", "1 TB", "", "-3", "1.2.3MB"])
def test_a_size_that_means_nothing_is_said(size: str, jsonl: str, cache: Path) -> None:
    result = push("./set", jsonl, cache, "--shard-max-bytes", size)

    assert result.exit_code == 2
    assert f"{size!r} is no size; write 300MB, 1GiB or a number of bytes." in result.stderr


@pytest.mark.parametrize(("size", "shards"), [("32B", 5), ("0.1 kB", 2), ("64", 3), ("1MiB", 1), ("1GB", 1)])
def test_sizes_of_shards(size: str, shards: int, jsonl: str, cache: Path, here: Path) -> None:
    done(push("./set", jsonl, cache, "--tensors", "hidden_layers", "--shard-max-bytes", size))

    assert len(list((here / "set" / "tensors").iterdir())) == shards * LAYERS


def test_prompts_that_the_cache_lacks(cache: Path, here: Path) -> None:
    (here / "more.txt").write_text("\n".join(["Nobody's business", *TEXTS]) + "\n")
    said = refused(push("./set", "more.txt", cache), 1)
    assert said.startswith("error: 1 of 6 prompts are not whole in the cache: 1 lack rows (prompts 0).")
    assert "Nobody" not in said

    done(push("./set", "more.txt", cache, "--skip-missing"))
    assert sorted(index_of(here / "set")["text"].to_pylist()) == sorted(TEXTS)


def test_what_is_there_is_replaced_when_asked(jsonl: str, cache: Path, here: Path) -> None:
    done(push("./set", jsonl, cache, "--limit", "2"))
    done(push("./set", jsonl, cache, "--limit", "2"))
    assert "publish under another name, or replace what is there with" in refused(push("./set", jsonl, cache), 1)
    assert len(index_of(here / "set")) == 2

    done(push("./set", jsonl, cache, "--replace"))
    assert len(index_of(here / "set")) == 5


@pytest.mark.parametrize("command", ["load", "pull", "inspect", "verify", "upgrade"])
@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("./nothing", 1, "nothing"),
        ("nothing", 2, "a dataset is 'user/name'"),
        ("https://hub.example/tester/acts", 2, "got an address that starts with https://"),
    ],
)
def test_a_dataset_that_is_not_there_is_one_sentence(command: str, name: str, code: int, said: str) -> None:
    assert said in refused(run(command, name), code)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["load", "--layers", "7"], 2, "layer 7"),
        (["load", "--pooling", "mean"], 1, "stores 'last_token' alone"),
        (["load", "--revision", "main"], 2, "has no revisions"),
        (["load", "--out", "prompts.jsonl/acts.npz"], 1, "prompts.jsonl"),
        (["pull", "--tensors", "router"], 2, "tensors are 'hidden_layers' and 'logits_topk'"),
    ],
)
def test_a_read_that_cannot_be_is_said(arguments: list[str], code: int, said: str, jsonl: str, cache: Path) -> None:
    done(push("./set", jsonl, cache))
    command, *options = arguments
    result = run(command, "./set", *options)

    assert result.exit_code == code
    assert SENTENCE.fullmatch(result.stderr)
    assert said in result.stderr
