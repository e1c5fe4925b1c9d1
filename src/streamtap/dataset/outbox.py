"""Shards on their way: packed here, then handed to the place that publishes them, beside the packing or after it."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from numpy.typing import NDArray

from streamtap.dataset.manifest import FileSum
from streamtap.dataset.places import Advance, Target, no_advance
from streamtap.dataset.shards import Shapes, ShardWriter
from streamtap.errors import InvalidInput

# One is sent and one waits while a third is packed.
_MOST_FILES = 3


class Outbox:
    """Collects finished shards and sends them from one thread of its own.

    With ``stream`` at most three files are on this machine at once, and the packing waits for the sending; else all are
    packed before the first is sent. ``sent`` is told of bytes that went away.
    """

    def __init__(self, target: Target, *, stream: bool, sent: Advance = no_advance) -> None:
        self._target, self._stream, self._sent = target, stream, sent
        self._sums: dict[str, FileSum] = {}
        self._packed: list[tuple[str, Path]] = []
        self._sending: deque[Future[None]] = deque()
        self._sender = ThreadPoolExecutor(1)
        self._n_open = 0
        self._failed = False

    def __enter__(self) -> Self:
        """Enter the block at whose end the sending has stopped."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for the file that is being sent; after an error no other is begun."""
        self._sender.shutdown(cancel_futures=True)

    def shard(self, path: str, tensors: Shapes) -> OpenShard:
        """A new shard file to fill.

        Raises:
            TransferFailed: an earlier one could not be sent.
        """
        while self._sending and (self._sending[0].done() or self._n_open + len(self._sending) >= _MOST_FILES):
            self._sending.popleft().result()
        opened = OpenShard(self, path, self._target.room(path), tensors)
        self._n_open += 1
        return opened

    def add(self, path: str, file: Path, about: FileSum) -> None:
        """Take a finished shard."""
        self._n_open -= 1
        self._sums[path] = about
        if self._stream:
            self._send(path, file)
        else:
            self._packed.append((path, file))

    def finish(self) -> dict[str, FileSum]:
        """Send what is left and wait for it; gives size and hash of every shard.

        Raises:
            TransferFailed: one could not be sent.
        """
        for path, file in self._packed:
            self._send(path, file)
        while self._sending:
            self._sending.popleft().result()
        return dict(self._sums)

    def _send(self, path: str, file: Path) -> None:
        self._sending.append(self._sender.submit(self._put, path, file))

    def _put(self, path: str, file: Path) -> None:
        if self._failed:
            # Whoever waits hears of the first failure; what follows need not be sent.
            return
        self._failed = True
        self._target.put(path, file, advance=self._sent)
        self._failed = False


class OpenShard:
    """A shard file that is being filled; it is sent once it is finished."""

    def __init__(self, outbox: Outbox, path: str, file: Path, tensors: Shapes) -> None:
        self._outbox, self._path, self._file = outbox, path, file
        self._writer = ShardWriter(file, tensors)

    def __enter__(self) -> Self:
        """Enter the block at whose end the shard is finished."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Finish the shard, or abandon it after an error."""
        if error is None:
            self.finish()
        else:
            self.abandon()

    def write(self, rows: NDArray[Any]) -> None:
        """Append rows to the tensor that is being filled."""
        self._writer.write(rows)

    def finish(self) -> None:
        """Hand the whole file over.

        Raises:
            InvalidInput: fewer rows came than were announced.
        """
        try:
            about = self._writer.finish()
        except InvalidInput:
            self.abandon()
            raise
        self._outbox.add(self._path, self._file, about)

    def abandon(self) -> None:
        """Close the file as it is, and remove it."""
        self._writer.close()
        self._file.unlink(missing_ok=True)
