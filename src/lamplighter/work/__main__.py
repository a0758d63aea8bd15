"""python -m lamplighter.work VERB REQUEST: a child of the parent."""

import sys

from lamplighter.work import main

if __name__ == "__main__":
    sys.exit(main())
