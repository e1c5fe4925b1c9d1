"""``python -m streamtap.engines.keeper -- COMMAND…``: no engine outlives whoever started it.

The keeper runs COMMAND in a process group of its own and ends the whole group, with SIGTERM and then SIGKILL, when its
own stdin closes, which the kernel sees to however its parent ended, or when it gets SIGTERM or SIGINT. Whatever
COMMAND leaves in its group is ended too. It exits with COMMAND's status, 128 + the number of the signal that ended it.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType

GRACE_SECONDS = 10.0
_LOOK_SECONDS = 0.05
_READ_BYTES = 4096
#: What the shell says of a command that it cannot run.
_NOT_RUN = 127
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


class Keeper:
    """Runs one command and its group to their end."""

    def __init__(self, command: Sequence[str], grace_seconds: float = GRACE_SECONDS) -> None:
        self._command = list(command)
        self._grace_seconds = grace_seconds
        self._status: int | None = None
        self._pid = 0

    def run(self) -> int:
        """Run the command, and see to its end; its status.

        Raises:
            OSError: it cannot be run.
        """
        with selectors.SelectSelector() as selector:
            woken = _wake_on_signals()
            selector.register(woken, selectors.EVENT_READ)
            selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
            self._start()
            self._until_told(selector, woken)
        self._end_group()
        return self._status if self._status is not None else 128 + signal.SIGKILL

    def _start(self) -> None:
        on_linux = sys.platform == "linux"
        if on_linux:
            # What the command's own children leave behind comes to us, so that the group is known to be empty.
            _libc().prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        process = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            process_group=0,
            preexec_fn=_die_with_parent() if on_linux else None,
        )
        self._pid = process.pid
        # We wait for it ourselves, with all others of its group.
        process.returncode = 0

    def _until_told(self, selector: selectors.BaseSelector, woken: int) -> None:
        """Return when the command ended, stdin closed, or a signal said so."""
        stdin = sys.stdin.fileno()
        while self._status is None:
            ready = {key.fd for key, _ in selector.select()}
            if woken in ready:
                signals = os.read(woken, _READ_BYTES)
                self._reap()
                if signal.SIGTERM in signals or signal.SIGINT in signals:
                    return
            if stdin in ready and not os.read(stdin, _READ_BYTES):
                return

    def _end_group(self) -> None:
        for order, seconds in ((signal.SIGTERM, self._grace_seconds), (signal.SIGKILL, GRACE_SECONDS)):
            self._signal(order)
            if self._is_gone_within(seconds):
                return

    def _is_gone_within(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while True:
            self._reap()
            if not self._signal(0):
                return True
            if time.monotonic() >= end:
                return False
            time.sleep(_LOOK_SECONDS)

    def _signal(self, number: int) -> bool:
        """Send a signal to the group; whether there was anyone."""
        try:
            os.killpg(self._pid, number)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True  # someone is there who became another user
        return True

    def _reap(self) -> None:
        """Take the status of every child that ended."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._pid:
                code = os.waitstatus_to_exitcode(status)
                self._status = code if code >= 0 else 128 - code


def main(arguments: Sequence[str] | None = None) -> int:
    """Keep the command that the arguments name; its status."""
    given = _parser().parse_args(arguments)
    command = given.command[1:] if given.command[:1] == ["--"] else given.command
    if not command:
        _parser().error("expected -- and a command")
    try:
        return Keeper(command, given.grace_seconds).run()
    except OSError as error:
        sys.stderr.write(f"{command[0]} cannot be run: {error.strerror}.\n")
        return _NOT_RUN


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m streamtap.engines.keeper", description=__doc__)
    parser.add_argument("--grace-seconds", type=float, default=GRACE_SECONDS, help="from SIGTERM to SIGKILL")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    return parser


def _wake_on_signals() -> int:
    """A descriptor that can be read once a signal came; each is one byte, its number."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, _noted)
    return reading


def _noted(_number: int, _frame: FrameType | None) -> None:
    """Leave it to the descriptor; without a handler in Python there would be nothing in it."""


def _die_with_parent() -> Callable[[], None]:
    """For the child, before it runs the command: to be killed should the keeper itself be."""
    libc, keeper = _libc(), os.getpid()

    def ask() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != keeper:
            os._exit(128 + signal.SIGKILL)  # it was, before we asked

    return ask


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


if __name__ == "__main__":
    sys.exit(main())
