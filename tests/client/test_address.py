from __future__ import annotations

import pytest

from streamtap.client.address import Address, find_address
from streamtap.client.aio import AsyncClient
from streamtap.client.sync import Client
from streamtap.errors import InvalidInput, MissingAuthorization
from streamtap.settings import Settings

BASE, KEY = "https://models.lab.org/v1", "stp_abcdefgh_secret"
HOME = {"HOME": "/of/a/person"}


def _settings(**variables: str) -> Settings:
    return Settings.from_environment(HOME | variables)


def test_both_pairs_of_variables_name_a_server() -> None:
    ours = _settings(STREAMTAP_API_BASE=BASE, STREAMTAP_API_KEY=KEY)
    theirs = _settings(ACS_API_BASE=BASE, ACS_API_KEY=KEY)

    assert find_address(None, None, ours) == find_address(None, None, theirs) == Address(BASE, KEY)


def test_our_variables_go_first() -> None:
    settings = _settings(
        STREAMTAP_API_BASE=BASE, STREAMTAP_API_KEY=KEY, ACS_API_BASE="https://other/v1", ACS_API_KEY="of the other"
    )

    assert find_address(None, None, settings) == Address(BASE, KEY)


def test_arguments_go_before_variables() -> None:
    settings = _settings(STREAMTAP_API_BASE="https://other/v1", STREAMTAP_API_KEY="other")

    assert find_address(BASE, KEY, settings) == Address(BASE, KEY)


@pytest.mark.parametrize("variable", ["STREAMTAP_API_BASE", "ACS_API_BASE"])
def test_a_key_is_told_only_to_the_server_that_it_was_set_beside(variable: str) -> None:
    settings = _settings(**{variable: "https://other/v1", variable.replace("BASE", "KEY"): KEY})

    with pytest.raises(MissingAuthorization, match=rf"no API key for {BASE}: the key in the environment") as caught:
        find_address(BASE, None, settings)

    assert "is not sent to another one; set that address" in str(caught.value)
    assert KEY not in str(caught.value)
    assert find_address(BASE, None, _settings(**{variable: BASE, variable.replace("BASE", "KEY"): KEY})).key == KEY


def test_the_key_of_one_pair_is_not_told_to_the_server_of_the_other() -> None:
    settings = _settings(STREAMTAP_API_BASE=BASE, ACS_API_BASE="https://other/v1", ACS_API_KEY=KEY)

    assert settings.api_key is None
    assert _settings(STREAMTAP_API_BASE=BASE, ACS_API_KEY=KEY).api_key == KEY


def test_a_key_set_alone_goes_to_the_server_that_was_given() -> None:
    assert find_address(BASE, None, _settings(ACS_API_KEY=KEY)).key == KEY


def test_an_address_that_is_no_text_is_refused() -> None:
    with pytest.raises(InvalidInput, match="api_base must be text; got int"):
        find_address(5, KEY, _settings())  # type: ignore[arg-type]


@pytest.mark.parametrize("text", [KEY + "\n", f"  {KEY} ", f"\t{KEY}\r\n"])
def test_white_space_around_a_key_is_dropped(text: str) -> None:
    assert find_address(BASE, text, _settings()).key == KEY
    assert find_address(None, None, _settings(ACS_API_BASE=BASE, ACS_API_KEY=text)).key == KEY


@pytest.mark.parametrize("text", ["stp_secret\nstp_second", "stp_secrét", "stp secret", "stp_\x00secret"])
def test_a_key_that_no_header_can_hold_is_refused_and_not_shown(text: str) -> None:
    with pytest.raises(InvalidInput, match="copy it again") as caught:
        find_address(BASE, text, _settings())

    assert "secr" not in str(caught.value)


@pytest.mark.parametrize(
    "base",
    [
        "https://stp_secret@models.lab.org/v1",
        "https://user:stp_secret@models.lab.org/v1",
        "https://models.lab.org/v1?key=stp_secret",
        "https://models.lab.org/v1#stp_secret",
    ],
)
def test_a_key_in_an_address_is_refused_and_not_shown(base: str) -> None:
    with pytest.raises(InvalidInput, match="may hold no key") as caught:
        find_address(base, KEY, _settings())

    assert "stp_secret" not in str(caught.value)
    assert "stp_secret" not in repr(_settings(ACS_API_BASE=base))


@pytest.mark.parametrize("base", ["models.lab.org/v1", "ftp://models.lab.org/v1", "https:///v1", "http://h:port/v1"])
def test_what_is_no_address_is_refused(base: str) -> None:
    with pytest.raises(InvalidInput, match="must begin with http:// or https:// and name a host"):
        find_address(base, KEY, _settings())


def test_no_server_is_refused_in_one_sentence_that_says_how_to_name_it() -> None:
    with pytest.raises(InvalidInput, match=r"no server was named: .*STREAMTAP_API_BASE .*http://127.0.0.1:8000/v1"):
        find_address(None, KEY, _settings())


def test_no_key_is_refused_in_one_sentence_that_says_how_to_give_it() -> None:
    with pytest.raises(MissingAuthorization, match=r"pass api_key=, or set STREAMTAP_API_KEY"):
        find_address(BASE, " ", _settings())


@pytest.mark.parametrize(
    ("base", "asked"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000/v1"),
        ("http://127.0.0.1:8000/", "http://127.0.0.1:8000/v1"),
        (" http://127.0.0.1:8000/v1/ ", "http://127.0.0.1:8000/v1"),
        ("http://lab/models/v1", "http://lab/models/v1"),
    ],
)
def test_an_address_may_end_in_a_slash_or_lack_its_version(base: str, asked: str) -> None:
    assert find_address(base, KEY, _settings()).base == asked


def test_no_text_of_a_client_shows_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMTAP_API_KEY", KEY)
    texts = [repr(Client(BASE)), repr(AsyncClient(BASE)), repr(Settings.from_environment()), repr(Address(BASE, KEY))]

    assert [text for text in texts if "secret" in text] == []
    assert texts[:2] == [f"Client({BASE!r})", f"AsyncClient({BASE!r})"]
