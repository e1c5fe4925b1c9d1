from __future__ import annotations

import os
from pathlib import Path

import pytest

from streamtap.errors import InvalidInput, SettingsError
from streamtap.settings import Settings, child_environment, defaults

HOME = {"HOME": "/of/a/person"}


def test_defaults_lie_under_the_home_folder() -> None:
    settings = Settings.from_environment(HOME)

    assert settings.cache_dir == Path("/of/a/person/.cache/streamtap")
    assert settings.hub_cache_dir == Path("/of/a/person/.cache/huggingface/hub")
    assert settings.progress == "auto"


def test_xdg_cache_home_moves_both_folders() -> None:
    settings = Settings.from_environment(HOME | {"XDG_CACHE_HOME": "/scratch"})

    assert settings.cache_dir == Path("/scratch/streamtap")
    assert settings.hub_cache_dir == Path("/scratch/huggingface/hub")


def test_relative_xdg_cache_home_is_ignored() -> None:
    assert Settings.from_environment(HOME | {"XDG_CACHE_HOME": "scratch"}) == Settings.from_environment(HOME)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("/data/rows", Path("/data/rows")),
        ("~/rows", Path("/of/a/person/rows")),
        ("~", Path("/of/a/person")),
        ("rows", Path.cwd() / "rows"),
        ("  /data/rows ", Path("/data/rows")),
        ("", Path("/of/a/person/.cache/streamtap")),
    ],
)
def test_cache_dir_is_taken_and_made_absolute(value: str, expected: Path) -> None:
    assert Settings.from_environment(HOME | {"STREAMTAP_CACHE_DIR": value}).cache_dir == expected


def test_hub_cache_goes_before_hf_home() -> None:
    hf_home = HOME | {"HF_HOME": "/models"}

    assert Settings.from_environment(hf_home).hub_cache_dir == Path("/models/hub")
    assert Settings.from_environment(hf_home | {"HF_HUB_CACHE": "/hub"}).hub_cache_dir == Path("/hub")


@pytest.mark.parametrize(("value", "expected"), [("on", "on"), (" OFF ", "off"), ("auto", "auto"), ("", "auto")])
def test_progress_is_read(value: str, expected: str) -> None:
    assert Settings.from_environment(HOME | {"STREAMTAP_PROGRESS": value}).progress == expected


def test_unknown_progress_is_refused_by_name() -> None:
    with pytest.raises(SettingsError, match=r"STREAMTAP_PROGRESS must be auto, on or off; got 'loud'"):
        Settings.from_environment(HOME | {"STREAMTAP_PROGRESS": "loud"})


@pytest.mark.parametrize("variable", ["STREAMTAP_CACHE_DIR", "HF_HUB_CACHE", "HF_HOME"])
def test_a_file_where_a_folder_belongs_is_refused_by_name(variable: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()

    with pytest.raises(InvalidInput, match=rf"{variable} must name a folder; .*file is a file"):
        Settings.from_environment(HOME | {variable: str(file)})


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STREAMTAP_CACHE_DIR", str(tmp_path))

    assert Settings.from_environment().cache_dir == tmp_path


@pytest.mark.parametrize(
    ("scheme", "one", "other"),
    [
        ("s3", {"AWS_ENDPOINT_URL": "http://a"}, {"AWS_ENDPOINT_URL": "http://b"}),
        ("s3", {"AWS_ENDPOINT_URL": "http://a"}, {"AWS_ENDPOINT_URL": "http://a", "AWS_ENDPOINT_URL_S3": "http://b"}),
        ("s3", {"AWS_ENDPOINT": "http://a"}, {}),
        ("gs", {"GOOGLE_BASE_URL": "http://a"}, {}),
        ("az", {"AZURE_STORAGE_ACCOUNT_NAME": "a"}, {"AZURE_STORAGE_ACCOUNT_NAME": "b"}),
        ("az", {"AZURE_STORAGE_ACCOUNT_NAME": "a"}, {"AZURE_STORAGE_ENDPOINT": "a"}),
        ("az", {"AZURE_ENDPOINT": "http://a"}, {"AZURE_ENDPOINT": "http://b"}),
        (
            "az",
            {"AZURE_STORAGE_USE_EMULATOR": "1"},
            {"AZURE_STORAGE_USE_EMULATOR": "1", "AZURITE_BLOB_STORAGE_URL": "b"},
        ),
        ("az", {"AZURE_USE_FABRIC_ENDPOINT": "1"}, {}),
    ],
)
def test_servers_of_object_stores_are_told_apart(scheme: str, one: dict[str, str], other: dict[str, str]) -> None:
    servers = [Settings.from_environment(HOME | each).store_servers.get(scheme) for each in (one, other)]

    assert servers[0] != servers[1]
    assert [set(Settings.from_environment(HOME | each).store_servers) - {scheme} for each in (one, other)] == [
        set()
    ] * 2


def test_servers_of_object_stores_are_not_shown() -> None:
    settings = Settings.from_environment(HOME | {"AWS_ENDPOINT_URL": "http://user:tell-nobody@a/"})

    assert "tell-nobody" not in repr(settings)
    assert (
        settings.store_servers
        == Settings.from_environment(HOME | {"AWS_ENDPOINT_URL": " http://user:tell-nobody@a"}).store_servers
    )


def test_the_key_of_an_engine_process_is_read_and_not_shown() -> None:
    settings = Settings.from_environment(HOME | {"STREAMTAP_WORKER_KEY": " tell-nobody "})

    assert settings.worker_key == "tell-nobody"
    assert "tell-nobody" not in repr(settings)
    assert Settings.from_environment(HOME | {"STREAMTAP_WORKER_KEY": " "}).worker_key is None


def test_the_key_of_ndif_is_read_and_not_shown() -> None:
    settings = Settings.from_environment(HOME | {"NDIF_API_KEY": " tell-nobody "})

    assert settings.ndif_api_key == "tell-nobody"
    assert "tell-nobody" not in repr(settings)
    assert Settings.from_environment(HOME | {"NDIF_API_KEY": " "}).ndif_api_key is None


def test_defaults_hold_for_a_block_and_what_is_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THERE", "1")
    monkeypatch.delenv("LACKING", raising=False)

    with defaults(THERE="2", LACKING="3"):
        assert (os.environ["THERE"], os.environ["LACKING"]) == ("1", "3")

    assert os.environ["THERE"] == "1"
    assert "LACKING" not in os.environ


def test_a_process_that_is_started_gets_what_is_usual_where_nobody_said_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("THERE", "ours")
    monkeypatch.setenv("ADDED", "ours")

    given = child_environment({"THERE": "usual", "LACKING": "usual"}, ADDED="for it")

    assert (given["THERE"], given["LACKING"], given["ADDED"]) == ("ours", "usual", "for it")
