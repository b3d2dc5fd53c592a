"""A convolution that knows the bounds, and a state that does not.

states: slime#1686

Bounds reached the short convolution of a layer, and were not handed to its recurrence. The state of
one document was the beginning of the next.
"""

from compat.museum.models._plain import Recurrence


class RunsOn(Recurrence):
    def resets(self, documents):
        return super().resets(documents * 0)


mistaken = RunsOn
sound = Recurrence
