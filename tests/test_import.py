from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import streamtap

HEAVY = ("torch", "transformers", "sklearn", "scipy", "pyarrow", "matplotlib", "rich", "click", "huggingface_hub")


def _loaded_after(code: str) -> set[str]:
    script = f"{code}\nimport sys\nprint(*sys.modules, sep='\\n')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "code",
    [
        "import streamtap",
        "import streamtap; dir(streamtap); streamtap.__version__",
        "from streamtap import CaptureSpec, Prompt, Activations, StreamtapError",
    ],
)
def test_import_loads_no_heavy_library(code: str) -> None:
    assert _loaded_after(code).isdisjoint(HEAVY)


def test_the_command_line_starts_without_a_heavy_library() -> None:
    loaded = _loaded_after(
        "import streamtap.cli.main as cli\nfor name in cli.COMMANDS: cli.main.get_command(None, name)"
    )

    assert loaded.isdisjoint(set(HEAVY) - {"click", "rich"})


def test_every_public_name_has_a_home() -> None:
    assert set(streamtap.__all__) == {*streamtap._HOMES, "__version__"}
    assert set(streamtap.__all__) <= set(dir(streamtap))


@pytest.mark.parametrize("name", sorted(streamtap._HOMES))
def test_a_public_name_is_the_one_its_module_defines(name: str) -> None:
    value = getattr(streamtap, name)

    assert value is getattr(importlib.import_module(streamtap._HOMES[name]), name)
    assert value.__module__ == streamtap._HOMES[name], "the home must be where it is defined, not passed on"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'streamtap' has no attribute 'Tap'"):
        _ = streamtap.Tap  # type: ignore[attr-defined]
