"""No token in what is raised, logged or shown."""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from streamtap.dataset import names
from streamtap.dataset.hub import HubSource
from streamtap.dataset.hub_secrets import Token, checked_token, quoted
from streamtap.dataset.hub_target import HubTarget
from streamtap.errors import AccessDenied, InvalidInput, StreamtapError, TransferFailed
from streamtap.settings import Settings
from streamtap.testing.hub_server import HubServer, online_client

SECRET = "hf_averysecretvalue"
REPO = "tester/acts"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(cache_dir=tmp_path / "cache", hub_cache_dir=tmp_path / "hf")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    folder = tmp_path_factory.mktemp("folder")
    (folder / "README.md").write_text("---\nlicense: mit\n---\n")
    with HubServer(tmp_path_factory.mktemp("hub")) as server:
        server.add(REPO, folder)
        yield server


@pytest.fixture
def hub(server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """The server, which a test may stop and let fail."""
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    server.clear_faults()
    with online_client(server.start()):
        yield server


def reading(hub: HubServer, settings: Settings, token: str | None) -> object:
    return HubSource(REPO, token=token, endpoint=hub.endpoint, settings=settings, sleep=lambda _: None).version


def ranging(hub: HubServer, settings: Settings, token: str | None) -> object:
    commit = hub.commits(REPO)[0].id
    dataset = HubSource(REPO, commit, token, hub.endpoint, settings=settings, sleep=lambda _: None)
    return dataset.read_range(names.CARD, 0, 5)


def fetching(hub: HubServer, settings: Settings, token: str | None) -> object:
    commit = hub.commits(REPO)[0].id
    return HubSource(REPO, commit, token, hub.endpoint, settings=settings, sleep=lambda _: None).fetch(names.CARD)


def looking(hub: HubServer, settings: Settings, token: str | None) -> object:
    return HubTarget(REPO, None, token, hub.endpoint, settings, sleep=lambda _: None).look()


def publishing(hub: HubServer, settings: Settings, token: str | None) -> object:
    target = HubTarget("tester/new", None, token, hub.endpoint, settings, sleep=lambda _: None)
    file = target.room(names.CARD)
    file.write_text("---\nlicense: mit\n---\nhello")
    return target.publish({names.CARD: file}, [], "Publish")


ACTIONS = [reading, ranging, fetching, looking, publishing]
Action = Callable[[HubServer, Settings, str | None], object]


def all_that_is_known(error: BaseException) -> str:
    """What a log of it may hold; the chain goes on where ``from None`` only hides the rest."""
    shown = "".join(traceback.format_exception(error))
    chain: list[BaseException | None] = [error]
    while (link := chain[-1]) is not None:
        shown += repr(link) + repr(vars(link))
        chain.append(link.__cause__ or link.__context__)
    return shown


@pytest.fixture
def refused(
    hub: HubServer, settings: Settings, caplog: pytest.LogCaptureFixture
) -> Iterator[Callable[[Action, str | None], StreamtapError]]:
    caplog.set_level(logging.DEBUG)

    def run(action: Action, token: str | None) -> StreamtapError:
        with pytest.raises(StreamtapError) as caught:
            action(hub, settings, token)
        assert SECRET not in all_that_is_known(caught.value)
        # The client's errors lead to the headers that it sent.
        assert (caught.value.__cause__, caught.value.__context__) == (None, None)
        return caught.value

    yield run
    assert SECRET not in "".join(map(logging.Formatter().format, caplog.records))


@pytest.mark.parametrize("action", ACTIONS)
def test_a_wrong_token(refused: Callable[..., StreamtapError], action: Action) -> None:
    error = refused(action, SECRET)

    assert isinstance(error, AccessDenied)
    assert "does not accept this token" in str(error)


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("status", [400, 403, 500])
def test_a_server_that_refuses_or_fails(
    hub: HubServer,
    refused: Callable[..., StreamtapError],
    monkeypatch: pytest.MonkeyPatch,
    action: Action,
    status: int,
) -> None:
    # The client waits by itself, too, before it gives up.
    monkeypatch.setattr(time, "sleep", lambda _seconds: None)
    hub.fail(".", status=status, times=1000)

    assert isinstance(refused(action, SECRET), TransferFailed)


@pytest.mark.parametrize("action", [reading, ranging, looking])
def test_a_server_that_is_gone(hub: HubServer, refused: Callable[..., StreamtapError], action: Action) -> None:
    commits = hub.commits(REPO)
    hub.stop()

    assert commits
    assert isinstance(refused(action, SECRET), TransferFailed)


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("token", [f"{SECRET}\nX: 1", f"{SECRET} x", f"{SECRET}\x00", f"{SECRET}é"])
def test_a_token_that_cannot_be_one(refused: Callable[..., StreamtapError], action: Action, token: str) -> None:
    error = refused(action, token)

    assert isinstance(error, InvalidInput)
    assert "no token has (it is not shown here)" in str(error)


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("token", [f"{SECRET} x", f"{SECRET}é"])
def test_a_token_of_the_environment_that_cannot_be_one(
    refused: Callable[..., StreamtapError], monkeypatch: pytest.MonkeyPatch, action: Action, token: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)

    assert "HF_TOKEN" in str(refused(action, None))


def test_a_saved_token_that_is_no_text(refused: Callable[..., StreamtapError], tmp_path: Path) -> None:
    (tmp_path / "token").write_bytes(SECRET.encode() + b"\xff")

    assert "`hf auth login` saved" in str(refused(reading, None))


def test_an_address_with_a_key_is_refused(settings: Settings) -> None:
    for endpoint in (f"http://user:{SECRET}@localhost:1", f"https://hub.example/?token={SECRET}"):
        with pytest.raises(InvalidInput, match="holds a user, password or key") as caught:
            HubSource(REPO, endpoint=endpoint, settings=settings)
        assert SECRET not in all_that_is_known(caught.value)


@pytest.mark.parametrize("token", ["hf_test\n", "  hf_test", "\thf_test\r\n"])
def test_white_space_around_a_token_does_no_harm(hub: HubServer, settings: Settings, token: str) -> None:
    for action in ACTIONS:
        assert action(hub, settings, token) is not None


def test_an_empty_token_is_none() -> None:
    assert [checked_token(token) for token in ("", " \n", None, False)] == [None, None, None, False]


def test_a_saved_token_that_is_not_there_is_said(hub: HubServer, settings: Settings) -> None:
    with pytest.raises(AccessDenied, match="token=True means a saved token, and there is none"):
        _ = HubSource(REPO, token=True, endpoint=hub.endpoint, settings=settings).version


def test_the_saved_token_is_used(hub: HubServer, settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("hf_test\n")

    assert HubTarget("tester/other", endpoint=hub.endpoint, settings=settings).look() is None


def test_objects_do_not_show_it(hub: HubServer, settings: Settings) -> None:
    source = HubSource(REPO, token=SECRET, endpoint=hub.endpoint, settings=settings)
    target = HubTarget(REPO, token=SECRET, endpoint=hub.endpoint, settings=settings)

    assert SECRET not in repr([source, target, vars(source), vars(target), Token(SECRET)])


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"Bearer {SECRET} was wrong", "Bearer *** was wrong"),
        ("Bearer abc.def", "Bearer ***"),
        ("see hf_OtherToken1\n now", "see *** now"),
        ("GET https://cdn.example/x?Signature=abc&Key=1 failed", "GET https://cdn.example/x?*** failed"),
        ("https://user:pw@host/x", "https://***host/x"),
        (f"odd {SECRET[3:]}", "odd averysecretvalue"),
    ],
)
def test_words_of_others_lose_their_secrets(text: str, shown: str) -> None:
    assert quoted(text, Token(SECRET)) == shown


def test_words_of_others_are_cut() -> None:
    assert len(quoted("x" * 9999, None)) < 400
