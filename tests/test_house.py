"""The rules of the house that no linter knows; ARCHITECTURE.md says why each stands."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "streamtap"
SOURCES = sorted(PACKAGE.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))

MOST_LINES = 400
#: The error tree is one file by law, and a class costs it four lines.
LONG_BY_LAW = {"errors.py": 510}
MOST_FUNCTION_LINES = 40
BANNED_NAMES = {"utils", "util", "helpers", "helper", "common", "manager", "managers", "core", "misc"}
BANNED_IMPORTS = {"pickle", "cloudpickle", "joblib", "dill", "shelve", "marshal"}
BANNED_CALLS = {"eval", "exec", "torch.load", "torch.save"}
LEFT_FOR_LATER = re.compile(r"\b(TODO|FIXME|XXX|HACK|NotImplementedError)\b")
NOT_RUN = {"skip", "skipif", "xfail", "importorskip"}

#: Third-party libraries and the only places that may import them, as prefixes of a path in the package.
HOMES = {
    "accelerate": ("engines/",),
    "alembic": ("server/db/",),
    "click": ("cli/",),
    "datasets": ("workbench/hub_text.py",),
    "fastapi": ("server/", "testing/"),
    "gguf": ("engines/",),
    # In testing, what the local Hub needs to serve Xet, and to turn a running client to itself.
    "hf_xet": ("testing/",),
    "httptools": ("server/relaying/engine_http.py",),
    # What nnsight speaks to NDIF with: its errors and its waiting.
    "httpx": ("engines/nnsight/",),
    # An engine process is reached directly, whatever proxy the environment names for a client.
    "httpx2": ("client/", "engines/dialect_engine.py", "server/", "testing/"),
    "huggingface_hub": ("engines/", "dataset/hub", "workbench/hub_text.py", "testing/"),
    "matplotlib": ("workbench/plots.py",),
    "ml_dtypes": ("",),
    "nnsight": ("engines/nnsight/", "testing/ndif_server/"),
    "numpy": ("",),
    "obstore": ("blobs.py",),
    "orjson": ("wire/",),
    "prometheus_client": ("server/metrics.py",),
    "pybase64": ("codec.py",),
    "pydantic": ("wire/", "server/"),
    "pyarrow": ("dataset/", "workbench/prompt_files.py"),
    "ray": ("harvest/cluster_pool.py",),
    "rich": ("cli/", "workbench/progress.py"),
    "safetensors": ("engines/", "workbench/export.py"),
    "scipy": ("probes/",),
    "sklearn": ("probes/",),
    "sqlalchemy": ("server/db/",),
    "starlette": ("testing/", "server/", "engines/worker/"),
    "threadpoolctl": ("probes/",),
    "tokenizers": ("engines/", "testing/", "server/models/counting.py"),
    # On demand in Activations.torch() and for a stream of rows; in testing, whose models are torch's.
    "torch": ("activations.py", "capture/", "engines/", "harvest/stream.py", "testing/"),
    "transformers": ("capture/", "engines/", "testing/"),
    "uvicorn": ("testing/", "server/", "engines/worker/"),
    "vllm": ("engines/vllm_offline",),
    "vllm_lens": ("engines/vllm_offline",),
    "websocket": ("engines/nnsight/",),
    "zstandard": ("codec.py",),
}
#: Distributions whose name is not the one that is imported.
DISTRIBUTIONS = {"sklearn": "scikit-learn", "vllm_lens": "vllm-lens", "websocket": "websocket-client"}
#: The edges: the command line, the answer to an HTTP request, a bulk job, and the outermost loop of an engine's thread.
BROAD_EXCEPT_ALLOWED = (
    "cli/main.py",
    "server/surface/problems.py",
    "server/harvests/working.py",
    "engines/worker/app.py",
    "engines/generation/generator.py",
)
PRINT_ALLOWED = ("cli/",)
ENVIRONMENT_ALLOWED = ("settings.py",)


def _place(file: Path) -> str:
    return file.relative_to(PACKAGE if file.is_relative_to(PACKAGE) else ROOT).as_posix()


@cache
def _nodes(file: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(file.read_text(encoding="utf-8"), str(file))))


def _offenders(files: Iterable[Path], faults: Callable[[Path], Iterable[Any]]) -> dict[str, list[Any]]:
    """What is wrong with each file, by its place; empty when nothing is."""
    found = {_place(file): list(faults(file)) for file in files}
    return {place: wrong for place, wrong in found.items() if wrong}


def _dotted(node: ast.AST | None) -> str:
    return ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""


def _for_the_type_checker(file: Path) -> set[ast.AST]:
    blocks = [node for node in _nodes(file) if isinstance(node, ast.If) and _dotted(node.test) == "TYPE_CHECKING"]
    return {inner for block in blocks for statement in block.body for inner in ast.walk(statement)}


def _imports(file: Path) -> Iterator[str]:
    """Top-level names of the modules that the file imports when it runs, in functions too."""
    unseen = _for_the_type_checker(file)
    for node in _nodes(file):
        if node in unseen:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]


def _calls(file: Path) -> Iterator[str]:
    return (_dotted(node.func) for node in _nodes(file) if isinstance(node, ast.Call))


def test_there_is_a_house() -> None:
    assert len(SOURCES) > 40
    assert len(TESTS) > 10


def test_files_are_short() -> None:
    lengths = {file: len(file.read_text(encoding="utf-8").splitlines()) for file in SOURCES + TESTS}

    most = {file: LONG_BY_LAW.get(_place(file), MOST_LINES) for file in lengths}
    assert {_place(file): length for file, length in lengths.items() if length > most[file]} == {}


def test_functions_are_short() -> None:
    def long(file: Path) -> Iterator[str]:
        for node in _nodes(file):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _code_lines(node) > MOST_FUNCTION_LINES:
                yield f"{node.name}: {_code_lines(node)} lines"

    assert _offenders(SOURCES + TESTS, long) == {}


def _code_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of the body; a signature is as long as its arguments, and a docstring as long as it has to be."""
    body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def test_names_say_what_is_inside() -> None:
    assert _offenders(SOURCES, lambda file: BANNED_NAMES & {file.stem, file.parent.name}) == {}


def test_libraries_stay_in_their_homes() -> None:
    own = {*sys.stdlib_module_names, "streamtap"}

    def homeless(file: Path) -> set[str]:
        return set(_imports(file)) - own - set(HOMES)

    def misplaced(file: Path) -> set[str]:
        return {name for name in _imports(file) if name in HOMES and not _place(file).startswith(HOMES[name])}

    assert _offenders(SOURCES, homeless) == {}, "a new library needs a home, here and in ARCHITECTURE.md"
    assert _offenders(SOURCES, misplaced) == {}


def test_what_is_imported_is_declared() -> None:
    """A library that comes only as another's dependency may go away with it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    requirements = chain(project["dependencies"], *project["optional-dependencies"].values())
    declared = {re.split(r"[^\w-]", requirement)[0] for requirement in requirements}
    imported = {name for file in SOURCES for name in _imports(file) if name in HOMES}

    assert {DISTRIBUTIONS.get(name, name) for name in imported} <= declared


def test_the_error_tree_is_in_one_file() -> None:
    def errors(file: Path) -> dict[str, set[str]]:
        classes = [node for node in _nodes(file) if isinstance(node, ast.ClassDef)]
        return {node.name: {_dotted(base) for base in node.bases} for node in classes}

    tree = set(errors(PACKAGE / "errors.py"))
    others = [file for file in SOURCES if file.name != "errors.py"]

    assert _offenders(others, lambda file: [name for name, bases in errors(file).items() if bases & tree]) == {}


def test_nothing_runs_code_from_a_file() -> None:
    assert _offenders(SOURCES, lambda file: BANNED_IMPORTS & set(_imports(file))) == {}
    assert _offenders(SOURCES, lambda file: BANNED_CALLS & set(_calls(file))) == {}


def test_no_exception_is_swallowed() -> None:
    def swallowing(file: Path) -> Iterator[int]:
        for node in _nodes(file):
            if isinstance(node, ast.ExceptHandler) and _is_broad(node) and not _passes_on(node):
                yield node.lineno

    assert _offenders([file for file in SOURCES if _place(file) not in BROAD_EXCEPT_ALLOWED], swallowing) == {}


def _is_broad(handler: ast.ExceptHandler) -> bool:
    caught = handler.type
    kinds = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    return any(kind is None or _dotted(kind) in ("Exception", "BaseException") for kind in kinds)


def _passes_on(handler: ast.ExceptHandler) -> bool:
    """Whether the handler ends by raising what it caught: to clean up hides nothing."""
    last = handler.body[-1]
    return isinstance(last, ast.Raise) and last.exc is None


def test_only_the_edges_print_and_read_the_environment() -> None:
    def reads(file: Path) -> list[int]:
        return [node.lineno for node in _nodes(file) if _dotted(node) in ("os.environ", "os.getenv")]  # type: ignore[attr-defined]

    silent = [file for file in SOURCES if not _place(file).startswith(PRINT_ALLOWED)]
    blind = [file for file in SOURCES if _place(file) not in ENVIRONMENT_ALLOWED]

    assert _offenders(silent, lambda file: {"print"} & set(_calls(file))) == {}
    assert _offenders(blind, reads) == {}


def test_nothing_is_left_for_later() -> None:
    assert _offenders(SOURCES, lambda file: LEFT_FOR_LATER.findall(file.read_text(encoding="utf-8"))) == {}


def test_every_test_runs() -> None:
    def not_run(file: Path) -> set[str]:
        return NOT_RUN & {node.attr for node in _nodes(file) if isinstance(node, ast.Attribute)}

    assert _offenders(TESTS, not_run) == {}


def test_names_of_test_files_are_their_own() -> None:
    names = [file.name for file in TESTS if file.name.startswith("test_")]

    assert [name for name in set(names) if names.count(name) > 1] == []


def test_folders_of_tests_mirror_the_package() -> None:
    """A test file need not have its twin, since some test a way through the house; a folder must."""
    folders = {file.parent.relative_to(ROOT / "tests") for file in TESTS} - {Path("acceptance")}

    assert [folder.as_posix() for folder in folders if not (PACKAGE / folder).is_dir()] == []


def test_every_package_says_what_it_holds() -> None:
    packages = sorted({file.parent / "__init__.py" for file in SOURCES})

    assert [_place(file) for file in packages if not file.is_file()] == []
    assert [_place(file) for file in packages if not ast.get_docstring(_nodes(file)[0])] == []  # type: ignore[arg-type]
