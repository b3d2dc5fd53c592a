"""One mask for all rows.

masks: candle#3610

The mask was filled for the first row of a batch alone. Here the others get that one, although their
documents begin elsewhere.
"""

from compat.museum.models._plain import Plain


class MasksByFirstRow(Plain):
    def mask(self, call):
        made = super().mask(call)
        return made[:1].expand_as(made)


mistaken = MasksByFirstRow
