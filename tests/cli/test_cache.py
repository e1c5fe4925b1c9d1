from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from streamtap.cli.main import main
from streamtap.engines.transformers import TransformersEngine
from streamtap.testing.models import tiny_model
from streamtap.testing.tokenizers import tiny_tokenizer
from streamtap.workbench.unified_cache import UnifiedCache

PROMPTS = [f"prompt number {i}" for i in range(20)]


@pytest.fixture(scope="module")
def engines() -> list[TransformersEngine]:
    return [
        TransformersEngine(tiny_model("llama"), tiny_tokenizer(), name="tiny"),
        TransformersEngine(tiny_model("gpt2"), tiny_tokenizer(), name="other/model"),
    ]


@pytest.fixture
def folder(engines: list[TransformersEngine], tmp_path: Path) -> Path:
    """A cache of three sets: rows and perplexity of one model, rows of another."""
    place = tmp_path / "home" / "activations"
    with UnifiedCache(engines[0], layers=[0, 2], cache_dir=place, progress=False) as cache:
        cache.warmup(PROMPTS)
    with UnifiedCache(
        engines[1], pooling="mean", exclude_special_tokens=True, exact=True, compute_perplexity=False,
        cache_dir=place, progress=False,
    ) as cache:  # fmt: skip
        cache.warmup(PROMPTS[:5])
    return place


def _run(folder: Path, *arguments: str, **more: Any) -> Result:
    """The command with the folder as the default one."""
    return CliRunner().invoke(main, ["cache", *arguments], env={"STREAMTAP_CACHE_DIR": str(folder.parent)}, **more)


def _sets(folder: Path) -> list[dict[str, Any]]:
    loaded: list[dict[str, Any]] = json.loads(_run(folder, "list", "--json").stdout)
    return loaded


def test_info_counts_and_measures(folder: Path) -> None:
    (folder.parent / "models" / "some-model").mkdir(parents=True)
    (folder.parent / "models" / "some-model" / "weights").write_bytes(b"x" * 1500)

    found = json.loads(_run(folder, "info", "--json").stdout)
    shown = _run(folder, "info").stdout

    assert (found["folder"], found["exists"], found["sets"], found["prompts"]) == (str(folder), True, 3, 45)
    assert found["models"] == [{"name": "some-model", "size_bytes": 1500}]
    assert found["size_bytes"] > 20 * 2 * 32 * 4
    assert found["files"] >= 7
    assert found["free_bytes"] > 0
    assert re.search(r"^sets +3$", shown, re.MULTILINE)
    assert re.search(r"^ +some-model \(1.5 kB\)$", shown, re.MULTILINE)


def test_list_tells_what_each_set_is(folder: Path) -> None:
    rows, perplexity, other = _sets(folder)
    lines = _run(folder, "list").stdout.splitlines()

    assert (rows["model"], rows["kind"], rows["layers"], rows["prompts"]) == ("tiny", "rows", [0, 2], 20)
    assert (rows["pooling"], rows["positions"], rows["dtype"]) == ("last_token", "all", "float32")
    assert (perplexity["kind"], perplexity["layers"], perplexity["pooling"]) == ("perplexity", [], None)
    assert (other["pooling"], other["exact"], other["exclude_special_tokens"]) == ("mean", True, True)
    assert rows["size_bytes"] >= 20 * 2 * 32 * 4
    assert " ".join(lines[0].split()) == "set model holds positions dtype layers prompts size made"
    assert re.match(r" +1 +tiny +rows, last_token +all +float32 +0,2 +20 +[\d.]+ kB +20\d\d-\d\d-\d\d$", lines[1])
    assert re.match(r" +2 +tiny +perplexity +– +float32 +– +20 ", lines[2])
    assert re.match(r" +3 +other/model +rows, mean, exact +all, no specials +float32 +0-2 +5 ", lines[3])


@pytest.mark.parametrize("command", [["info"], ["list"], ["verify"], ["clear", "--all", "--yes"]])
def test_to_look_at_a_cache_that_is_not_there_makes_none(command: list[str], tmp_path: Path) -> None:
    result = _run(tmp_path / "home" / "activations", *command)

    assert result.exit_code == 0, result.output
    assert re.search(r"nothing cached yet|nothing is cached", result.stdout)
    assert not (tmp_path / "home").exists()


def test_another_folder_may_be_named(folder: Path, tmp_path: Path) -> None:
    result = _run(tmp_path / "elsewhere" / "activations", "info", "--json", "--cache-dir", str(folder))

    assert json.loads(result.stdout)["sets"] == 3


def test_verify_finds_a_flipped_bit_and_the_run_after_it_is_whole(
    folder: Path, engines: list[TransformersEngine]
) -> None:
    sound = _run(folder, "verify")
    assert (sound.exit_code, sound.stdout.splitlines()[-1]) == (0, "every row matches its checksum.")
    assert sound.stdout.startswith("read 45 rows of 45 prompts, ")
    part = sorted(folder.rglob("part_*.bin"))[0]
    content = bytearray(part.read_bytes())
    content[40] ^= 1
    part.write_bytes(content)

    result = _run(folder, "verify")

    assert result.exit_code == 1
    assert re.search(r"^set 1: 1 prompt set aside: a row does not match its checksum\.$", result.stdout, re.MULTILINE)
    assert result.stdout.endswith("what was set aside will be run again when it is next asked for.\n")
    assert _run(folder, "verify").exit_code == 0
    with UnifiedCache(engines[0], layers=[0, 2], cache_dir=folder, progress=False) as cache:
        assert cache.warmup(PROMPTS).activations_extracted == 1


@pytest.mark.parametrize(
    ("which", "left"),
    [
        (["--model", "tiny"], [3]),
        (["--set", "2"], [1, 3]),
        (["--set", "2", "--set", "3", "--set", "2"], [1]),
        (["--all"], []),
    ],
)
def test_clear_removes_what_was_named(which: list[str], left: list[int], folder: Path) -> None:
    before = json.loads(_run(folder, "info", "--json").stdout)["size_bytes"]

    result = _run(folder, "clear", *which, "--yes")

    assert result.exit_code == 0, result.output
    assert re.fullmatch(rf"removed {3 - len(left)} sets?, [\d.]+ kB freed\.\n", result.stdout)
    assert [each["set"] for each in _sets(folder)] == left
    assert json.loads(_run(folder, "info", "--json").stdout)["size_bytes"] < before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--yes"], "say what to clear, with one of --model, --set and --all"),
        (["--all", "--set", "1", "--yes"], "say what to clear, with one of --model, --set and --all"),
        (["--all"], "this would remove 3 sets, "),
        (["--set", "9", "--yes"], "error: there is no set 9; the cache has 1, 2, 3."),
        (
            ["--model", "demo", "--yes"],
            "error: no set is of the model 'demo'; the cache has sets of tiny, other/model.",
        ),
    ],
)
def test_clear_removes_nothing_unless_it_is_clear_what(arguments: list[str], said: str, folder: Path) -> None:
    result = _run(folder, "clear", *arguments)

    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr
    assert len(_sets(folder)) == 3


@pytest.mark.parametrize(("answer", "left"), [("n\n", 3), ("y\n", 0), ("", 3)])
def test_clear_asks_on_a_terminal(answer: str, left: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamtap.cli.cache._is_terminal", lambda: True)

    result = _run(folder, "clear", "--all", input=answer)

    assert re.match(r"remove 3 sets, [\d.]+ kB, from ", result.stdout)
    assert len(_sets(folder)) == left
    assert result.exit_code == (0 if left == 0 else 1)
