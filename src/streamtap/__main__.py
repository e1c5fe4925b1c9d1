"""``python -m streamtap`` is the same as ``streamtap``."""

from streamtap.cli.main import main

main()
