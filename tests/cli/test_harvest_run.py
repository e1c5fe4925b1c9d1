"""``streamtap harvest run``: a file of prompts or documents to a run's folder, from the command line."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result
from rich.console import Console
from rich.progress import Progress

from streamtap.cli import harvest as harvest_module
from streamtap.cli.harvest import _FORMATS, _POOLINGS, JOBS, JOBS_MODULE, harvest, run
from streamtap.cli.harvest_bar import HarvestBar
from streamtap.cli.main import main
from streamtap.engines.opening import load_engine
from streamtap.harvest import local
from streamtap.harvest.local import OnCluster
from streamtap.harvest.rows_done import RunProgress
from streamtap.harvested.reader import HarvestedRun
from streamtap.pooling import POOLINGS
from streamtap.spec import CaptureSpec
from streamtap.workbench.prompt_files import FORMATS

PROMPTS = [f"The cat number {i} sat on the mat{'.' * (i % 5)}" for i in range(20)]


def _run(model: str, file: Path | str, *options: str, out: Path, **more: Any) -> Result:
    arguments = ["harvest", "run", str(file), "--model", model, "--out", str(out), *options]
    return CliRunner().invoke(main, arguments, **more)


def test_rows_are_those_of_the_engine(model: str, file: Path, tmp_path: Path) -> None:
    result = _run(model, file, "--layers", "0,2", out=tmp_path / "run")

    assert result.exit_code == 0, result.output
    found = HarvestedRun.open(tmp_path / "run")
    found.verify()
    engine = load_engine(model)
    expected = next(engine.capture(PROMPTS, CaptureSpec(layers=[0, 2], dtype="bfloat16")))
    assert len(found) == 20
    for i in range(20):
        for layer, rows in found.prompt(i).items():
            mine = expected.acts[layer][expected.offsets[i] : expected.offsets[i + 1]]
            assert rows.dtype == ml_dtypes.bfloat16
            assert np.allclose(rows.astype(np.float32), mine.astype(np.float32), rtol=2e-2, atol=2e-2)
    assert re.search(r"^model +.*, 3 layers, hidden 32, float32$", result.stdout, re.MULTILINE)
    assert re.search(r"^from +prompts.txt, 20 rows$", result.stdout, re.MULTILINE)
    assert re.search(r"^prompts +20$", result.stdout, re.MULTILINE)
    assert re.search(r"^holds +activations, bfloat16, 1 shard, [\d.]+ kB$", result.stdout, re.MULTILINE)
    assert re.search(r"^ran +\d+ tokens in [\d.]+ s, \d+ tokens/s$", result.stdout, re.MULTILINE)
    for prompt in PROMPTS:
        assert prompt not in result.output


def test_the_same_command_goes_on_and_then_says_that_all_is_there(
    model: str, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapped, calls = local.run_harvest, iter(range(100))

    def stopped(*args: Any, **named: Any) -> Any:
        def interrupt() -> bool:
            if next(calls) == 2:
                raise KeyboardInterrupt
            return False

        return wrapped(*args, **named | {"should_stop": interrupt})

    with monkeypatch.context() as patch:
        patch.setattr(local, "run_harvest", stopped)
        first = _run(model, file, "--shard-size", "4", out=tmp_path / "run")
    whole = len(list((tmp_path / "run").glob("whole_*")))
    second = _run(model, file, "--shard-size", "4", out=tmp_path / "run")
    third = _run(model, file, "--shard-size", "4", out=tmp_path / "run")

    assert (first.exit_code, second.exit_code, third.exit_code) == (1, 0, 0), second.output
    assert "the shards that are whole stay, and the same command goes on from there" in first.stderr
    assert whole >= 1
    assert re.search(r"^ran +\d+ tokens in .* tokens/s; \d+ were whole before$", second.stdout, re.MULTILINE)
    assert "ran      nothing: it was whole already" in third.stdout
    assert not (tmp_path / "run" / ".spool").exists()


def test_a_budget_that_ends_the_input_is_told(model: str, file: Path, tmp_path: Path) -> None:
    result = _run(model, file, "--max-tokens", "60", out=tmp_path / "run")

    assert result.exit_code == 0, result.output
    done = len(HarvestedRun.open(tmp_path / "run"))
    assert 0 < done < 20
    assert re.search(rf"^read +{done} of 20 rows: what --max-tokens has room for$", result.stdout, re.MULTILINE)


def _take_ctrl_c() -> None:
    # A shell's job in the background ignores it, and so would all that it starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_ctrl_c_in_a_real_process_leaves_a_run_that_goes_on(model: str, tmp_path: Path) -> None:
    """As a terminal does it: the signal comes wherever the program is."""
    path = tmp_path / "many.jsonl"
    path.write_text("".join(json.dumps({"text": f"prompt {i} " + "word " * (i % 12)}) + "\n" for i in range(1600)))
    out = tmp_path / "run"
    command = [sys.executable, "-m", "streamtap", "harvest", "run", str(path), "--model", model, "--out", str(out)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=_take_ctrl_c
    )
    deadline = time.monotonic() + 60
    while len(list(out.glob("whole_*"))) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    printed, said = process.communicate(timeout=60)

    assert process.returncode == 1, said
    assert "stopped; the shards that are whole stay" in said
    assert "Traceback" not in said
    assert "prompt 1" not in printed + said
    whole = len(list(out.glob("whole_*")))
    assert 3 <= whole < 50
    assert not list(out.glob("*.part"))
    result = _run(model, path, out=out)
    assert result.exit_code == 0, result.output
    assert not list(out.rglob("*.part"))
    HarvestedRun.open(out).verify()
    assert len(HarvestedRun.open(out)) == 1600


def test_documents_are_cut_into_windows(model: str, tmp_path: Path) -> None:
    path = tmp_path / "corpus.parquet"
    texts = ["a" * 100, "", None, "bcd"]
    pq.write_table(pa.table({"id": range(4), "body": texts}), path)

    result = _run(model, path, "--column", "body", "--chunk", "--context", "16", "--layers", "1", out=tmp_path / "run")
    packed = _run(model, path, "--pack", "--context", "16", "--layers", "1", out=tmp_path / "packed")

    assert (result.exit_code, packed.exit_code) == (0, 0), result.output + packed.output
    found = HarvestedRun.open(tmp_path / "run")
    segments = [found.segments(i) for i in range(len(found))]
    assert [s.documents.tolist() for s in segments if s] == [[0]] * 7 + [[3]]
    assert [len(found.token_ids(i)) for i in range(len(found))] == [16] * 6 + [11, 4]
    joined = HarvestedRun.open(tmp_path / "packed")
    last = joined.segments(len(joined) - 1)
    assert last is not None
    assert last.documents.tolist() == [0, 3]
    assert last.starts.tolist()[1] == 11


def test_options_reach_the_run(model: str, file: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "directions.npy", np.random.default_rng(0).normal(size=(3, 32)))
    words = (
        "--layers -1 --positions 0,-1 --pooling max --no-special-tokens --compression zstd --shard-size 7 "
        "--batch-size 2 --context 12 --max-tokens 120 --limit 15 --run-id mine --device cpu --model-dtype bfloat16"
    )
    options = [*words.split(), "--project-onto", str(tmp_path / "directions.npy")]
    result = _run(model, file, *options, out=tmp_path / "run")

    assert result.exit_code == 0, result.output
    manifest = HarvestedRun.open(tmp_path / "run").manifest
    assert (manifest.run_id, manifest.layer_indices, manifest.n_prompts) == ("mine", (2,), 10)
    assert manifest.capture == {"positions": [0, -1], "pooling": "max"}
    assert (manifest.contents, manifest.dtype, manifest.compression) == ("projections", "float32", "zstd")
    assert manifest.add_special_tokens is False
    assert manifest.provenance["dtype"] == "bfloat16"
    assert [len(shard.prompt_indices) for shard in manifest.shards] == [7, 3]
    assert "prompts  10, of which 10 longer than the context lost their end" in result.stdout


def test_standard_input_is_text(model: str, tmp_path: Path) -> None:
    result = _run(model, "-", "--dtype", "float32", out=tmp_path / "run", input="one\ntwo\n")

    assert result.exit_code == 0, result.output
    assert "from   standard input\n" in result.stdout
    assert HarvestedRun.open(tmp_path / "run").manifest.dtype == "float32"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--layers", "7"], "error: layer 7 is not in the model"),
        (["--positions", "many"], "error: positions 'many' is not understood"),
        (["--positions", "role:user"], "error: positions of a harvest are"),
        (["--positions", "90"], "error: prompt 0: position 90 is outside its"),
        (["--context", "999"], "error: context must be at most the model's, 256 tokens; got 999"),
        (["--max-tokens", "1"], "error: the first has"),
        (["--device", "quantum"], "error: device 'quantum' is not on this machine"),
        (["--column", "text"], "error: prompts.txt is read as text, which has no column"),
        (["--split", "test"], "error: config, split and revision are of datasets on the Hub"),
        (["--run-id", "../x"], "error: run_id must be letters"),
        (["--project-onto", "prompts.txt"], "error: prompts.txt is not a .npy file of numbers"),
        (["--project-onto", "words.npy"], "error: words.npy must hold one array of numbers"),
        (["--project-onto", "objects.npy"], "error: objects.npy is not a .npy file of numbers"),
        (["--project-onto", "several.npz"], "error: several.npz must hold one array of numbers"),
        (["--project-onto", "narrow.npy"], "error: directions are 3 wide; rows of"),
        (["--engines", "2"], "Error: --engines needs --cluster."),
        (["--cpus-per-engine", "2"], "Error: --cpus-per-engine needs --cluster."),
        (["--backend", "vllm", "--device", "cuda:1"], "error: device means nothing to backend='vllm'"),
        (["--api-base", "http://there/v1"], "error: api_base means nothing to backend='local'"),
        (["--engine-option", "share_prefix=true"], "error: share_prefix means nothing to backend='local'; it takes"),
        (["--engine-option", "share_prefixes"], "NAME=VALUE was expected; got 'share_prefixes'."),
        (["--engine-option", "device=cpu"], "device goes with --device."),
        (["--engine-option", "dtype=float32"], "dtype goes with --model-dtype."),
        (["--engine-option", "device_map=auto", "--backend", "api"], "device_map means nothing to backend='api'"),
        (["--engine-option", "api_key=x"], "api_key goes with STREAMTAP_API_KEY in the environment."),
        ([*2 * ("--engine-option", "share_prefixes=true")], "share_prefixes is given twice."),
    ],
)
def test_what_cannot_be_is_one_sentence_and_leaves_no_run(
    options: list[str], said: str, model: str, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("words.npy", np.array(["a"]))
    np.save("objects.npy", np.array([{}]), allow_pickle=True)
    np.save("narrow.npy", np.ones((1, 3)))
    np.savez("several.npz", a=np.ones(3))
    result = _run(model, file, *options, out=tmp_path / "run")

    assert result.exit_code == 2, result.output
    assert said in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "run" / "run.json").exists()


def test_a_place_that_takes_no_files_is_told_before_a_model_is_read(file: Path) -> None:
    result = _run("no/such-model", file, out=file / "run")

    assert result.exit_code == 2
    assert f"{file}/run cannot be written to ({file} is a file); name a folder of yours." in result.output


def test_a_blank_line_is_refused_as_a_prompt(model: str, tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_text("a\n\nb\n")

    assert "error: p.txt, line 2 is blank" in _run(model, path, out=tmp_path / "run").stderr
    assert _run(model, path, "--chunk", out=tmp_path / "run").exit_code == 0


def test_another_run_at_the_place_is_said(model: str, file: Path, tmp_path: Path) -> None:
    _run(model, file, "--layers", "0", out=tmp_path / "run")
    result = _run(model, file, "--layers", "1", out=tmp_path / "run")

    assert result.exit_code == 1
    assert re.search(r"error: .* holds a run with layers \[0\], and this one has \[1\]; name another", result.stderr)


def test_a_cluster_gets_the_model_by_name_and_what_was_asked(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    class Enough(Exception):
        pass

    def record(prompts: Iterator[Any], **options: Any) -> None:
        asked.update(options, prompts=[each.text for each in prompts])
        raise Enough

    monkeypatch.setattr(local, "harvest_prompts", record)
    words = """--cluster ray://head:10001 --engines 4 --cpus-per-engine 2 --gpus-per-engine 0.5 --layers 8 --revision v1
        --model-dtype float32 --backend vllm --engine-option tensor_parallel_size=4
        --engine-option distributed_executor=ray"""
    result = _run("some/model", file, *words.split(), out=tmp_path / "run")

    assert isinstance(result.exception, SystemExit)
    assert asked.pop("on_progress")
    assert asked == {
        "prompts": PROMPTS, "out": str(tmp_path / "run"), "model": "some/model", "layers": "8",
        "cluster": OnCluster("ray://head:10001", cpus_per_engine=2, gpus_per_engine=0.5, engines=4),
        "dtype": "bfloat16", "model_dtype": "float32", "revision": "v1",
        "backend": "vllm", "tensor_parallel_size": 4, "distributed_executor": "ray",
        "positions": "all", "pooling": "none", "project_onto": None, "add_special_tokens": True, "context": None,
        "chunk": False, "pack": False,
        "max_tokens": None, "shard_size": 32, "batch_size": None, "compression": "none", "run_id": None,
    }  # fmt: skip


def test_a_bar_counts_rows_or_tokens_whichever_is_further() -> None:
    with Progress(console=Console(quiet=True)) as shown:
        bar = HarvestBar(shown, 100, 1000)
        bar.tell(RunProgress(1, 20, 900, 300, rows_done=50))
        assert shown.tasks[0].completed == pytest.approx(0.9)
        assert bar.tokens_run == 600
        bar.tell(RunProgress(2, 40, 910, 300, rows_done=100))
        assert shown.tasks[0].completed == 1
        assert "40 prompts, " in shown.tasks[0].fields["said"]
        endless = HarvestBar(shown, None, None)
        endless.tell(RunProgress(1, 2, 3, 0, rows_done=2))
        assert shown.tasks[1].total is None


def test_time_left_is_reckoned_from_what_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("streamtap.cli.harvest_bar.time.monotonic", lambda: now[0])
    with Progress(console=Console(quiet=True), get_time=lambda: 0.0) as shown:
        bar = HarvestBar(shown, 100, None)
        bar.tell(RunProgress(1, 50, 500, 500, rows_done=50))
        now[0] += 30
        bar.tell(RunProgress(2, 60, 600, 500, rows_done=60))
        assert shown.tasks[0].fields["said"] == "60 prompts, 3 tokens/s, 0:02:00 left"
        now[0] += 120
        bar.tell(RunProgress(3, 100, 1000, 500, rows_done=100))
        assert shown.tasks[0].fields["said"] == "100 prompts, 3 tokens/s"


def test_a_bar_is_shown_where_the_settings_say_so(
    model: str, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STREAMTAP_PROGRESS", "on")
    shown = _run(model, file, out=tmp_path / "one")
    monkeypatch.setenv("STREAMTAP_PROGRESS", "off")
    silent = _run(model, file, out=tmp_path / "two")

    assert re.search(r"harvesting.*20 prompts, \d+ tokens/s", shown.stderr, re.DOTALL)
    assert "harvesting" not in silent.stderr


def test_choices_are_those_of_the_library() -> None:
    assert set(_POOLINGS) == set(POOLINGS)
    assert _FORMATS == FORMATS


def test_the_group_names_every_command_of_jobs() -> None:
    commands = [command.name for command in __import__(JOBS_MODULE, fromlist=["COMMANDS"]).COMMANDS]

    assert set(commands) == set(JOBS)
    assert harvest.list_commands(None) == ["run", *JOBS]  # type: ignore[arg-type]
    for name in ["run", *JOBS]:
        assert CliRunner().invoke(main, ["harvest", name, "--help"]).exit_code == 0
    assert CliRunner().invoke(main, ["harvest", "nothing"]).exit_code == 2


def test_asking_for_help_loads_no_model() -> None:
    program = (
        "import sys; from streamtap.cli.main import main; main(['harvest', 'run', '--help'], standalone_mode=False); "
        "print([name for name in ('torch', 'transformers', 'ray', 'pyarrow', 'httpx2') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert done.stdout.splitlines()[-1] == "[]"


def test_documentation_names_every_option() -> None:
    docs = Path(__file__).resolve().parents[2] / "docs"
    pages = (docs / "harvest.md").read_text() + (docs / "command-line.md").read_text()

    named = {option for parameter in run.params for option in parameter.opts if option.startswith("--")}
    assert {option for option in named if f"`{option}" not in pages} == set()
    assert harvest_module.__doc__
