"""Which files go to LFS: the rule of a new dataset repository's ``.gitattributes``."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

#: Above this a file is large, whatever its name.
MOST_REGULAR_BYTES = 10 * 1000 * 1000

_LARGE = (
    *("7z", "arrow", "avro", "bin", "bz2", "ckpt", "ftz", "gz", "h5", "joblib", "lz4", "mds", "mlmodel", "model"),
    *("msgpack", "npy", "npz", "onnx", "ot", "parquet", "pb", "pickle", "pkl", "pt", "pth", "rar", "safetensors"),
    *("tar", "tflite", "tgz", "wasm", "xz", "zip", "zst", "pcm", "sam", "raw", "aac", "flac", "mp3", "ogg", "wav"),
    *("bmp", "gif", "png", "tiff", "jpg", "jpeg", "webp", "mp4", "webm"),
)

#: What a new repository's ``.gitattributes`` holds.
GITATTRIBUTES = "".join(
    f"{pattern} filter=lfs diff=lfs merge=lfs -text\n"
    for pattern in (*(f"*.{ending}" for ending in _LARGE), "*.tar.*", "saved_model/**/*", "*tfevents*")
)


def lfs_patterns(gitattributes: str) -> list[str]:
    """The patterns of the lines that send a file to LFS."""
    lines = (line.split() for line in gitattributes.splitlines())
    return [words[0] for words in lines if len(words) > 1 and "filter=lfs" in words[1:]]


def goes_to_lfs(path: str, size_bytes: int, sample: bytes, patterns: Iterable[str]) -> bool:
    """Whether a file belongs into LFS: by its name, by its size, or because its first bytes are not text."""
    if size_bytes == 0:
        return False
    name = path.rsplit("/", 1)[-1]
    named = any(fnmatchcase(path if "/" in pattern else name, pattern) for pattern in patterns)
    return named or size_bytes >= MOST_REGULAR_BYTES or _is_binary(sample)


def _is_binary(sample: bytes) -> bool:
    if b"\0" in sample:
        return True
    try:
        sample.decode("utf-8")
    except UnicodeDecodeError as error:
        # A sample may end in the middle of a character.
        return error.end < len(sample) or len(sample) - error.start > 3
    return False
