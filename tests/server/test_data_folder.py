from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from streamtap.errors import SettingsError
from streamtap.server.data_folder import only_gateway_of

HOLD = """
import pathlib, sys
from streamtap.server.data_folder import only_gateway_of
with only_gateway_of(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_folder_has_one_gateway_and_is_free_after_it(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "data"

    with only_gateway_of(folder):
        with (
            pytest.raises(SettingsError, match=r"another gateway uses data_dir .*data; stop it"),
            only_gateway_of(folder),
        ):
            pass
        with only_gateway_of(tmp_path / "other"):
            pass
    with only_gateway_of(folder):
        pass


def test_a_gateway_that_was_killed_holds_no_folder(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(SettingsError, match="another gateway"), only_gateway_of(tmp_path):
            pass
        holder.send_signal(signal.SIGKILL)

    with only_gateway_of(tmp_path):
        pass


def test_a_folder_has_a_name_that_stays_and_that_no_other_has(tmp_path: Path) -> None:
    names = []
    for folder in ("a", "a", "b", "b"):
        with only_gateway_of(tmp_path / folder) as owner:
            names.append(owner)

    assert names[0] == names[1] != names[2] == names[3]
    assert all(re.fullmatch("[0-9a-f]{32}", name) for name in names)


@pytest.mark.parametrize("text", ["", "123\n", "0" * 33])
def test_a_lock_file_without_a_name_gets_one(text: str, tmp_path: Path) -> None:
    (tmp_path / "gateway.lock").write_text(text)

    with only_gateway_of(tmp_path) as first:
        pass
    with only_gateway_of(tmp_path) as second:
        pass

    assert first == second
    assert (tmp_path / "gateway.lock").read_text() == first


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with (
        pytest.raises(SettingsError, match="file/data cannot be used: Not a directory"),
        only_gateway_of(tmp_path / "file" / "data"),
    ):
        pass
