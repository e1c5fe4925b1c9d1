"""A harvest on a Ray cluster whose engine is a real vLLM, from the command line, against the model in float32.

It runs with the Python of an environment that make-environment.sh made.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import transformers

from streamtap import HarvestedRun
from streamtap.testing import PlainReference
from streamtap.testing.engine_suite_holding import row_errors

N_LAYERS = 30
#: Largest ‖a − b‖ / ‖b‖ of a row.
FLOAT32 = 2e-4
#: Few tokens in a step and few blocks, so that long prompts run in pieces.
OPTIONS = {"max_model_len": 512, "engine_options": {"max_num_batched_tokens": 64, "num_gpu_blocks_override": 8}}
LENGTHS = (1, 2, 7, 30, 65, 130, 3, 12, 300, 5)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    chosen = np.random.default_rng(5)
    return [chosen.integers(100, 40_000, length).tolist() for length in LENGTHS]


def test_a_harvest_on_a_cluster_is_made_by_vllm(demo: str, prompts: list[list[int]], tmp_path: Path) -> None:
    file, out = tmp_path / "prompts.jsonl", tmp_path / "run"
    file.write_text("".join(json.dumps(ids) + "\n" for ids in prompts))
    what = ["--model", demo, "--layers", "all", "--dtype", "float32", "--model-dtype", "float32", "--shard-size", "4"]
    where = ["--cluster", "local", "--engines", "1", "--backend", "vllm"]
    more = [word for name, value in OPTIONS.items() for word in ("--engine-option", f"{name}={json.dumps(value)}")]

    command = [sys.executable, "-m", "streamtap", "harvest", "run", str(file), "--out", str(out), *what, *where, *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)

    assert done.returncode == 0, done.stderr
    run = HarvestedRun.open(out)
    run.verify()
    plain = PlainReference(transformers.AutoModelForCausalLM.from_pretrained(demo).float().eval())
    assert len(run) == len(prompts)
    for i, ids in enumerate(prompts):
        assert run.token_ids(i).tolist() == ids
        rows, expected = run.prompt(i), plain.rows(ids)
        assert sorted(rows) == list(range(N_LAYERS))
        assert max(row_errors(rows[layer], expected[layer]).max() for layer in rows) <= FLOAT32
