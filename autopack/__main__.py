"""``python -m autopack``."""

from __future__ import annotations

import sys

from autopack.cli import main

sys.exit(main())
