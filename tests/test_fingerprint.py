"""Identity: equal things hash alike on every machine, different things never do."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streamtap import fingerprint as module
from streamtap.fingerprint import DIGEST_BYTES, content_hash, fingerprint, text_digest, tokens_digest

#: The same examples in every run, however busy the machine.
STEADY = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text("aä", max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=2), inner, max_size=3),
    max_leaves=6,
)
IDENTITIES = st.dictionaries(st.text("abc", max_size=2), JSON, max_size=3)


def test_the_hash_is_of_canonical_json() -> None:
    expected = hashlib.sha256('{"a":[1,null,"ä"],"b":true}'.encode()).hexdigest()

    assert fingerprint({"b": True, "a": [1, None, "ä"]}) == expected


@STEADY
@given(IDENTITIES, st.randoms(use_true_random=False))
def test_the_order_of_keys_does_not_matter(identity: dict[str, Any], random: Any) -> None:
    keys = list(identity)
    random.shuffle(keys)

    assert fingerprint({key: identity[key] for key in keys}) == fingerprint(identity)


@STEADY
@given(IDENTITIES, IDENTITIES)
def test_different_identities_differ(a: dict[str, Any], b: dict[str, Any]) -> None:
    # repr, since True == 1 to Python
    assert (fingerprint(a) == fingerprint(b)) == (repr(sorted(a.items())) == repr(sorted(b.items())) or a == b)


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), object(), {1, 2}, b"x"], ids=lambda value: str(value)[:12]
)
def test_what_has_no_one_spelling_is_refused(value: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        fingerprint({"value": value})


@STEADY
@given(st.text("aä?\ud800\udc00\ufffd", max_size=3), st.text("aä?\ud800\udc00\ufffd", max_size=3))
def test_texts_have_keys_of_their_own(a: str, b: str) -> None:
    assert len(text_digest(a)) == DIGEST_BYTES
    assert (text_digest(a) == text_digest(b)) == (a == b)


def test_half_a_surrogate_pair_is_no_replacement_character() -> None:
    assert len({text_digest(text) for text in ("\ud800", "\udc00", "\ufffd", "?")}) == 4


IDS = st.lists(st.integers(0, 2**31 - 1), max_size=4)


@STEADY
@given(IDS, st.none() | IDS, IDS, st.none() | IDS)
def test_token_sequences_and_positions_have_keys_of_their_own(
    a: list[int], at_a: list[int] | None, b: list[int], at_b: list[int] | None
) -> None:
    def key(ids: list[int], at: list[int] | None) -> bytes:
        return tokens_digest(np.array(ids, np.int32), None if at is None else np.array(at, np.int32))

    assert len(key(a, at_a)) == DIGEST_BYTES
    assert (key(a, at_a) == key(b, at_b)) == ((a, at_a) == (b, at_b))


def test_the_key_of_tokens_is_of_their_values_not_of_their_layout() -> None:
    ids = np.array([1, 2, 70_000], np.int32)

    assert tokens_digest(ids) == tokens_digest(ids.astype(np.int64))
    assert tokens_digest(ids) == tokens_digest(ids.astype(">i4"))
    assert tokens_digest(ids) == tokens_digest(np.array([1, 0, 2, 0, 70_000], np.int32)[::2])


def test_another_process_gives_the_same_keys() -> None:
    code = (
        "import numpy as np; from streamtap.fingerprint import *; "
        "print(fingerprint({'b': 1, 'a': [2]}), text_digest('ä').hex(), tokens_digest(np.array([1, 2], 'i4')).hex())"
    )
    path = str(Path(module.__file__).parents[1])
    environment = os.environ | {"PYTHONHASHSEED": "7", "PYTHONPATH": path}
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    ).stdout.split()

    assert printed == [
        fingerprint({"a": [2], "b": 1}),
        text_digest("ä").hex(),
        tokens_digest(np.array([1, 2], np.int32)).hex(),
    ]


def write(folder: Path, **contents: bytes) -> list[Path]:
    folder.mkdir()
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return sorted(folder.iterdir())


def test_files_hash_by_name_and_content_wherever_they_lie(tmp_path: Path) -> None:
    files = write(tmp_path / "one", a=b"1", b=b"2")
    moved = write(tmp_path / "two", a=b"1", b=b"2")
    whole = content_hash(files)

    assert whole.startswith("sha256:")
    assert content_hash(files[::-1]) == content_hash(moved) == whole
    assert content_hash(write(tmp_path / "changed", a=b"1", b=b"3")) != whole
    assert content_hash(write(tmp_path / "swapped", a=b"2", b=b"1")) != whole
    assert content_hash(write(tmp_path / "named", a=b"1", c=b"2")) != whole
    assert content_hash(files[:1]) != whole


def test_a_file_longer_than_a_block_counts_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file,) = write(tmp_path / "one", a=b"0123456789")
    whole = content_hash([file])
    monkeypatch.setattr(module, "_READ_BYTES", 3)

    assert content_hash([file]) == whole
    file.write_bytes(b"012345678x")
    assert content_hash([file]) != whole


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        content_hash([tmp_path / "missing"])
