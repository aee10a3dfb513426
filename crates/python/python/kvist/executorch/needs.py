"""What this package needs beside torch, and says so when it is missing."""

import importlib.util

VERSION = "1.5.1"


def needs_executorch() -> None:
    """Raises if the package executorch is not there."""
    if importlib.util.find_spec("executorch") is None:
        raise ImportError(
            f"kvist.executorch needs the package executorch, which is not installed: pip install executorch=={VERSION}"
        )
