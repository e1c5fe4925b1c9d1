"""Content by its hash: files on disk, written in pieces and put in place by one rename."""

from __future__ import annotations

import hashlib
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

#: Bytes that are read or written at a time.
PIECE_BYTES = 1 << 20

_SHA256 = re.compile(r"[0-9a-f]{64}")


def is_sha256(text: object) -> bool:
    """Whether ``text`` is a SHA-256 in hexadecimal, and so safe as a file's name."""
    return isinstance(text, str) and _SHA256.fullmatch(text) is not None


def pieces_of(file: Path) -> Iterator[bytes]:
    """The file's bytes, a piece at a time."""
    with file.open("rb") as stream:
        while piece := stream.read(PIECE_BYTES):
            yield piece


def sha256_of(file: Path) -> str:
    """SHA-256 of the file's bytes, in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def git_oid_of(file: Path) -> str:
    """The object id that git gives to the file's bytes, in hexadecimal."""
    digest = hashlib.sha1(b"blob %d\0" % file.stat().st_size)
    for piece in pieces_of(file):
        digest.update(piece)
    return digest.hexdigest()


def lfs_pointer(sha256: str, size_bytes: int) -> bytes:
    """The small text that git keeps in place of a large file."""
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size_bytes}\n".encode()


def git_oid(content: bytes) -> str:
    """The object id that git gives to a file of this content, in hexadecimal."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class Draft:
    """A file that is being written beside the objects; ``keep`` makes it one of them."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.size_bytes = 0
        self._sha256 = hashlib.sha256()
        self._stream = path.open("wb")

    def write(self, piece: bytes) -> None:
        """Append ``piece``."""
        self._stream.write(piece)
        self._sha256.update(piece)
        self.size_bytes += len(piece)

    @property
    def sha256(self) -> str:
        """SHA-256 of what was written so far, in hexadecimal."""
        return self._sha256.hexdigest()

    def move_to(self, target: Path) -> None:
        """Close the file and make it ``target``, whatever was there before."""
        self._stream.close()
        target.parent.mkdir(parents=True, exist_ok=True)
        self.path.replace(target)

    def drop(self) -> None:
        """Close and remove the file; nothing happens to one that was moved."""
        self._stream.close()
        self.path.unlink(missing_ok=True)


class ObjectStore:
    """Objects of one folder, each in a file named by its SHA-256."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, sha256: str) -> Path:
        """Where the object lies, or would lie."""
        return self.folder / sha256[:2] / sha256

    def has(self, sha256: str) -> bool:
        """Whether the object is there in whole."""
        return self.path(sha256).is_file()

    def size_bytes(self, sha256: str) -> int:
        """Size of the object."""
        return self.path(sha256).stat().st_size

    def names(self) -> list[str]:
        """SHA-256 of every object, sorted."""
        return sorted(file.name for file in self.folder.glob("??/*"))

    def draft(self) -> Draft:
        """A new file to write an object into."""
        return Draft(self.folder / f".draft-{secrets.token_hex(8)}")

    def keep(self, draft: Draft) -> str:
        """Make what was written an object; its SHA-256."""
        draft.move_to(self.path(draft.sha256))
        return draft.sha256

    def put(self, content: bytes) -> str:
        """Keep ``content``; its SHA-256."""
        draft = self.draft()
        draft.write(content)
        return self.keep(draft)

    def put_file(self, file: Path) -> str:
        """Keep a copy of ``file``; its SHA-256."""
        sha256 = sha256_of(file)
        if not self.has(sha256):
            draft = self.folder / f".draft-{secrets.token_hex(8)}"
            draft.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, draft)
            self.path(sha256).parent.mkdir(parents=True, exist_ok=True)
            draft.replace(self.path(sha256))
        return sha256
