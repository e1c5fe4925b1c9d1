"""Which bytes a request means."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamtap.server.surface.byte_ranges import Part, is_known, part_of

ETAG = '"1-a"'
WHOLE = Part(0, 10, 10, is_part=False)


@pytest.mark.parametrize(
    ("wanted", "part"),
    [
        (None, WHOLE),
        ("bytes=0-", Part(0, 10, 10)),
        ("bytes=0-0", Part(0, 1, 10)),
        ("bytes=3-5", Part(3, 6, 10)),
        ("bytes=3-99", Part(3, 10, 10)),
        ("bytes=9-9", Part(9, 10, 10)),
        ("bytes=-3", Part(7, 10, 10)),
        ("bytes=-99", Part(0, 10, 10)),
        ("bytes=-0", Part(10, 10, 10)),
        ("bytes=10-", Part(10, 10, 10)),
        ("bytes=11-12", Part(11, 10, 10)),
        # Not understood, or of several parts: the whole, as the standard allows.
        ("bytes=-", WHOLE),
        ("bytes=5-3", WHOLE),
        ("bytes=0-1,3-4", WHOLE),
        ("bytes 0-1", WHOLE),
        ("chars=0-1", WHOLE),
        ("bytes=a-b", WHOLE),
        ("bytes=٣-٥", WHOLE),
        (f"bytes={'9' * 5000}-", WHOLE),
    ],
)
def test_ranges(wanted: str | None, part: Part) -> None:
    assert part_of(10, ETAG, wanted=wanted, if_range=None) == part
    assert part.is_outside == (part.is_part and part.start >= 10)


def test_what_content_range_says() -> None:
    assert Part(3, 6, 10).content_range == "bytes 3-5/10"
    assert Part(10, 10, 10).content_range == "bytes */10"


def test_an_empty_file_has_no_part() -> None:
    assert part_of(0, ETAG, wanted="bytes=0-", if_range=None).is_outside
    assert not part_of(0, ETAG, wanted=None, if_range=None).is_outside


@pytest.mark.parametrize(
    ("if_range", "fits"), [(ETAG, True), ('"2-a"', False), ("Mon, 30 Nov 2026", False), ("", False)]
)
def test_a_range_of_another_state_is_the_whole(if_range: str, fits: bool) -> None:
    assert part_of(10, ETAG, wanted="bytes=3-5", if_range=if_range).is_part == fits


@pytest.mark.parametrize(
    ("told", "known"),
    [
        (None, False),
        ("", False),
        (ETAG, True),
        (f'W/{ETAG}, "x"', True),
        (f'"x",{ETAG}', True),
        ("*", True),
        ('"x"', False),
    ],
)
def test_what_the_caller_has(told: str | None, known: bool) -> None:
    assert is_known(ETAG, told) == known


@given(size=st.integers(0, 50), wanted=st.text(max_size=12) | st.from_regex(r"bytes=[0-9]{0,2}-[0-9]{0,2}"))
def test_a_part_lies_within_the_file(size: int, wanted: str) -> None:
    part = part_of(size, ETAG, wanted=wanted, if_range=None)

    assert part.is_outside or 0 <= part.start <= part.stop <= size
