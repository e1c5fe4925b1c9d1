from __future__ import annotations

import pytest

from streamtap.errors import SettingsError
from streamtap.workbench.progress import progress_bar


def run(show: bool | None = None) -> None:
    with progress_bar("extracting", 40, show=show) as advance:
        for _ in range(3):
            advance(10)


def test_it_is_off_in_a_pipe(capfd: pytest.CaptureFixture[str]) -> None:
    run()

    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("by", ["argument", "setting"])
def test_it_is_shown_on_stderr_when_asked_for(
    by: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if by == "setting":
        monkeypatch.setenv("STREAMTAP_PROGRESS", "on")
    run(show=True if by == "argument" else None)

    out, err = capfd.readouterr()
    assert out == ""
    assert "extracting" in err
    assert "30/40" in err


@pytest.mark.parametrize("setting", ["on", "auto", "off"])
def test_the_argument_goes_before_the_setting(
    setting: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STREAMTAP_PROGRESS", setting)
    run(show=False)

    assert capfd.readouterr().err == ""


def test_a_terminal_shows_it_unless_it_is_off(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # which makes a terminal of anything, to rich
    run()
    shown = capfd.readouterr().err
    monkeypatch.setenv("STREAMTAP_PROGRESS", "off")
    run()

    assert "extracting" in shown
    assert capfd.readouterr().err == ""


def test_a_setting_without_meaning_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMTAP_PROGRESS", "maybe")
    with pytest.raises(SettingsError, match="STREAMTAP_PROGRESS"):
        run()


def stopped() -> None:
    with progress_bar("extracting", 2, show=True) as advance:
        advance(1)
        raise KeyboardInterrupt


def test_an_error_inside_ends_it(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt):
        stopped()

    assert "1/2" in capfd.readouterr().err
    run(show=True)  # and another may start
    assert "30/40" in capfd.readouterr().err
