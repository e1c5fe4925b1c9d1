"""``streamtap doctor``: what is installed, where things are kept, and what is missing; or how right an engine is."""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import click

import streamtap
from streamtap.cli.doctor_engine import OPTIONS, Asked, compare_engine
from streamtap.cli.options import with_options
from streamtap.cli.text import show, size
from streamtap.errors import StreamtapError
from streamtap.settings import Settings

#: Libraries that an installation has in any case, and those that an extra adds.
LIBRARIES = {
    "core": (
        *("numpy", "ml_dtypes", "scipy", "scikit-learn", "threadpoolctl", "pyarrow", "safetensors", "click", "rich"),
        *("httpx2", "orjson", "pybase64", "pydantic", "zstandard"),
    ),
    "local": ("torch", "transformers", "tokenizers", "accelerate"),
    "demo": ("gguf",),
    "plots": ("matplotlib",),
    "hub": ("huggingface_hub", "hf_xet"),
    "stores": ("obstore",),
    "corpora": ("datasets",),
    "ray": ("ray",),
    "nnsight": ("nnsight", "httpx", "websocket-client"),
    "serve": (
        *("alembic", "fastapi", "httptools", "prometheus_client", "psycopg", "sqlalchemy", "starlette"),
        *("tokenizers", "uvicorn"),
    ),
    "vllm": ("vllm", "vllm-lens"),
}


@click.command()
@with_options(OPTIONS)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def doctor(ctx: click.Context, /, as_json: bool, **asked: Any) -> None:
    """Print versions, devices, the cache's place, and which extras are there.

    With --engine, run one prompt on an engine and on the float32 reference instead, and print how far apart they are at
    each layer; the exit status is 1 where that is more than what is promised.
    """
    if not (check := Asked(**asked)).is_nothing:
        ctx.exit(compare_engine(check, as_json))
    found = examine(Settings.from_environment())
    show([json.dumps(found, indent=2)] if as_json else _lines(found))


def examine(settings: Settings) -> dict[str, Any]:
    """Everything that the command prints, as plain JSON values; sizes in bytes."""
    libraries = {name: _version(name) for names in LIBRARIES.values() for name in names}
    return {
        "streamtap": streamtap.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "libraries": libraries,
        "extras": _extras(libraries),
        "cores": _cores(),
        "devices": _devices(),
        "cache": _cache(settings.cache_dir),
        "hub_cache_dir": str(settings.hub_cache_dir),
        "demo_model": _demo_model(settings),
    }


def _extras(libraries: dict[str, str | None]) -> dict[str, bool]:
    present = {extra: all(libraries[name] for name in names) for extra, names in LIBRARIES.items()}
    del present["core"]
    # These also run a model.
    return present | {extra: present[extra] and present["local"] for extra in ("demo", "nnsight")}


def _version(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None


def _cores() -> int:
    # What this process may use, which a container or a batch system can make fewer than the machine has.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _devices() -> list[dict[str, Any]]:
    from streamtap.engines.devices import find_devices

    return [asdict(device) for device in find_devices()]


def _cache(folder: Path) -> dict[str, Any]:
    standing = next(path for path in (folder, *folder.parents) if path.is_dir())
    return {
        "folder": str(folder),
        "exists": folder.is_dir(),
        "writable": os.access(standing, os.W_OK | os.X_OK),
        "size_bytes": sum(_size(file) for file in folder.rglob("*")),
        "free_bytes": shutil.disk_usage(standing).free,
    }


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size if path.is_file() else 0
    except OSError:  # another process removed it in between
        return 0


def _demo_model(settings: Settings) -> dict[str, Any]:
    from streamtap.engines.demo_model import find_gguf

    try:
        return {"found": True, "path": str(find_gguf(settings)), "hint": None}
    except StreamtapError as error:
        return {"found": False, "path": None, "hint": str(error)}


def _lines(found: dict[str, Any]) -> Iterator[str]:
    yield f"streamtap {found['streamtap']}, Python {found['python']}, {found['platform']}"
    yield from ("", "libraries")
    shown: set[str] = set()
    for extra, names in LIBRARIES.items():
        hint = "pip install streamtap" if extra == "core" else f"pip install 'streamtap[{extra}]'"
        for name in names:
            if name in shown:
                continue
            shown.add(name)
            yield f"  {name:<14} {found['libraries'][name] or f'not installed: {hint}'}"
    yield from ("", "extras")
    for extra, present in found["extras"].items():
        yield f"  {extra:<14} {'yes' if present else 'no'}"
    yield from ("", "devices", f"  {'cores':<14} {found['cores']}")
    for device in found["devices"]:
        memory = device["memory_bytes"]
        yield f"  {device['name']:<14} {device['title']}" + (f", {size(memory)}" if memory else "")
    yield from _places(found)


def _places(found: dict[str, Any]) -> Iterator[str]:
    cache, model = found["cache"], found["demo_model"]
    held = size(cache["size_bytes"]) if cache["exists"] else "not made yet"
    yield from ("", "places")
    yield f"  {'cache':<14} {cache['folder']} ({held}; {size(cache['free_bytes'])} free)"
    if not cache["writable"]:
        yield f"  {'':<14} not writable: set STREAMTAP_CACHE_DIR to a folder that is"
    yield f"  {'Hub models':<14} {found['hub_cache_dir']}"
    yield f"  {'demo model':<14} {model['path'] or model['hint']}"
