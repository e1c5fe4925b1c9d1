from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import pytest
from sqlalchemy import select

from streamtap.errors import InvalidInput, InvalidKey, KeyDisabled, KeyRevoked, MissingAuthorization, ScopeDenied
from streamtap.server.db import Database
from streamtap.server.db.tables import metadata
from streamtap.server.ledger.keys import KeyLimits, Keys, known_key, refusal


@pytest.fixture
def keys(database: Database) -> Keys:
    return Keys(database)


def test_a_key_is_random_and_found_by_what_was_sent(keys: Keys, database: Database) -> None:
    ada, bo = keys.create("ada", user="ada@lab", scopes=["harvest", "completions"]), keys.create("bo")

    assert re.fullmatch("stp_[A-Za-z0-9]{51}", ada.secret)
    assert ada.secret != bo.secret
    assert ada.record.prefix == ada.secret[:12]
    assert (ada.record.user, ada.record.scopes, ada.record.state) == ("ada@lab", ("completions", "harvest"), "active")
    assert (bo.record.user, bo.record.scopes, bo.record.limits) == ("bo", ("completions",), KeyLimits())
    with database.reading() as connection:
        assert known_key(connection, ada.secret) == ada.record


def test_the_key_is_nowhere_in_the_database_or_in_a_repr(keys: Keys, database: Database) -> None:
    made = keys.create("ada")

    with database.reading() as connection:
        rows = [str(row) for table in metadata.tables.values() for row in connection.execute(select(table))]

    assert len(rows) == 1
    assert made.secret[12:] not in rows[0]
    assert made.secret[12:] not in repr(made)


def test_only_the_whole_key_is_known(keys: Keys, database: Database) -> None:
    secret = keys.create("ada").secret
    wrong = [
        secret[:-1],
        secret + "x",
        secret[:-1] + ("a" if secret[-1] != "a" else "b"),
        secret.swapcase(),
        "stp_",
        "é",
    ]

    wrong += ["stp_" + "\0" * 51, "stp_" + "é" * 51, secret[:20] + "%" + secret[21:], secret + "\n"]

    with database.reading() as connection:
        for presented in wrong:
            with pytest.raises(InvalidKey) as raised:
                known_key(connection, presented)
            assert secret[4:] not in str(raised.value)
        for nothing in (None, ""):
            with pytest.raises(MissingAuthorization, match="Authorization: Bearer"):
                known_key(connection, nothing)


def test_states_and_scopes_refuse(keys: Keys) -> None:
    ada = keys.create("ada").record

    assert refusal(ada, "completions") is None
    assert refusal(ada, None) is None
    assert isinstance(refusal(ada, "harvest"), ScopeDenied)
    assert "'harvest'" in str(refusal(ada, "harvest"))
    assert isinstance(refusal(keys.pause("ada"), "completions"), KeyDisabled)
    assert refusal(keys.resume("ada"), "completions") is None
    assert isinstance(refusal(keys.revoke(ada.prefix), "harvest"), KeyRevoked)


def test_a_revoked_key_stays_revoked_and_its_name_is_free(keys: Keys) -> None:
    first = keys.create("ada").record
    keys.revoke("ada")

    for change in (keys.resume, keys.pause):
        with pytest.raises(InvalidInput, match=r"'ada' \(stp_.*\) was revoked, which is for good"):
            change("ada")
    second = keys.create("ada").record
    assert keys.get("ada") == second
    assert keys.pause("ada").id == second.id
    assert keys.get(first.prefix).state == "revoked"
    assert [key.state for key in keys.list()] == ["revoked", "paused"]
    assert keys.revoke(first.prefix).state == "revoked"


def test_a_name_is_taken_once(keys: Keys) -> None:
    keys.create("ada")

    with pytest.raises(InvalidInput, match="a key named 'ada' exists already"):
        keys.create("ada")


def test_of_many_that_take_a_name_at_once_one_gets_it(keys: Keys) -> None:
    def take(_: int) -> bool:
        try:
            keys.create("ada")
        except InvalidInput:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(take, range(16))) == 1


def test_limits_are_set_kept_and_given_back_to_the_server(keys: Keys) -> None:
    made = keys.create("ada", limits=KeyLimits(monthly_activations=5000, daily_input_tokens=0)).record

    changed = keys.set("ada", monthly_activations=None, max_active=2, scopes=["admin"], user="lab")

    assert made.limits == KeyLimits(monthly_activations=5000, daily_input_tokens=0)
    assert changed == replace(made, limits=KeyLimits(max_active=2, daily_input_tokens=0), scopes=("admin",), user="lab")
    assert keys.list() == [changed]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"max_active": 0}, "max_active must be 1 to"),
        ({"monthly_activations": -1}, "monthly_activations must be 0 to"),
        ({"monthly_input_tokens": 10**16}, "monthly_input_tokens must be 0 to"),
        ({"scopes": ["root"]}, "scopes must be one or more of completions, harvest, admin; got root"),
        ({"scopes": []}, "got none"),
        ({"weekly": 3}, "a key has no limit 'weekly'"),
        ({"user": " ada"}, "a key's user must be 1 to 200 printable characters"),
        ({}, "nothing to change was given"),
    ],
)
def test_values_that_cannot_be_are_refused(keys: Keys, values: dict[str, object], said: str) -> None:
    before = keys.create("ada").record

    with pytest.raises(InvalidInput, match=said):
        keys.set("ada", **values)  # type: ignore[arg-type]

    assert keys.get("ada") == before


@pytest.mark.parametrize("name", ["", "a" * 101, "a\nb", "ada ", "stp_ada"])
def test_names_that_cannot_be_are_refused(keys: Keys, name: str) -> None:
    with pytest.raises(InvalidInput, match="a key's name must be 1 to 100 printable characters"):
        keys.create(name)


def test_an_unknown_key_is_named_but_never_a_whole_one(keys: Keys) -> None:
    secret = keys.create("ada").secret

    with pytest.raises(InvalidInput, match="there is no key 'bo'"):
        keys.revoke("bo")
    with pytest.raises(InvalidInput, match="there is no key that") as raised:
        keys.revoke(secret)
    assert secret[:12] not in str(raised.value)


def test_the_first_key_is_made_once(keys: Keys, database: Database) -> None:
    secret = keys.first_key()

    assert secret is not None
    assert keys.first_key() is None
    with database.reading() as connection:
        assert known_key(connection, secret).scopes == ("completions", "harvest", "admin")
    keys.revoke("first")
    assert keys.first_key() is None


def test_of_several_servers_that_start_at_once_one_makes_the_first_key(keys: Keys) -> None:
    with ThreadPoolExecutor(4) as pool:
        made = [secret for secret in pool.map(lambda _: keys.first_key(), range(4)) if secret]

    assert len(made) == len(keys.list()) == 1


def test_times_come_back_in_utc(keys: Keys) -> None:
    made = keys.create("ada").record

    assert made.created_at.utcoffset() == timedelta(0)
    assert keys.get("ada").created_at == made.created_at
