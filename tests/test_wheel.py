"""The built wheel in an environment of its own: what `pip install streamtap` alone can do, without torch."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SAMPLES = ROOT / "tests" / "dataset" / "samples"
NOT_INSTALLED = ("torch", "transformers", "accelerate", "gguf", "matplotlib", "huggingface_hub", "obstore", "pandas")

# The environment takes half a minute to make: every test of this file runs in one process and shares it.
pytestmark = pytest.mark.xdist_group("wheel")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    _pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(ROOT))
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def clean(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that holds the wheel and what it asks for, and nothing else."""
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    constraints = str(ROOT / "constraints.txt")
    _pip("--python", str(python), "install", "--no-compile", "--constraint", constraints, str(wheel))
    return python


@pytest.fixture
def run(clean: Path, tmp_path: Path) -> Callable[[str], str]:
    """Run a script in that environment, in an empty folder, and give back what it prints."""

    def run_script(script: str) -> str:
        environment = {"HOME": str(tmp_path), "STREAMTAP_CACHE_DIR": str(tmp_path / "cache")}
        command = [str(clean), "-I", "-c", textwrap.dedent(script)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run_script


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_wheel_holds_what_the_package_reads_beside_its_code(wheel: Path) -> None:
    source = ROOT / "src"
    kept = [file for file in (source / "streamtap").rglob("*") if file.is_file() and "__pycache__" not in file.parts]

    held = set(zipfile.ZipFile(wheel).namelist())

    assert {file.relative_to(source).as_posix() for file in kept} <= held
    assert "streamtap/py.typed" in held
    assert any(name.endswith("licenses/LICENSE") for name in held)


def test_the_environment_lacks_what_runs_a_model(run: Callable[[str], str]) -> None:
    found = run(f"import importlib.util as u; print([name for name in {NOT_INSTALLED} if u.find_spec(name)])")

    assert found.strip() == "[]"


def test_every_public_name_but_the_engine_is_there(run: Callable[[str], str]) -> None:
    printed = run("""
        import streamtap
        for name in streamtap.__all__:
            try:
                getattr(streamtap, name)
            except streamtap.StreamtapError as error:
                print(name, type(error).__name__, error)
    """)

    (line,) = printed.splitlines()
    assert line.startswith("TransformersEngine MissingExtra ")
    assert "pip install 'streamtap[local]'" in line


def test_a_probe_learns_from_arrays(run: Callable[[str], str]) -> None:
    printed = run("""
        import numpy as np
        from streamtap import Probe
        labels = np.arange(80) % 2
        rows = np.random.default_rng(0).normal(size=(80, 8)) + 3 * labels[:, None]
        probe = Probe(classifier="logistic_regression", random_state=0).fit_from_activations(rows[:60], labels[:60])
        print(int((probe.predict_from_activations(rows[60:]) == labels[60:]).sum()))
    """)

    assert int(printed) >= 19


def test_the_cache_is_written_and_read(run: Callable[[str], str]) -> None:
    printed = run("""
        import ml_dtypes
        import numpy as np
        from streamtap import CacheStore
        from streamtap.cache import Channel, PromptKey
        from streamtap.fingerprint import tokens_digest
        ids = np.arange(3, dtype=np.int32)
        key = PromptKey(tokens_digest(ids), ids)
        rows = np.arange(12, dtype=np.float32).reshape(3, 4).astype(ml_dtypes.bfloat16)
        with CacheStore("rows") as store:
            number = store.ensure_set({"model": "m"}, {})
            with store.writer(number, [Channel("layer.0", "bfloat16", 4)]) as writer:
                writer.append([key], {"layer.0": rows}, np.array([0, 3]), ids, ids)
        with CacheStore("rows") as store:
            print(np.array_equal(store.read(store.find_set({"model": "m"}), [key.digest], "layer.0").values, rows))
    """)

    assert printed.strip() == "True"


def test_the_statements_are_shipped(run: Callable[[str], str]) -> None:
    assert int(run("from streamtap import load_statements; print(len(load_statements().texts))")) >= 300


def test_warming_up_names_the_extra_in_one_line(run: Callable[[str], str]) -> None:
    printed = run("""
        import json, pathlib
        from streamtap import UnifiedCache
        from streamtap.errors import MissingExtra
        model = pathlib.Path("model")
        model.mkdir()
        (model / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_layer": 2, "n_embd": 8}))
        (model / "model.safetensors").write_bytes(b"weights that nobody reads here")
        try:
            UnifiedCache(model=str(model), layers=[0], cache_dir="rows").warmup(["a prompt"])
        except MissingExtra as error:
            print(error)
    """)

    (line,) = printed.splitlines()
    assert "pip install 'streamtap[local]'" in line


def test_doctor_says_what_is_missing(run: Callable[[str], str]) -> None:
    printed = run("""
        import sys
        from streamtap.cli.main import main
        main(["doctor", "--json"])
    """)

    found = json.loads(printed)
    assert found["extras"] == dict.fromkeys(
        ("local", "demo", "plots", "hub", "stores", "corpora", "ray", "nnsight", "serve", "vllm"), False
    )
    assert found["libraries"]["numpy"]
    assert found["libraries"]["torch"] is None
    assert [device["name"] for device in found["devices"]] == ["cpu"]


def test_the_client_decodes_a_capture_without_torch(run: Callable[[str], str]) -> None:
    printed = run("""
        import httpx2, ml_dtypes, numpy as np
        from streamtap import Client
        from streamtap.codec import base64_chunks
        rows = np.arange(12).reshape(1, 3, 4).astype(ml_dtypes.bfloat16)
        answer = {"id": "cmpl-1", "object": "text_completion", "created": 0, "model": "m",
                  "choices": [{"index": 0, "text": " x", "logprobs": None, "finish_reason": "length"}],
                  "usage": {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4},
                  "activations": {"residual_stream": {
                      "data": b"".join(base64_chunks(rows)).decode(), "dtype": "int16",
                      "original_dtype": "torch.bfloat16", "shape": [1, 3, 4], "compression": "zstd"}}}
        transport = httpx2.MockTransport(lambda request: httpx2.Response(200, json=answer))
        with Client("http://127.0.0.1:1/v1", "key", transport=transport) as client:
            done = client.complete("abc", output_residual_stream=[2])
        print(done.text, np.array_equal(done.activations.acts[2], rows[0]))
    """)

    assert printed.split() == ["x", "True"]


def test_serving_names_the_extra_in_one_line(clean: Path, tmp_path: Path) -> None:
    command = [str(clean.parent / "streamtap"), "serve", "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)

    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "pip install 'streamtap[serve" in line


def test_a_dataset_in_a_folder_is_read_without_torch_or_the_hub(run: Callable[[str], str]) -> None:
    printed = run(f"""
        import streamtap
        name = {str(SAMPLES / "v2-pooled-logits-ppl")!r}
        acts, labels = streamtap.load_activations(name, layers=[15], return_labels=True)
        tensors, info = streamtap.load_activation_dataset(name, layers=[15])
        print(acts[15].shape, labels.dtype, tensors["hidden.layer_15"].numpy().shape, info["format_version"])
        print(streamtap.pull_dataset(name))
        with streamtap.UnifiedCache("example/SmolLM2-135M-Instruct-dequant", layers=[15]) as cache:
            print(cache.get_activations(streamtap.fetch_dataset_metadata(name).prompts)[0].shape)
    """)

    assert printed.splitlines() == ["(12, 576) int64 (12, 576) 2.0", "12", "(12, 576)"]


def test_a_dataset_on_the_hub_says_what_to_install(run: Callable[[str], str]) -> None:
    printed = run("""
        import streamtap
        for name in ("user/name", "s3://bucket/name"):
            try:
                streamtap.load_activations(name)
            except streamtap.StreamtapError as error:
                print(type(error).__name__, error)
    """)

    hub, store = printed.splitlines()
    assert hub.startswith("MissingExtra ")
    assert "pip install 'streamtap[hub]'" in hub
    assert "pip install 'streamtap[stores]'" in store
