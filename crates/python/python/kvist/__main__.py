"""The program ``kvist``: ``python -m kvist`` and the script that pip installs."""

import signal
import sys

from . import _native


def main() -> None:
    # The program listens for Ctrl-C while it computes. Before that, as while a model is loaded, it ends at once.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(_native.run_program(["kvist", *sys.argv[1:]], _native.__file__))


if __name__ == "__main__":
    main()
