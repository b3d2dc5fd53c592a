"""The token before, of another document.

states: flash-linear-attention#319

RWKV mixes every token with the one before it. Without bounds the first token of a document was
mixed with the last one of the document before.
"""

from compat.museum.models._plain import Convolution


class ShiftsDocument(Convolution):
    reach = (0, 1)


class ShiftsRow(ShiftsDocument):
    def reads(self, documents, back):
        return super().reads(documents * 0, back)


mistaken = ShiftsRow
sound = ShiftsDocument
