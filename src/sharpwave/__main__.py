"""`python -m sharpwave` is the `sharpwave` command."""

from sharpwave.tools.cli import main

if __name__ == "__main__":
    main()
