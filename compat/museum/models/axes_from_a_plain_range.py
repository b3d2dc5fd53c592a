"""Positions with three axes, replaced by a range.

images: Automodel#2172, AReaL#217

Tokens of an image have positions with several axes, which the model makes by itself. A packed row
came with one plain range per document, which stood in for all axes.
"""

from compat.museum.models._plain import Plain, places, together


class TakesRange(Plain):
    def positions(self, call):
        return self.steps(call) if call.position_ids is None else call.position_ids

    def steps(self, call):
        # every fourth token stands for a part of an image, and stays where it is
        text = (call.input_ids % 4 > 0).long()
        return (together(call.documents).tril() * text[:, None]).sum(-1)


class MakesAxes(TakesRange):
    def positions(self, call):
        first = 0 if call.position_ids is None else call.position_ids - places(call.documents)
        return self.steps(call) + first


mistaken = TakesRange
sound = MakesAxes
