"""Objects in a store of a cloud, or of one's own: ``s3://bucket/prefix``, ``gs://…``, ``az://container/…``.

The only home of obstore, which finds credentials and the server's address where its users keep
them, in ``AWS_*``, ``GOOGLE_*`` and ``AZURE_*``; none are taken from a URL, and none reach a message.
Its own retries wait out a server that fails. Paths are relative to the prefix, with ``/``.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamtap.errors import AccessDenied, InvalidInput, MissingExtra, TransferFailed

if TYPE_CHECKING:
    from obstore import GetOptions, GetResult, ObjectMeta
    from obstore.store import AzureStore, GCSStore, S3Store

    CloudStore = AzureStore | GCSStore | S3Store

#: The schemes of addresses that lead here.
SCHEMES = ("s3", "gs", "az")
RETRY_SECONDS = 180.0
#: Longer ones are refused by the stores themselves.
MOST_SIGNED_SECONDS = 7 * 24 * 3600
_RETRIES = 10
#: What one request carries. With the number that run at once, it bounds the memory of a transfer.
_BLOCK_BYTES = 1 << 23
_AT_ONCE = 4
# S3 takes 10 000 parts.
_MOST_PARTS = 9000
#: User metadata that tells what an object holds; an ETag tells it for small ones only.
_DIGEST = "sha256"
_ADDRESS = re.compile(rf"({'|'.join(SCHEMES)})://([A-Za-z0-9][A-Za-z0-9._-]*)(?:/([^\x00-\x1f?#]*))?")

Advance = Callable[[int], None]


def _no_advance(_bytes: int) -> None:
    """Tell nobody."""


@dataclass(frozen=True)
class Blob:
    """One object; ``etag`` changes when it is replaced by another."""

    path: str
    size_bytes: int
    etag: str | None


class BlobStore:
    """The objects under one address; nothing is asked of the server before a method is called.

    Each method may be called from several threads, and raises ``AccessDenied`` where the server
    refuses the credentials or wants some, ``TransferFailed`` where it fails for ``retry_seconds`` or ``retries`` times,
    and ``MissingExtra`` without obstore.
    """

    def __init__(self, url: str, *, retry_seconds: float = RETRY_SECONDS, retries: int = _RETRIES) -> None:
        """``url`` as at the top of this file.

        Raises:
            InvalidInput: not such an address, or one that holds credentials.
        """
        self._scheme, self._bucket, self._prefix = _parts(url)
        self._retry_seconds, self._retries = retry_seconds, retries
        self.url = "/".join(filter(None, (f"{self._scheme}://{self._bucket}", self._prefix)))

    def head(self, path: str) -> Blob:
        """What is known of an object.

        Raises:
            FileNotFoundError: there is none.
        """
        with self._asking("looking at", path):
            return _blob(self._store.head(path))

    def digest(self, path: str) -> str | None:
        """The SHA-256 that an object was put with; None where there is no object or it was put without."""
        try:
            with self._asking("looking at", path):
                value = self._store.get(path, options={"head": True}).attributes.get(_DIGEST)
        except FileNotFoundError:
            return None
        return None if value is None else str(value)

    def entries(self) -> tuple[list[Blob], list[str]]:
        """Objects right below the address, and the names of what looks like folders there."""
        with self._asking("listing"):
            found = self._store.list_with_delimiter()
            return [_blob(meta) for meta in found["objects"] if meta["path"]], list(found["common_prefixes"])

    def walk(self, folder: str) -> Iterator[Blob]:
        """All objects under ``folder``, at any depth."""
        with self._asking("listing", folder):
            for page in self._store.list(folder):
                # Some tools leave an empty object in the place of a folder.
                yield from (_blob(meta) for meta in page if meta["path"] != folder)

    def get(self, path: str) -> bytes:
        """A whole object, for small ones.

        Raises:
            FileNotFoundError: there is none.
        """
        return self._read(path, {}, None)[0]

    def get_range(self, path: str, start: int, stop: int, *, etag: str | None = None) -> bytes:
        """Bytes [start, stop) of an object; fewer where it ends before.

        Raises:
            FileNotFoundError: there is none, or none of this ``etag`` any more.
        """
        if stop <= start:
            return b""
        try:
            return self._read(path, {"range": (start, stop)}, etag)[0]
        except EOFError:
            return b""

    def download(self, blob: Blob, file: Path, *, advance: Advance = _no_advance) -> None:
        """Put a whole object at ``file``, which appears at once, when it is whole and durable.

        Of several that download it at the same time, in other processes too, one does it.

        Raises:
            FileNotFoundError: it is gone, or was replaced.
        """
        part = file.with_name(f".{file.name}.part")
        with _alone_at(part) as fd:
            if fd is None:
                return
            with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="streamtap-blobs") as pool:
                for n_bytes in pool.map(partial(self._copy_block, blob, fd), range(0, blob.size_bytes, _BLOCK_BYTES)):
                    advance(n_bytes)
            os.fsync(fd)
            part.replace(file)

    def put(self, path: str, data: bytes) -> None:
        """Make ``data`` an object, in one step."""
        with self._asking("writing", path):
            self._store.put(path, data, use_multipart=False)

    def put_file(self, path: str, file: Path, *, digest: str, advance: Advance = _no_advance) -> None:
        """Make a file an object, in one step when all of it is sent; ``digest`` is its SHA-256."""
        block = max(_BLOCK_BYTES, file.stat().st_size // _MOST_PARTS)
        attributes: Any = {_DIGEST: digest}
        if file.stat().st_size <= block:
            data = file.read_bytes()
            with self._asking("writing", path):
                self._store.put(path, data, attributes=attributes, use_multipart=False)
            advance(len(data))
            return
        with self._asking("writing", path):
            self._store.put(
                path, _blocks(file, block, advance), attributes=attributes, chunk_size=block, max_concurrency=_AT_ONCE
            )

    def delete(self, path: str) -> None:
        """Remove an object if it is there."""
        try:
            with self._asking("removing", path):
                self._store.delete(path)
        except FileNotFoundError:
            return

    def sign(self, path: str, expires_seconds: float) -> str:
        """A link by which anybody may read an object, whether it is there yet or not, until so many seconds from now.

        It is made on this machine, and whoever has it needs no key: it belongs in no log.

        Raises:
            InvalidInput: no time, or more than the 7 days that stores allow.
        """
        if not 1 <= expires_seconds <= MOST_SIGNED_SECONDS:
            raise InvalidInput(
                f"a signed link lasts from one second to 7 days ({MOST_SIGNED_SECONDS} s); got {expires_seconds}."
            )
        with self._asking("signing a link to", path):
            from obstore import sign

            return sign(self._store, "GET", path, timedelta(seconds=expires_seconds))

    @cached_property
    def _store(self) -> CloudStore:
        from obstore.exceptions import BaseError
        from obstore.store import AzureStore, GCSStore, S3Store

        made: Any = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}[self._scheme]
        retries = {"max_retries": self._retries, "retry_timeout": timedelta(seconds=self._retry_seconds)}
        try:
            store: CloudStore = made(self._bucket, prefix=self._prefix or None, retry_config=retries)
        except BaseError as error:
            # Nothing was asked of a server, and to ask again would not help.
            reason = _reason(str(error).partition("\n\nDebug source")[0], 0)
            raise InvalidInput(f"{self.url} cannot be opened with what the environment says: {reason}.") from None
        return store

    def _read(self, path: str, options: GetOptions, etag: str | None) -> tuple[bytes, ObjectMeta]:
        if etag is not None:
            options["if_match"] = etag
        with self._asking("reading", path):
            result: GetResult = self._store.get(path, options=options)
            return bytes(result.bytes()), result.meta

    def _copy_block(self, blob: Blob, fd: int, start: int) -> int:
        stop = min(start + _BLOCK_BYTES, blob.size_bytes)
        data = self.get_range(blob.path, start, stop, etag=blob.etag)
        if len(data) != stop - start:
            raise TransferFailed(f"reading {self.url}/{blob.path} failed: the server sent less than was asked for.")
        rest = memoryview(data)
        while rest:
            rest = rest[os.pwrite(fd, rest, stop - len(rest)) :]
        return len(data)

    @contextmanager
    def _asking(self, doing: str, path: str = "") -> Iterator[None]:
        """Turn obstore's errors into ours, which say what was tried and nothing that may hold a secret."""
        try:
            from obstore.exceptions import BaseError
        except ImportError as error:
            raise MissingExtra(f"{self.url} needs obstore: pip install 'streamtap[stores]'.") from error
        try:
            yield
        except FileNotFoundError:
            raise FileNotFoundError(f"{self.url}/{path}: no such object.") from None
        except BaseError as error:
            # Not `from error`: its text repeats requests and the server's answers.
            raise _ours(error, f"{doing} {self.url}/{path}".rstrip("/")) from None


def _parts(url: str) -> tuple[str, str, str]:
    """Scheme, bucket and prefix; an address that does not fit may hold a secret, and is not repeated."""
    match = _ADDRESS.fullmatch(url)
    prefix = ((match and match[3]) or "").removesuffix("/")
    if not match or (prefix and {"", ".", ".."} & set(prefix.split("/"))):
        raise InvalidInput(
            "an object store is named as s3://bucket/folder, gs://bucket/folder or az://container/folder, without "
            "credentials or a query; keys are read from the environment (AWS_ACCESS_KEY_ID and so on)."
        )
    return match[1], match[2], prefix


def _blob(meta: ObjectMeta) -> Blob:
    etag = meta["e_tag"]
    # Azure's listings leave the quotes out, and a condition needs them.
    quoted = etag if etag is None or etag.endswith('"') else f'"{etag}"'
    return Blob(meta["path"], meta["size"], quoted)


def _blocks(file: Path, block_bytes: int, advance: Advance) -> Iterator[bytes]:
    with file.open("rb") as stream:
        while block := stream.read(block_bytes):
            yield block
            advance(len(block))


def _ours(error: Exception, what: str) -> Exception:
    # The rest is a dump of the request.
    text = str(error).partition("\n\nDebug source")[0]
    found = re.search(r"status code: (\d{3})", text)
    status = int(found[1]) if found else 0
    if status in (404, 412):
        return FileNotFoundError(f"{what}: it is not there, or was replaced.")
    if status == 416:
        return EOFError(f"{what}: nothing lies there.")
    if status in (401, 403) or "169.254.169.254" in text:
        return AccessDenied(
            f"{what} was refused ({_reason(text, status)}); check the credentials in the environment "
            "(AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and so on), and that they allow it."
        )
    return TransferFailed(f"{what} failed: {_reason(text, status)}; try again later.")


def _reason(text: str, status: int) -> str:
    """What happened, in words that cannot hold a key: a status and its code, or text without its addresses."""
    if code := re.search(r"<Code>(\w{1,64})</Code>", text):
        return f"{status} {code[1]}"
    if status:
        return f"status {status}"
    if "builder error" in text:
        return "the address of the server is plain http, which AWS_ALLOW_HTTP=true allows"
    if "169.254.169.254" in text:
        return "no credentials were found"
    return re.sub(r"\S*(://|@)\S*", "…", text.partition("\n")[0])[:200]


@contextmanager
def _alone_at(part: Path) -> Iterator[int | None]:
    """An empty file at ``part`` that nobody else writes; None when somebody else made it whole in the meantime."""
    part.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        # A part that was renamed while we waited is the finished file.
        ours = _is_at(part, fd)
        if ours:
            os.ftruncate(fd, 0)
        yield fd if ours else None
    finally:
        # What failed is emptied, not removed: whoever waits for it would take a removed one for a finished one.
        if _is_at(part, fd):
            os.ftruncate(fd, 0)
        os.close(fd)


def _is_at(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False
