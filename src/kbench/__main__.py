"""`python -m kbench` and the command `kbench`: the entry, which is there before anything else is loaded."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line and exit with its status. A Ctrl-C while modules are still being loaded is one line, too."""
    try:
        from kbench.cli.app import main as run
    except KeyboardInterrupt:
        sys.stderr.write("kbench: interrupted\n")
        sys.exit(130)  # Exit.INTERRUPTED, which is not loaded yet
    run()


if __name__ == "__main__":
    main()
