from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from click.testing import CliRunner

from streamtap.cli import dev as dev_module
from streamtap.cli.dev import dev

# A shell that starts the tests in the background has them, and all their children, ignore Ctrl-C.
RUN = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from streamtap.cli.dev import dev
dev()
"""


def test_it_serves_until_it_is_interrupted(tmp_path: Path) -> None:
    command = [sys.executable, "-u", "-c", RUN, "hub", "--dir", str(tmp_path / "hub"), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout
        lines = [running.stdout.readline() for _ in range(8)]
        endpoint = re.fullmatch(r"  export HF_ENDPOINT=(http://127\.0\.0\.1:\d+)\n", lines[3])
        assert endpoint
        assert urllib.request.urlopen(endpoint[1]).status == 200
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=20)

    assert (running.returncode, err) == (0, "")
    assert out == "\nStopped.\n"


def test_it_says_what_to_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dev_module, "_until_interrupted", lambda: None)

    def run(*options: str) -> str:
        return CliRunner().invoke(dev, ["hub", "--dir", os.fspath(tmp_path), "--port", "0", *options]).stdout

    plain, xet = run("--token", "hf_mine"), run("--xet")
    assert f"keeps its repositories in {tmp_path}." in plain
    assert "  export HF_TOKEN=hf_mine\n  export HF_HUB_DISABLE_XET=1\n" in plain
    assert "  export HF_TOKEN=hf_test\n\n" in xet


def test_a_folder_must_be_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    assert CliRunner().invoke(dev, ["hub"]).exit_code == 2
    assert "is a file" in CliRunner().invoke(dev, ["hub", "--dir", str(tmp_path / "file")]).stderr
