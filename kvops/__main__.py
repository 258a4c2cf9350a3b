"""python -m kvops COMMAND: see `kvops.commands`."""

import sys

from .commands import main

if __name__ == "__main__":
    sys.exit(main())
