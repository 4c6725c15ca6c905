"""Where the command line starts: `odmoe`, or `python -m odmoe`."""

from __future__ import annotations

import sys
from typing import NoReturn


def main() -> NoReturn:
    """Run the command line. Ctrl-C while it is imported ends like any other."""
    try:
        from odmoe.cli.main import main as run
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
