from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from streamtap.dataset.outgoing import Outgoing

CRASH = """
import os, signal, sys
from pathlib import Path
from streamtap.dataset.outgoing import Outgoing
Outgoing(Path(sys.argv[1])).room("tensors/a").write_bytes(b"left")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_room_has_its_folder_and_is_gone_after_close(tmp_path: Path) -> None:
    outgoing = Outgoing(tmp_path / "out")
    file = outgoing.room("tensors/a")
    file.write_bytes(b"x")

    assert outgoing.room("tensors/a") == file
    outgoing.close()
    outgoing.close()
    assert list((tmp_path / "out").iterdir()) == []


def test_two_users_do_not_meet(tmp_path: Path) -> None:
    first, second = Outgoing(tmp_path), Outgoing(tmp_path)

    assert first.room("a").parent != second.room("a").parent
    second.close()
    assert first.room("a").parent.is_dir()
    first.close()


def test_a_sweep_takes_what_the_dead_left_and_nothing_else(tmp_path: Path) -> None:
    living = Outgoing(tmp_path)
    file = living.room("a")
    file.write_bytes(b"mine")
    died = subprocess.run([sys.executable, "-c", CRASH, str(tmp_path)], env=dict(os.environ), check=False)
    assert died.returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 4

    living.sweep()
    Outgoing(tmp_path).sweep()
    assert sorted(tmp_path.iterdir()) == sorted([file.parent, file.parent.with_suffix(".lock")])
    assert file.read_bytes() == b"mine"
    living.close()


def test_a_sweep_of_nothing_is_fine(tmp_path: Path) -> None:
    Outgoing(tmp_path / "never").sweep()

    assert not (tmp_path / "never").exists()
