"""Makes the modules of compat/ importable, and gives the derived tests their selection."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "compat"))
