"""Options of loading: each backend gets its own, and is refused what means nothing to it."""

from __future__ import annotations

from typing import Any

import pytest

from streamtap.errors import InvalidInput, Unsupported
from streamtap.workbench.load_options import LoadOptions


def test_each_backend_gets_its_own() -> None:
    assert LoadOptions(dtype="float32", batch_size=8).arguments() == {
        "backend": "local",
        **{"revision": None, "dtype": "float32", "device": "auto", "device_map": None, "quantization": None},
        **{"attention": None, "batch_size": 8, "max_batch_tokens": None},
    }
    assert LoadOptions(backend="nnsight", remote=True, batch_size=4).arguments()["remote"] is True
    assert LoadOptions(backend="nnsight", batch_size=4).arguments()["batch_size"] == 4
    vllm = LoadOptions(backend="vllm", batch_size=8, engine_options={"tensor_parallel_size": 2})
    assert vllm.arguments() == {"backend": "vllm", "revision": None, "dtype": "auto", "tensor_parallel_size": 2}
    api = LoadOptions(backend="api", api_base="http://h/v1", api_key="k", batch_size=8)
    assert api.arguments() == {
        **{"backend": "api", "revision": None, "dtype": "auto", "api_base": "http://h/v1", "api_key": "k"}
    }


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"backend": "vllm", "device": "cuda:1"}, "device means nothing to backend='vllm'"),
        ({"backend": "api", "quantization": "8bit", "device": "cpu"}, "device, quantization mean nothing"),
        ({"api_key": "secret"}, "api_key means nothing to backend='local'"),
        (
            {"backend": "api", "engine_options": {"dtype": "float32"}},
            "dtype cannot stand in engine_options: pass dtype=",
        ),
        ({"backend": "api", "engine_options": {"api_key": "secret"}}, "api_key cannot stand in engine_options"),
        ({"engine_options": {"backend": "api"}}, "backend cannot stand in engine_options"),
        ({"backend": "api", "engine_options": {"batch_size": 4}}, "batch_size means nothing to backend='api'"),
        ({"backend": "tgi"}, "backend must be one of local, nnsight, vllm, api; got 'tgi'"),
    ],
)
def test_what_means_nothing_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput, match=said) as error:
        LoadOptions(**options)

    assert "secret" not in str(error.value)


def test_arguments_of_vllm_itself_stand_further_in() -> None:
    further = {"engine_options": {"quantization": "awq"}}
    assert LoadOptions(backend="vllm", engine_options=further).arguments()["engine_options"] == {"quantization": "awq"}


def test_ndif_is_nnsights_alone() -> None:
    with pytest.raises(Unsupported, match="remote=True runs on NDIF"):
        LoadOptions(backend="vllm", remote=True)


def test_a_key_is_not_shown() -> None:
    assert "secret" not in repr(LoadOptions(backend="api", api_key="secret"))
