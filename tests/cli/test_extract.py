from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result
from safetensors.numpy import load_file

from streamtap.cli.extract import _FORMATS, _POOLINGS, extract
from streamtap.cli.main import main
from streamtap.engines.opening import BACKENDS
from streamtap.pooling import POOLINGS
from streamtap.testing.fake_engine import FakeEngine
from streamtap.testing.tokenizers import tiny_tokenizer
from streamtap.workbench.prompt_files import FORMATS
from streamtap.workbench.unified_cache import UnifiedCache

PROMPTS = ["The cat sat on the mat.", "Hello there", "A third prompt"]


def _run(model: str, file: Path | str, *options: str, cache: Path, **more: Any) -> Result:
    arguments = ["extract", str(file), "--model", model, "--cache-dir", str(cache), *options]
    return CliRunner().invoke(main, arguments, **more)


def _numbers(result: Result) -> list[int]:
    """Activations and perplexity, cached and extracted each."""
    found = re.search(r"activations=(\d+) cached \+ (\d+) extracted, perplexity=(\d+) cached \+ (\d+)", result.stdout)
    assert found, result.output
    return [int(number) for number in found.groups()]


def test_prompts_are_extracted_once(model: str, file: Path, tmp_path: Path) -> None:
    first = _run(model, file, cache=tmp_path / "cache")
    file.write_text("\n".join([*PROMPTS, "one more"]))
    second = _run(model, file, cache=tmp_path / "cache")

    assert (first.exit_code, second.exit_code) == (0, 0), first.output
    assert _numbers(first) == [0, 3, 0, 3]
    assert _numbers(second) == [3, 1, 3, 1]
    assert re.search(r"^prompts +3 from prompts.txt, 51 tokens; 0 cached, 3 to run$", first.stdout, re.MULTILINE)
    assert re.search(r"^will write +about \d\.\d kB$", first.stdout, re.MULTILINE)
    assert re.search(r"^layers +0-2 \(3 of 3\)$", first.stdout, re.MULTILINE)
    assert re.search(r"^perplexity +median \d+\.\d, from", first.stdout, re.MULTILINE)
    for prompt in PROMPTS:
        assert prompt not in first.output


def test_rows_are_those_of_the_cache(model: str, file: Path, tmp_path: Path) -> None:
    options = ["--layers", "0,2", "--pooling", "none", "--positions", "-3:", "--no-perplexity", "--with-text"]
    result = _run(model, file, *options, "--out", str(tmp_path / "out"), cache=tmp_path / "cache")

    with UnifiedCache(model, cache_pooled=False, positions="-3:", cache_dir=tmp_path / "other") as other:
        expected = other.rows(PROMPTS)
    found = load_file(tmp_path / "out" / "layer_002.safetensors")
    assert np.array_equal(found["rows"], expected.acts[2])
    assert found["offsets"].tolist() == [0, 3, 6, 9]
    assert pq.read_table(tmp_path / "out" / "prompts.parquet")["text"].to_pylist() == PROMPTS
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["layers"] == [0, 2]
    assert re.search(rf"^wrote 4 files, [\d.]+ kB, to {re.escape(str(tmp_path / 'out'))}$", result.stdout, re.MULTILINE)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the cache is opened with."""
    asked: dict[str, Any] = {}
    wrapped = UnifiedCache.__init__

    def record(self: UnifiedCache, **options: Any) -> None:
        asked.update(options)
        wrapped(self, **options)

    monkeypatch.setattr(UnifiedCache, "__init__", record)
    return asked


def test_every_option_reaches_the_cache(model: str, file: Path, tmp_path: Path, asked: dict[str, Any]) -> None:
    options = (
        "--layers -1 --pooling mean --positions 0,2,-1 --exclude-special-tokens --no-perplexity --logits all --top-k 4 "
        "--truncate left --generation-prompt --exact --dtype float32 --device cpu --batch-size 2 --max-batch-tokens 64"
    )
    result = _run(model, file, *shlex.split(options), cache=tmp_path / "cache")

    # Position 0 is BOS in every prompt, which is left out; the others are there.
    assert result.exit_code == 0, result.output
    assert asked == {
        "model": model, "revision": None, "cache_dir": tmp_path / "cache",
        "layers": "-1", "pooling": "mean", "cache_pooled": True, "positions": [0, 2, -1],
        "exclude_special_tokens": True, "compute_perplexity": False,
        "cache_logits": True, "logit_positions": "all", "logit_top_k": 4,
        "truncate": "left", "generation_prompt": True, "exact": True, "dtype": "float32", "device": "cpu",
        "batch_size": 2, "max_batch_tokens": 64, "backend": "local", "remote": False, "api_base": None,
        "engine_options": {},
    }  # fmt: skip
    assert "logits=0 cached + 3 extracted" in result.stdout


def test_what_runs_the_model_reaches_the_cache(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("one\n")

    refused = _run("m", file, *shlex.split("--backend vllm --device cuda:1"), cache=tmp_path / "cache")
    away = _run("m", file, *shlex.split("--backend api --api-base http://127.0.0.1:9/v1"), cache=tmp_path / "cache")

    assert (refused.exit_code, away.exit_code) == (2, 1)
    assert "device means nothing to backend='vllm'" in refused.stderr
    assert "API_KEY" in away.stderr


def test_what_loading_has_by_itself_is_no_option_of_the_engine(
    model: str, file: Path, tmp_path: Path, asked: dict[str, Any]
) -> None:
    for given, place in (("dtype=float32", "--dtype"), ("max_batch_tokens=9", "--max-batch-tokens")):
        refused = _run(model, file, "--engine-option", given, cache=tmp_path / "cache")
        assert refused.exit_code == 2
        assert f"{given.partition('=')[0]} goes with {place}." in refused.stderr

    options = "--engine-option attention=eager --engine-option share_prefixes=false"
    result = _run(model, file, *shlex.split(options), cache=tmp_path / "cache")

    assert result.exit_code == 0, result.output
    assert (asked["attention"], asked["engine_options"]) == ("eager", {"share_prefixes": False})


def test_another_tokenizer_of_a_service_makes_other_rows(
    model: str, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[FakeEngine] = []

    def load(_model: str, *, tokenizer: str, **_options: Any) -> FakeEngine:
        opened.append(FakeEngine(dtype="bfloat16", named={"engine": "api", "tokenizer": tokenizer}))
        return opened[-1]

    monkeypatch.setattr("streamtap.workbench.served_model.load_engine", load)
    other = Path(shutil.copytree(model, tmp_path / "other"))
    tiny_tokenizer(adds_bos=False).save_pretrained(other)
    counts = [
        _numbers(_run("m", file, *shlex.split(f"--backend api --engine-option tokenizer={folder}"), cache=tmp_path))
        for folder in (model, other, model)
    ]

    assert counts == [[0, 3, 0, 3], [0, 3, 0, 3], [3, 0, 3, 0]]
    assert [engine.closed for engine in opened] == [True, True]


def test_choices_are_those_of_the_library() -> None:
    assert next(each for each in extract.params if each.name == "backend").type.choices == BACKENDS
    assert _POOLINGS == POOLINGS
    assert _FORMATS == FORMATS


def test_standard_input_is_text(model: str, tmp_path: Path) -> None:
    result = _run(model, "-", "--limit", "2", cache=tmp_path / "cache", input="one\ntwo\nthree\n")

    assert result.exit_code == 0, result.output
    assert "2 from standard input" in result.stdout


def test_one_token_has_no_perplexity_and_says_so(model: str, tmp_path: Path) -> None:
    path = tmp_path / "ids.jsonl"
    path.write_text("[5]\n[6, 7, 8]\n")

    assert "1 of one token have none" in _run(model, path, cache=tmp_path / "cache").stdout
    assert "of no prompt: each has one token only" in _run(model, path, "--limit", "1", cache=tmp_path / "cache").stdout


def test_what_is_cut_is_said(model: str, tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    path.write_text("x" * 300)

    refused = _run(model, path, cache=tmp_path / "cache")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert refused.stderr.startswith("error: prompt 0 has 301 tokens; there is room for 256,")
    assert (
        "1 prompt longer than the context" in _run(model, path, "--truncate", "left", cache=tmp_path / "cache").stdout
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--layers", "7"], "error: layer 7 is not in the model"),
        (["--layers", "some"], "error: layers 'some' is not understood"),
        (["--positions", "many"], "error: positions 'many' is not understood"),
        (["--dtype", "int3"], "error: dtype must be one of"),
        (["--device", "quantum"], "error: device 'quantum' is not on this machine"),
        (["--revision", "v2"], "error: revision='v2' means nothing for"),
        (["--column", "text"], "error: prompts.txt is read as text, which has no column"),
        (["--format", "parquet"], "error: prompts.txt is not a Parquet file"),
        (["--top-k", "3"], "Error: --top-k needs --logits"),
        (["--overwrite"], "Error: --with-text and --overwrite need --out"),
    ],
)
def test_what_cannot_be_is_one_sentence(options: list[str], said: str, model: str, file: Path, tmp_path: Path) -> None:
    result = _run(model, file, *options, cache=tmp_path / "cache")

    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr
    assert "Traceback" not in result.stderr


def test_a_position_that_a_prompt_lacks_is_named(model: str, file: Path, tmp_path: Path) -> None:
    result = _run(model, file, "--positions", "40", cache=tmp_path / "cache")

    assert result.exit_code == 2
    assert "error: prompt 0: position 40 is outside its 24 tokens" in result.stderr


def test_a_bad_place_to_write_is_refused_before_any_work(model: str, file: Path, tmp_path: Path) -> None:
    result = _run(model, file, "--out", str(tmp_path), cache=tmp_path / "cache")

    assert result.exit_code == 2
    assert "is not empty; name another folder" in result.stderr
    assert not (tmp_path / "cache").exists()


def test_a_file_that_is_not_there_is_an_error(model: str, tmp_path: Path) -> None:
    result = _run(model, tmp_path / "none.txt", cache=tmp_path / "cache")

    assert (result.exit_code, result.stderr) == (1, f"error: No such file or directory: {tmp_path / 'none.txt'}\n")


def test_a_full_disk_is_refused_before_a_run(
    model: str, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 100})
    monkeypatch.setattr("shutil.disk_usage", lambda _path: usage)

    result = _run(model, file, cache=tmp_path / "cache")

    assert result.exit_code == 1
    assert re.search(r"^cache +.*, 100 B free$", result.stdout, re.MULTILINE)
    assert "error: this run would write about" in result.stderr


def test_a_stopped_run_says_that_it_goes_on(
    model: str, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(UnifiedCache, "warmup", stop)

    result = _run(model, file, cache=tmp_path / "cache")

    assert result.exit_code == 1
    assert "what was extracted is kept" in result.stderr


def test_in_a_pipe_there_is_only_text_and_no_model_when_all_is_cached(model: str, file: Path, tmp_path: Path) -> None:
    program = (
        "import sys; from streamtap.cli.main import main; main(sys.argv[1:], standalone_mode=False); "
        "print('torch' in sys.modules, 'transformers' in sys.modules, file=sys.stderr)"
    )
    options = ["extract", str(file), "--model", model, "--cache-dir", str(tmp_path / "cache")]

    first = CliRunner().invoke(main, options)
    again = subprocess.run([sys.executable, "-c", program, *options], capture_output=True, text=True, check=True)

    assert (_numbers(first), again.stderr) == ([0, 3, 0, 3], "False False\n")
    assert "activations=3 cached + 0 extracted, perplexity=3 cached + 0 extracted" in again.stdout
    assert "\x1b" not in again.stdout


def test_documentation_names_every_option() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "command-line.md").read_text()

    named = {option for parameter in extract.params for option in parameter.opts if option.startswith("--")}
    assert {option for option in named if f"`{option}" not in page} == set()
