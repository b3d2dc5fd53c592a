"""Bounds that are kept for a tensor.

caches: unsloth#10879

Bounds were kept for as long as the same tensor of lengths came. A program that writes new lengths
into that tensor got the bounds of the batch before.
"""

from compat.museum.models._plain import Plain


class KeepsBounds(Plain):
    given = kept = None

    def documents(self, call):
        if self.kept is None or call.position_ids is None or self.given is not call.position_ids:
            self.given, self.kept = call.position_ids, super().documents(call)
        return self.kept


mistaken = KeepsBounds
