"""Makes the demo model in a process of its own, so that the caller's never loads torch.

Started as ``python -m streamtap.engines.unpacking CACHE_DIR``; a failure is one sentence on standard error.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from streamtap.engines.demo_model import demo_folder, find_gguf, is_unpacked
from streamtap.errors import InvalidInput, StreamtapError
from streamtap.settings import Settings


def unpack_demo(settings: Settings) -> None:
    """Make the demo model's folder in the cache (about 30 s) unless it is there.

    Raises:
        InvalidInput: the model is not on this machine, or what reads it is not installed; the message says what to do.
    """
    if is_unpacked(settings):
        return
    find_gguf(settings)  # a missing file needs no process to say so
    command = [sys.executable, "-m", "streamtap.engines.unpacking", str(settings.cache_dir)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"])[-1]
        raise InvalidInput(f"the demo model could not be unpacked: {last}")


def _main(cache_dir: str) -> None:
    settings = Settings(cache_dir=Path(cache_dir), hub_cache_dir=Path(cache_dir))  # nothing of the Hub is touched
    try:
        demo_folder(settings)
    except StreamtapError as error:
        sys.exit(" ".join(str(error).split()))


if __name__ == "__main__":
    _main(sys.argv[1])
