from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from streamtap.activations import Activations
from streamtap.cli import doctor_engine
from streamtap.cli.main import main
from streamtap.engines import dialect_engine, opening
from streamtap.engines.references import find_model
from streamtap.engines.self_check_reference import (
    Reference,
    keep_reference,
    read_reference,
    reference_ids,
    write_reference,
)
from streamtap.engines.tokenizing import PromptTokenizer
from streamtap.errors import CaptureMissed
from streamtap.settings import Settings
from streamtap.spec import CaptureSpec
from streamtap.testing.fake_engine import FakeEngine
from streamtap.testing.models import tiny_model
from streamtap.testing.tokenizers import tiny_tokenizer

FAKE = FakeEngine(n_layers=4, hidden=8)


class _Shifted(FakeEngine):
    """Gives each layer's successor."""

    def capture(self, prompts: Any, spec: CaptureSpec, *, ordered: bool = True) -> Iterator[Activations]:
        for part in FAKE.capture(prompts, spec, ordered=ordered):
            yield dataclasses.replace(part, acts={k: part.acts[min(k + 1, 3)] for k in part.acts})


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that says what the fake engine is, without weights or tokenizer."""
    folder = tmp_path / "fake-model"
    folder.mkdir()
    about = {"model_type": "llama", "num_hidden_layers": 4, "hidden_size": 8, "vocab_size": 97}
    (folder / "config.json").write_text(json.dumps(about))
    return folder


@pytest.fixture
def reference(model: Path) -> Reference:
    ids = reference_ids(PromptTokenizer(None, vocabulary=97))
    commit = find_model(str(model), settings=Settings.from_environment()).commit or ""
    return Reference(np.stack([FAKE.rows(ids, k) for k in range(4)]), ids, "fake", commit, "by hand")


@pytest.fixture
def kept(model: Path, reference: Reference, tmp_path: Path) -> Path:
    """The fake model with its reference in the cache."""
    settings = Settings(cache_dir=tmp_path / "cache", hub_cache_dir=tmp_path / "hub")
    keep_reference(reference, str(model), settings=settings)
    return model


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What engines are loaded with; ``engine`` is what they are."""
    calls: dict[str, Any] = {"engine": FakeEngine(n_layers=4, hidden=8), "asked": []}

    def load_engine(name: str, **options: Any) -> Any:
        calls["asked"].append((name, options))
        return calls["engine"]

    def load(url: str, **options: Any) -> Any:
        calls["asked"].append((url, options))
        if isinstance(calls["engine"], Exception):
            raise calls["engine"]
        return calls["engine"]

    monkeypatch.setattr(opening, "load_engine", load_engine)
    monkeypatch.setattr(dialect_engine.DialectEngine, "load", staticmethod(load))
    return calls


def _run(tmp_path: Path, *options: str, **env: str) -> Result:
    return CliRunner().invoke(main, ["doctor", *options], env={"STREAMTAP_CACHE_DIR": str(tmp_path / "cache"), **env})


def test_a_right_engine_passes_with_two_numbers_a_layer(tmp_path: Path, kept: Path, loads: dict[str, Any]) -> None:
    result = _run(tmp_path, "--engine", "vllm", "--model", str(kept), "--dtype", "float32", "--revision", "r")

    assert result.exit_code == 2  # a folder has no revisions, and that is said before anything is loaded
    result = _run(tmp_path, "--engine", "vllm", "--model", str(kept), "--dtype", "float32")
    lines = result.stdout.splitlines()
    assert result.exit_code == 0, result.output
    assert lines[0] == f"engine     {kept} on vllm, float32"
    assert lines[1] == "reference  fake in float32: 4 layers, hidden 8, 24 tokens"
    assert lines[2] == "made by    by hand"
    assert lines[3] == "promised   cosine at least 0.99999, relative error at most 0.001"
    assert lines[5].split() == ["layer", "cosine", "relative", "verdict"]
    assert [line.split() for line in lines[6:10]] == [[str(k), "1.000000", "0.0e+00", "fits"] for k in range(4)]
    assert lines[-1] == "passed"
    assert loads["asked"] == [(str(kept), {"backend": "vllm", "dtype": "float32"})]
    assert loads["engine"].closed


def test_a_shifted_engine_is_refused_by_name(tmp_path: Path, kept: Path, loads: dict[str, Any]) -> None:
    loads["engine"] = _Shifted(n_layers=4, hidden=8)

    result = _run(tmp_path, "--engine", "nnsight", "--model", str(kept))

    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1] == (
        f"refused: layer 0 of {kept} on nnsight is layer 1's output: it is shifted by one; so it is with 3 of 4 layers"
    )


def test_json_holds_every_number(tmp_path: Path, kept: Path, reference: Reference, loads: dict[str, Any]) -> None:
    loads["engine"] = _Shifted(n_layers=4, hidden=8)

    result = _run(tmp_path, "--engine", "local", "--model", str(kept), "--json")

    found = json.loads(result.stdout)
    assert result.exit_code == 1
    assert (found["passed"], found["dtype"]) == (False, "float32")
    assert "layer 0 of" in found["fault"]
    assert found["promised"] == {"cosine": 0.99999, "relative": 0.001}
    about = {"model": "fake", "commit": reference.commit, "made_by": "by hand", "tokens": 24}
    assert found["reference"] == about
    assert [each["nearest"] for each in found["layers"]] == [1, 2, 3, 3]
    assert [each["verdict"] for each in found["layers"]] == ["shifted", "shifted", "shifted", "fits"]


def test_json_has_null_where_there_is_no_number(tmp_path: Path, kept: Path, loads: dict[str, Any]) -> None:
    class NotFinite(FakeEngine):
        def capture(self, prompts: Any, spec: CaptureSpec, *, ordered: bool = True) -> Iterator[Activations]:
            for part in FAKE.capture(prompts, spec, ordered=ordered):
                yield dataclasses.replace(part, acts=part.acts | {2: part.acts[2] * np.nan})

    loads["engine"] = NotFinite(n_layers=4, hidden=8)

    result = _run(tmp_path, "--engine", "local", "--model", str(kept), "--json")

    layer = json.loads(result.stdout)["layers"][2]
    assert layer == {"layer": 2, "cosine": None, "relative": None, "verdict": "not finite", "nearest": None}


def test_what_a_library_prints_is_no_part_of_the_result(
    tmp_path: Path, kept: Path, loads: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    class Talking(FakeEngine):
        def capture(self, prompts: Any, spec: CaptureSpec, *, ordered: bool = True) -> Iterator[Activations]:
            sys.stdout.write("from this process\n")
            subprocess.run(["echo", "from one that it starts"], check=True)
            yield from FAKE.capture(prompts, spec, ordered=ordered)

    loads["engine"] = Talking(n_layers=4, hidden=8)

    result = _run(tmp_path, "--engine", "vllm", "--model", str(kept), "--json")

    assert json.loads(result.stdout)["passed"]
    assert "from this process" in result.stderr
    assert capfd.readouterr() == ("", "from one that it starts\n")


def test_an_engine_process_is_asked_with_the_key_of_a_file_or_of_the_environment(
    tmp_path: Path, kept: Path, loads: dict[str, Any]
) -> None:
    (tmp_path / "key").write_text("from-a-file\n")
    url = ("--engine", "url", "--url", "http://127.0.0.1:9", "--model", str(kept))

    assert _run(tmp_path, *url, "--key-file", str(tmp_path / "key"), "--as", "org/x").exit_code == 0
    result = _run(tmp_path, *url, STREAMTAP_WORKER_KEY="from-outside")

    assert loads["asked"] == [
        ("http://127.0.0.1:9", {"key": "from-a-file", "model": "org/x", "shape": (4, 8)}),
        ("http://127.0.0.1:9", {"key": "from-outside", "model": None, "shape": (4, 8)}),
    ]
    assert "from-" not in result.output
    assert f"engine     {kept} at http://127.0.0.1:9, float32" in result.stdout


@pytest.mark.parametrize("text", ["", "\n", "schlüssel"])
def test_a_file_without_a_key_is_refused(tmp_path: Path, kept: Path, loads: dict[str, Any], text: str) -> None:
    (tmp_path / "key").write_text(text, encoding="utf-8")

    result = _run(tmp_path, "--engine=url", "--url=http://h", f"--model={kept}", f"--key-file={tmp_path / 'key'}")

    assert result.exit_code == 2
    assert "holds no key in one line of ASCII" in result.stderr
    assert loads["asked"] == []


def test_an_engine_that_captures_nothing_at_all_is_refused(tmp_path: Path, kept: Path, loads: dict[str, Any]) -> None:
    loads["engine"] = CaptureMissed("the engine answered without rows.", layer=0)

    result = _run(tmp_path, "--engine=url", "--url=http://h", f"--model={kept}", "--as=org/x")

    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1] == (
        "refused: org/x gives no whole capture: the engine answered without rows."
    )


def test_a_service_is_asked_for_its_own_name_of_the_model(tmp_path: Path, kept: Path, loads: dict[str, Any]) -> None:
    assert _run(tmp_path, "--engine=api", f"--model={kept}", "--as=small", "--api-base=http://h/v1").exit_code == 0

    assert loads["asked"] == [("small", {"backend": "api", "api_base": "http://h/v1"})]


def test_a_reference_goes_from_machine_to_machine(
    tmp_path: Path, model: Path, reference: Reference, loads: dict[str, Any]
) -> None:
    file = tmp_path / "there.safetensors"
    write_reference(reference, file)

    with_file = _run(tmp_path, "--engine=local", f"--model={model}", f"--reference={file}")
    assert with_file.exit_code == 0
    assert not list((tmp_path / "cache").glob("self-check/*.safetensors"))
    kept = _run(tmp_path, f"--reference={file}", f"--model={model}")
    assert kept.exit_code == 0
    assert kept.stderr.startswith("wrote the float32 reference of fake to ")
    assert _run(tmp_path, "--engine=local", f"--model={model}").exit_code == 0
    again = tmp_path / "again.safetensors"
    assert _run(tmp_path, f"--write-reference={again}", f"--model={model}").exit_code == 0
    np.testing.assert_array_equal(read_reference(again).rows, reference.rows)
    result = _run(tmp_path, f"--write-reference={again}", f"--model={model}")
    assert (result.exit_code, "is there already; name another file" in result.stderr) == (2, True)


def test_another_models_reference_is_refused(
    tmp_path: Path, model: Path, reference: Reference, loads: dict[str, Any]
) -> None:
    file = tmp_path / "other.safetensors"
    write_reference(dataclasses.replace(reference, commit="sha256:1"), file)

    for options in (("--engine=local", f"--model={model}"), (f"--model={model}",)):
        result = _run(tmp_path, *options, f"--reference={file}")
        assert result.exit_code == 2
        assert f"made of fake, is not of {model}: its commit is sha256:1" in " ".join(result.stderr.split())
    assert loads["asked"] == []
    assert not list((tmp_path / "cache").glob("self-check/*.safetensors"))
    # Of a model that only somebody else is said to have, the reference is all that is known.
    assert _run(tmp_path, "--engine=url", "--url=http://h", "--as=org/x", f"--reference={file}").exit_code == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--model=demo",), "name what is to be compared with --engine: local, nnsight, vllm, api, url."),
        (("--engine=url",), "--engine url needs --url"),
        (("--engine=local", "--url=http://h"), "--url goes with --engine url, not with local."),
        (("--engine=vllm", "--api-base=http://h"), "--api-base goes with --engine api, not with vllm."),
        (
            ("--engine=url", "--url=http://h", "--dtype=float32"),
            "--dtype goes with --engine local or nnsight or vllm or",
        ),
        (("--engine=local", "--as=x"), "--as goes with --engine api or url, not with local."),
        (("--write-reference=f", "--engine=local"), "--write-reference stands alone with --model; --engine goes with"),
        (("--reference=f", "--dtype=float32"), "--reference stands alone with --model, and is then kept"),
        (("--engine=tpu",), "'tpu' is not one of"),
    ],
)
def test_options_that_do_not_go_together_are_refused(tmp_path: Path, options: tuple[str, ...], said: str) -> None:
    result = _run(tmp_path, *options)

    assert result.exit_code == 2
    assert said in " ".join(result.stderr.replace("│", " ").split())


def test_a_gateway_finds_the_line_of_a_refusal() -> None:
    from streamtap.server.pool import self_checking

    assert self_checking._REFUSED == doctor_engine.REFUSED


def test_a_real_model_passes_in_bfloat16_and_the_second_time_from_what_was_kept(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    tiny_model("llama", std=0.1).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)

    first = _run(tmp_path, "--engine=local", f"--model={folder}", "--dtype=bfloat16", "--json")
    second = _run(tmp_path, "--engine=local", f"--model={folder}", "--dtype=float32", "--json")

    assert (first.exit_code, second.exit_code) == (0, 0), first.output + second.output
    assert "in float32 on the CPU once" in first.stderr
    assert second.stderr == ""
    narrow, wide = json.loads(first.stdout), json.loads(second.stdout)
    assert (narrow["dtype"], wide["dtype"]) == ("bfloat16", "float32")
    assert max(each["relative"] for each in wide["layers"]) < 1e-5
    assert 1e-4 < max(each["relative"] for each in narrow["layers"]) < 0.1
