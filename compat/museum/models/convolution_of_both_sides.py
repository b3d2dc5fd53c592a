"""A convolution that reads both neighbours.

convolutions: audio#4205

The convolution of a Conformer ignored the lengths that its attention heeds. What stands beside a
sequence in its row changed the sequence at both ends.
"""

from compat.museum.models._plain import Convolution


class ReadsBothSides(Convolution):
    reach = (-1, 0, 1)


class IgnoresLengths(ReadsBothSides):
    def reads(self, documents, back):
        return super().reads(documents * 0, back)


mistaken = IgnoresLengths
sound = ReadsBothSides
