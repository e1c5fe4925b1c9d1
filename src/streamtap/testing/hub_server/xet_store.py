"""Xet without a Xet service: the client's library writes to and reads from folders that it is told.

Such a folder is locked as long as the process that uses it lives, so that each is told one of its own. Nothing in them
is kept: what was uploaded becomes an LFS object when it is committed, and what is read is made from those.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from streamtap.errors import MissingExtra
from streamtap.testing.hub_server.xet_shards import files_of

#: The library asks for a token and when it runs out; folders do not look at either.
_TOKEN = {"token": "local", "token_expiry_unix_secs": 1 << 40}


class XetStore:
    """Folders for clients, below ``folder``, which is emptied first.

    Raises:
        MissingExtra: ``hf_xet`` is not installed.
    """

    def __init__(self, folder: Path) -> None:
        try:
            import hf_xet  # type: ignore[import-untyped]
        except ImportError as error:
            raise MissingExtra("a Hub with Xet needs hf_xet: pip install 'streamtap[hub]'.") from error
        self._library = hf_xet
        self._folder = folder
        self._numbers = itertools.count()
        shutil.rmtree(folder, ignore_errors=True)

    def to_write(self) -> Path:
        """A new folder to upload into."""
        return self._new("written")

    def to_read(self, name: str, files: Iterable[Path]) -> Path:
        """A new folder that ``files`` can be read from; it is made once for each ``name``, then linked."""
        filled = self._folder / "filled" / name
        if not filled.is_dir():
            draft = self._new("drafts")
            self._fill(draft, files)
            filled.parent.mkdir(parents=True, exist_ok=True)
            draft.rename(filled)
        return self._linked(filled)

    def fetch(self, sha256: str, target: Path) -> bool:
        """Write what was uploaded as ``sha256`` to the file ``target``; False where it was not."""
        for place in sorted(self._folder.glob("written/*")):
            for shard in place.glob("xet/xorbs/shards/*.mdb"):
                if xet_hash := dict(files_of(shard)).get(sha256):
                    target.parent.mkdir(parents=True, exist_ok=True)
                    self._download(self._linked(place), xet_hash, target)
                    return True
        return False

    def hash_of(self, file: Path) -> str:
        """The Xet hash of the file's content, which depends on nothing else."""
        found: str = self._library.hash_files([str(file)])[0].hash
        return found

    def _fill(self, place: Path, files: Iterable[Path]) -> None:
        session = self._library.XetSession()
        with session.new_upload_commit(endpoint=f"local://{place}", **_TOKEN) as commit:
            for file in files:
                commit.start_upload_file(str(file), sha256=file.name)

    def _download(self, place: Path, xet_hash: str, target: Path) -> None:
        session = self._library.XetSession()
        with session.new_file_download_group(endpoint=f"local://{place}", **_TOKEN) as group:
            group.start_download_file(self._library.XetFileInfo(xet_hash, None), str(target))

    def _linked(self, place: Path) -> Path:
        new = self._new("read")
        shutil.copytree(place / "xet" / "xorbs", new / "xet" / "xorbs", copy_function=_link)
        return new

    def _new(self, kind: str) -> Path:
        new = self._folder / kind / f"{next(self._numbers):06d}"
        new.mkdir(parents=True)
        return new


def _link(source: str, target: str) -> None:
    # Contents never change; the one database does, and is what is locked.
    if source.endswith(".redb"):
        shutil.copyfile(source, target)
    else:
        os.link(source, target)
