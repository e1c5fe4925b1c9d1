"""A disk that is full says so in one sentence, wherever in a run it shows."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from streamtap.errors import NotEnoughSpace

_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def room_in(folder: Path) -> Iterator[None]:
    """Run a block that writes into ``folder``.

    Raises:
        NotEnoughSpace: the disk is full, or its quota used up.
    """
    try:
        yield
    except NotEnoughSpace:
        raise
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise NotEnoughSpace(
            f"{error.filename or folder} cannot be written ({error.strerror}); free some space and run the same "
            "command again, which goes on from the shards that are whole."
        ) from error
