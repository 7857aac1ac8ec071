"""`python -m kbench` is `kbench`."""

from kbench.cli.app import main

if __name__ == "__main__":
    main()
