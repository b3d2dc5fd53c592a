"""A slow path that takes no bounds.

evaluation: axolotl#3572

The fast path of a layer takes the numbers of documents, and the slow one that stands in for it does
not. Here evaluation takes the slow one.
"""

from compat.museum.models._plain import Plain


class FallsBack(Plain):
    def documents(self, call):
        found = super().documents(call)
        return found if self.training else found * 0


mistaken = FallsBack
