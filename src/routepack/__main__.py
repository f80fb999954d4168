"""`python -m routepack`, the same as the `routepack` command."""

import sys

from routepack.cli import main

if __name__ == "__main__":
    sys.exit(main())
