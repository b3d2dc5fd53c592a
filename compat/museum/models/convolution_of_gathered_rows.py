"""A convolution over a row that ranks have put together.

convolutions: prime-rl#3000

Ranks that share a row put it together again for one causal convolution, and left the bounds behind.
The last token of a document reached the first ones of the next.
"""

from compat.museum.models._plain import Convolution


class SlidesOverRow(Convolution):
    def reads(self, documents, back):
        return super().reads(documents * 0, back)


mistaken = SlidesOverRow
sound = Convolution
