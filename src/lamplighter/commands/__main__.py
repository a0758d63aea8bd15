"""python -m lamplighter.commands: the same as lamp."""

import sys

from lamplighter.commands import main

if __name__ == "__main__":
    sys.exit(main())
