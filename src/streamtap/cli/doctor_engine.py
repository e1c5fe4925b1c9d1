"""``streamtap doctor --engine``: an engine held against the float32 reference, layer by layer."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from streamtap.cli.notice import announce_unpacking, waiting
from streamtap.cli.text import columns, counted, show
from streamtap.errors import CaptureMissed, InvalidInput
from streamtap.settings import Settings

if TYPE_CHECKING:
    from streamtap.engines.base import Engine
    from streamtap.engines.self_check import LayerCheck, SelfCheck
    from streamtap.engines.self_check_reference import Reference

#: What runs the model: a backend of ours, or a process at an address.
ENGINES = ("local", "nnsight", "vllm", "api", "url")
#: How the one line begins that says why an engine was refused; a gateway looks for it.
REFUSED = "refused: "

#: Which options mean something to which engine, beside those that all have.
_FOR = {
    "dtype": ("local", "nnsight", "vllm", "api"),
    "api_base": ("api",),
    "served_as": ("api", "url"),
    "url": ("url",),
    "key_file": ("url",),
}
OPTIONS = (
    click.option("--engine", type=click.Choice(ENGINES), help="Compare this engine with the float32 reference."),
    click.option("--model", help="'demo', a folder, a GGUF file or a Hub id.  [default: demo]"),
    click.option("--revision", help="Branch, tag or commit of a Hub id."),
    click.option("--dtype", help="What the engine computes in; else the checkpoint's."),
    click.option("--api-base", help="With api: the server; else what the environment says."),
    click.option("--url", help="With url: the engine process, such as http://127.0.0.1:8001."),
    click.option("--as", "served_as", metavar="NAME", help="With api or url: what the model is called there."),
    click.option("--key-file", type=click.Path(path_type=Path), help="With url: a file that holds its key."),
    click.option("--reference", type=click.Path(path_type=Path), help="Take the reference from this file."),
    click.option("--write-reference", type=click.Path(path_type=Path), help="Only make the reference, into this file."),
)


@dataclass(frozen=True)
class Asked:
    """The options of a self-check, as they were given."""

    engine: str | None = None
    model: str | None = None
    revision: str | None = None
    dtype: str | None = None
    api_base: str | None = None
    url: str | None = None
    served_as: str | None = None
    key_file: Path | None = None
    reference: Path | None = None
    write_reference: Path | None = None

    @property
    def checkpoint(self) -> str:
        """The model that the reference is made of."""
        return self.model or "demo"

    @property
    def names_files(self) -> bool:
        """Whether the checkpoint is one of this machine or the Hub, not just what somebody else serves."""
        return self.model is not None or self.engine not in ("api", "url")

    @property
    def is_nothing(self) -> bool:
        """Whether no option of a self-check was given."""
        return self == Asked()

    def check(self) -> None:
        """Refuse what does not go together.

        Raises:
            click.UsageError: which option, and what it needs.
            InvalidInput: the reference would go to a file that is there already.
        """
        if self.write_reference is not None:
            others = ("engine", "reference", *_FOR)
            _refuse_beside(self, "--write-reference stands alone with --model", others)
            if self.write_reference.exists():
                raise InvalidInput(f"{self.write_reference} is there already; name another file.")
            return
        if self.engine is None and self.reference is not None:
            _refuse_beside(self, "--reference stands alone with --model, and is then kept as that model's", _FOR)
            return
        if self.engine is None:
            raise click.UsageError(f"name what is to be compared with --engine: {', '.join(ENGINES)}.")
        for option, engines in _FOR.items():
            if getattr(self, option) is not None and self.engine not in engines:
                flag = _flag(option)
                raise click.UsageError(f"{flag} goes with --engine {' or '.join(engines)}, not with {self.engine}.")
        if self.engine == "url" and self.url is None:
            raise click.UsageError("--engine url needs --url, the address of a running engine process.")


def compare_engine(asked: Asked, as_json: bool) -> int:
    """Do what ``asked`` says and print what came of it; 0 where the engine passed, 1 where it is refused."""
    from streamtap.engines.self_check_reference import check_reference, read_reference, reference_for

    asked.check()
    settings = Settings.from_environment()
    if asked.reference is not None:
        reference = read_reference(asked.reference)
        if asked.engine is not None and asked.names_files:
            announce_unpacking(asked.checkpoint)
            check_reference(reference, asked.checkpoint, asked.revision, settings=settings)
    else:
        announce_unpacking(asked.checkpoint)
        with waiting("looking for the float32 reference"):
            reference = reference_for(asked.checkpoint, asked.revision, settings=settings, say=_say)
    if asked.engine is None:
        return _put_by(reference, asked, settings)
    found = _checked(asked, reference, settings)
    show([json.dumps(_as_json(found, reference), indent=2)] if as_json else _lines(found, reference))
    return 0 if found.passed else 1


def _checked(asked: Asked, reference: Reference, settings: Settings) -> SelfCheck:
    from streamtap.engines.self_check import check_engine, refused

    where = f"at {asked.url}" if asked.engine == "url" else f"on {asked.engine}"
    name = asked.served_as or f"{asked.checkpoint} {where}"
    try:
        with _results_alone(), waiting("asking the engine"), closing(_opened(asked, reference, settings)) as engine:
            return check_engine(engine, reference, name=name)
    except CaptureMissed as error:  # of the first look at what it computes in
        return refused(error, name=name)


@contextmanager
def _results_alone() -> Iterator[None]:
    """What a library writes, here or in a process that it starts, goes to standard error: the other is for results."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _opened(asked: Asked, reference: Reference, settings: Settings) -> Engine:
    if asked.engine == "url":
        from streamtap.engines.dialect_engine import DialectEngine

        key = settings.worker_key if asked.key_file is None else _key_in(asked.key_file)
        # The reference is of the model, so that its shape is what the engine's rows are held to.
        return DialectEngine.load(str(asked.url), key=key, model=asked.served_as, shape=reference.shape)
    from streamtap.engines.opening import load_engine

    given = {"revision": asked.revision, "dtype": asked.dtype, "api_base": asked.api_base}
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    name = asked.served_as or asked.checkpoint
    return load_engine(name, backend=str(asked.engine), **options)


def _key_in(file: Path) -> str:
    try:
        key = file.read_text(encoding="ascii").strip()
    except OSError as error:
        raise InvalidInput(f"the file of the engine's key, {file}, cannot be read ({error.strerror}).") from error
    except UnicodeDecodeError:
        key = ""
    if not key:
        # Not with its cause, which quotes the file.
        raise InvalidInput(f"the file of the engine's key, {file}, holds no key in one line of ASCII.") from None
    return key


def _put_by(reference: Reference, asked: Asked, settings: Settings) -> int:
    """Write the reference where it was asked for, or keep the one that was given."""
    from streamtap.engines.self_check_reference import keep_reference, write_reference

    file = asked.write_reference
    if file is None:
        file = keep_reference(reference, asked.checkpoint, asked.revision, settings=settings)
    else:
        write_reference(reference, file)
    _say(f"wrote the float32 reference of {reference.model} to {file}")
    return 0


def _refuse_beside(asked: Asked, why: str, options: Iterable[str]) -> None:
    if beside := [name for name in options if getattr(asked, name) is not None]:
        raise click.UsageError(f"{why}; {_flag(beside[0])} goes with a check.")


def _flag(option: str) -> str:
    return "--as" if option == "served_as" else f"--{option.replace('_', '-')}"


def _say(message: str) -> None:
    click.echo(message, err=True)


def _as_json(found: SelfCheck, reference: Reference) -> dict[str, Any]:
    """The outcome as plain JSON values; a number that there is none of is null."""
    return {
        "engine": found.engine,
        "dtype": found.dtype,
        "passed": found.passed,
        "fault": found.fault,
        "promised": asdict(found.tolerance),
        "reference": _about(reference),
        "layers": [{name: _plain(value) for name, value in asdict(each).items()} for each in found.layers],
    }


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and math.isnan(value) else value


def _about(reference: Reference) -> dict[str, Any]:
    return {
        "model": reference.model,
        "commit": reference.commit,
        "made_by": reference.made_by,
        "tokens": len(reference.token_ids),
    }


def _lines(found: SelfCheck, reference: Reference) -> Iterator[str]:
    n_layers, hidden = reference.shape
    size = f"{counted(n_layers, 'layer')}, hidden {hidden}, {counted(len(reference.token_ids), 'token')}"
    promised = found.tolerance
    yield from columns(
        [
            ("engine", f"{found.engine}, {found.dtype}"),
            ("reference", f"{reference.model} in float32: {size}"),
            ("made by", reference.made_by),
            ("promised", f"cosine at least {promised.cosine}, relative error at most {promised.relative}"),
        ]
    )
    if found.layers:
        yield ""
        yield from columns([("layer", "cosine", "relative", "verdict"), *map(_cells, found.layers)], right=(0, 1, 2))
    yield ""
    yield "passed" if found.fault is None else f"{REFUSED}{found.fault}"


def _cells(check: LayerCheck) -> tuple[str, str, str, str]:
    return str(check.layer), f"{check.cosine:.6f}", f"{check.relative:.1e}", check.verdict
