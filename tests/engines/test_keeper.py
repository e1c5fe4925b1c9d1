from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

KEEPER = [sys.executable, "-m", "streamtap.engines.keeper", "--grace-seconds", "0.3", "--"]
#: Writes its pid and that of a child of its own, then waits; a line in front says what SIGTERM does.
ENGINE = """
import os, signal, subprocess, sys, time
{on_term}
child = subprocess.Popen([sys.executable, "-c", {child!r}])
with open(sys.argv[1] + ".new", "w") as file:
    file.write(f"{{os.getpid()}} {{child.pid}}")
os.rename(sys.argv[1] + ".new", sys.argv[1])
time.sleep(60)
"""
IGNORES = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
CHILD = "import signal, time\n{}\ntime.sleep(60)"
POLITE = ENGINE.format(on_term="", child=CHILD.format(""))
STUBBORN = ENGINE.format(on_term=IGNORES, child=CHILD.format(IGNORES))


def until(said: Callable[[], bool], seconds: float = 20) -> bool:
    end = time.monotonic() + seconds
    while not said():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def is_there(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"  # a zombie holds nothing any more


def pids_in(file: Path) -> list[int]:
    assert until(file.exists)
    return [int(pid) for pid in file.read_text().split()]


def kept(*command: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([*KEEPER, *command], stdin=subprocess.PIPE, stderr=subprocess.PIPE)


def gone(pids: list[int]) -> bool:
    return until(lambda: not any(map(is_there, pids)))


@pytest.mark.parametrize(("code", "status"), [("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 15)", 143)])
def test_it_ends_with_the_status_of_its_command(code: str, status: int) -> None:
    with kept(sys.executable, "-c", code) as keeper:
        assert keeper.wait(20) == status


def test_a_command_that_is_not_there_is_named() -> None:
    with kept("no-such-command") as keeper:
        _, said = keeper.communicate(timeout=20)

    assert keeper.returncode == 127
    assert said == b"no-such-command cannot be run: No such file or directory.\n"


@pytest.mark.parametrize(("engine", "status"), [(POLITE, 143), (STUBBORN, 137)], ids=["polite", "stubborn"])
def test_a_closed_stdin_ends_the_whole_group(engine: str, status: int, tmp_path: Path) -> None:
    with kept(sys.executable, "-c", engine, str(tmp_path / "pids")) as keeper:
        pids = pids_in(tmp_path / "pids")
        assert all(map(is_there, pids))
        assert keeper.stdin is not None
        keeper.stdin.close()

        assert keeper.wait(20) == status
        assert not any(map(is_there, pids))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_whole_group(number: int, tmp_path: Path) -> None:
    with kept(sys.executable, "-c", STUBBORN, str(tmp_path / "pids")) as keeper:
        pids = pids_in(tmp_path / "pids")
        keeper.send_signal(number)

        assert keeper.wait(20) == 137
        assert not any(map(is_there, pids))


def test_what_the_command_leaves_behind_is_ended(tmp_path: Path) -> None:
    with kept(sys.executable, "-c", POLITE.replace("time.sleep(60)\n", ""), str(tmp_path / "pids")) as keeper:
        assert keeper.wait(20) == 0

        assert not any(map(is_there, pids_in(tmp_path / "pids")))


@pytest.mark.parametrize("engine", [POLITE, STUBBORN], ids=["polite", "stubborn"])
def test_nothing_outlives_a_parent_that_is_killed(engine: str, tmp_path: Path) -> None:
    command = [*KEEPER, sys.executable, "-c", engine, str(tmp_path / "pids")]
    code = f"import subprocess, time; subprocess.Popen({command!r}, stdin=subprocess.PIPE); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code]) as parent:
        pids = pids_in(tmp_path / "pids")
        assert all(map(is_there, pids))
        parent.kill()

    assert gone(pids)


def test_the_command_does_not_outlive_a_keeper_that_is_killed() -> None:
    with kept(sys.executable, "-c", f"import os; print(os.getpid(), flush=True); {CHILD.format('')}") as keeper:
        assert until(lambda: bool(children_of(keeper.pid)))
        pids = children_of(keeper.pid)
        keeper.kill()

    assert gone(pids)


def test_a_command_has_a_group_of_its_own(tmp_path: Path) -> None:
    with kept(sys.executable, "-c", POLITE, str(tmp_path / "pids")) as keeper:
        engine, child = pids_in(tmp_path / "pids")

        assert os.getpgid(engine) == os.getpgid(child) == engine
        assert os.getpgid(keeper.pid) != engine
        keeper.terminate()


def children_of(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
