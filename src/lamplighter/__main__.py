"""python -m lamplighter: the same as lamp."""

import sys

from lamplighter.commands import main

sys.exit(main())
