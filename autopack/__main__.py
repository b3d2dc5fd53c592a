"""``python -m autopack``."""

import sys

from autopack.cli import main

sys.exit(main())
