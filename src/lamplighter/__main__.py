"""python -m lamplighter: the same as lamp."""

import os
import sys

if not sys.flags.safe_path and sys.path and os.path.realpath(sys.path[0]) == os.path.realpath(""):
    # `python -m` has put the current folder first on the import path: a file signal.py in it would be loaded next.
    del sys.path[0]

from lamplighter.commands import main

sys.exit(main())
