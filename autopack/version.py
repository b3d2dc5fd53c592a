"""The version of this package, read by the build too, and the oldest versions of what it needs."""

__version__ = "0.1.0"

MINIMUM = {"torch": "2.4", "transformers": "4.48", "wrapt": "1.16", "packaging": "23", "numpy": "1.26"}
"""Packages that autopack needs, with the oldest version that it works with."""
