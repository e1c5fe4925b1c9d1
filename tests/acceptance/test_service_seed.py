"""The curl command and the snippets of the page that this service was asked for with, as they stand there.

They lie in ``seed_service``; a model is served under the id that they name. What a snippet leaves free (``resp``,
``n_layers_for_model``) is put in front of it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.xdist_group("demo-model")

SAMPLES = Path(__file__).parent / "seed_service"
LAYERS, HIDDEN = 30, 576


def _sample(name: str) -> str:
    return (SAMPLES / f"{name}.txt").read_text(encoding="utf-8")


def _ran(command: list[str], stdin: str, **variables: str) -> str:
    environment = {**os.environ, **variables}
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def _by_curl(service: Any, command: str) -> str:
    return _ran(["bash", "-s"], command, ACS_API_BASE=service.base_url, ACS_API_KEY=service.key)


def _decoded(answer: str, *snippets: str, told: int) -> tuple[list[int], list[int]]:
    """Shapes of what the snippets call ``x`` and ``layer16``, as a program of its own finds them."""
    given = f"import json\nresp = json.loads({answer!r})\nn_layers_for_model = {told}\n"
    shown = '\nprint(json.dumps([x.shape, globals().get("layer16", x[0]).shape, str(x.dtype)]))\n'
    x, layer, dtype = json.loads(_ran([sys.executable, "-"], given + "".join(snippets) + shown))
    assert dtype == "bfloat16"
    return x, layer


def test_the_curl_command_and_the_snippets(demo_service: Any) -> None:
    answer = _by_curl(demo_service, _sample("capture"))

    shapes = _decoded(answer, _sample("decode"), _sample("check"), told=LAYERS)

    assert shapes == ([LAYERS, 5, HIDDEN], [5, HIDDEN])
    body = json.loads(answer)
    assert body["usage"] == {"prompt_tokens": 5, "completion_tokens": 1, "total_tokens": 6}
    assert body["choices"][0]["text"] == " Paris"
    envelope = body["activations"]["residual_stream"]
    assert (envelope["dtype"], envelope["original_dtype"], envelope["compression"]) == (
        "int16",
        "torch.bfloat16",
        "zstd",
    )
    assert answer.index('"usage"') < answer.index('"activations"')


def test_the_curl_command_for_two_layers(demo_service: Any) -> None:
    line = _sample("layers").partition("//")[0].rstrip()
    command, replaced = re.subn(r'"output_residual_stream": true', line, _sample("capture"))
    assert replaced == 1

    # The last line of that snippet takes layer 16 out of all of them.
    decode = _sample("decode").rsplit("layer16", 1)[0]
    shape, _ = _decoded(_by_curl(demo_service, command), decode, _sample("check"), told=2)

    assert shape == [2, 5, HIDDEN]
