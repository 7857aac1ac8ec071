"""Where everything that is costly to make again is kept; all of it may be deleted at any time."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def cache_folder() -> Path:
    """$KBENCH_CACHE, else $XDG_CACHE_HOME/kbench, else ~/.cache/kbench. It need not exist."""
    if own := os.environ.get("KBENCH_CACHE"):
        return Path(own)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "kbench"
    try:
        return Path.home() / ".cache" / "kbench"
    except RuntimeError:  # no home folder
        return Path(tempfile.gettempdir()) / f"kbench-{os.getuid()}"
