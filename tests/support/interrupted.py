"""A KeyboardInterrupt at any point of autopack: at the n-th call that its code makes or gets."""

import sys
from pathlib import Path

import autopack

_CODE = str(Path(autopack.__file__).parent) + "/"
_EVENTS = ("call", "c_call", "c_return")
"""Events at which Python looks for signals: a function begins, or one written in C ends."""


class Interrupter:
    """Counter of the events in autopack's code, which raises an interrupt at one of them."""

    def __init__(self, at=None):
        self.at = at
        self.events = 0
        self.place = ""
        """File, line, function and event of the interrupt."""
        self.interrupted = False
        """True if the interrupt ended the function: Python swallows errors while it ends a
        generator."""

    def run(self, function):
        """Run a function up to the interrupt, or to its end if there is none."""
        before = sys.getprofile()
        sys.setprofile(self._count)
        try:
            function()
        except KeyboardInterrupt:
            if not self.place:
                raise
            self.interrupted = True
        finally:
            sys.setprofile(before)

    def _count(self, frame, event, argument):
        """Count an event, and raise `KeyboardInterrupt` if its number is `at`."""
        if event not in _EVENTS or not frame.f_code.co_filename.startswith(_CODE):
            return
        self.events += 1
        if self.events == self.at:
            sys.setprofile(None)
            self.place = (
                f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name} {event}"
            )
            raise KeyboardInterrupt


def events_of(function):
    """Return the number of events at which a function can be interrupted."""
    counter = Interrupter()
    counter.run(function)
    return counter.events


def spread(events, points, offset=0):
    """Return the numbers of `points` events, spread evenly over all of them."""
    return sorted({1 + (offset + index * events // points) % events for index in range(points)})
