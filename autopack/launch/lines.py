"""Log through the program's own handlers where it has any, else as lines on stderr.

This is imported with the package, so it imports neither torch nor transformers.
"""

from __future__ import annotations

import logging
import os
import sys

VARIABLE = "AUTOPACK_LOG"
LEVELS = ("debug", "info", "warning", "error")


class Lines(logging.Handler):
    """Handler that writes lines on stderr if no other handler would, as Python's last resort does.

    It differs in two ways: it removes a progress bar of tqdm and draws it again below the line, and
    every line names autopack.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record as a line on stderr, if no handler of the program does."""
        if _is_handled():
            return
        try:
            text = self.format(record)
            write(text if text.startswith("autopack") else f"autopack: {text}")
        except Exception:
            self.handleError(record)


def write(line: str) -> None:
    """Write a line on stderr in one piece, above a progress bar of tqdm if there is one."""
    bars = getattr(sys.modules.get("tqdm"), "tqdm", None)
    if bars is None:
        sys.stderr.write(f"{line}\n")
    else:
        bars.write(f"{line}\n", file=sys.stderr, end="")
    sys.stderr.flush()


def _is_handled() -> bool:
    """Return True if the program gave this logger, or the root logger, a handler that writes."""
    named, root = logging.getLogger("autopack"), logging.getLogger()
    above = root.handlers if named.propagate else []
    return any(
        not isinstance(each, (Lines, logging.NullHandler)) for each in (*named.handlers, *above)
    )


def prepare() -> None:
    """Give the logger `autopack` its handler, once, and the level in `AUTOPACK_LOG`, if set."""
    logger = logging.getLogger("autopack")
    if not any(isinstance(each, Lines) for each in logger.handlers):
        logger.addHandler(Lines())
    level = os.environ.get(VARIABLE, "").strip().lower()
    if level in LEVELS:
        logger.setLevel(level.upper())
    elif level:
        logger.warning(
            "%s must be one of %s; found %r, which changes nothing",
            VARIABLE,
            ", ".join(LEVELS),
            level,
        )
