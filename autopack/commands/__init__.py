"""The subcommands of ``autopack``, one module each, and what several of their options have in common."""

from __future__ import annotations

import argparse


def positive(text: str) -> int:
    """The type of an option that takes a whole number above 0."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"wanted a number above 0, found {number}")
    return number
