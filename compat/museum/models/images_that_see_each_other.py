"""Images that see all images of the row.

images: transformers#38080

Tokens of an image see each other in both directions. The mask was opened between all tokens of
images in the row, whichever document they are of.
"""

from compat.museum.models._plain import Plain, together


class OpensAllImages(Plain):
    def mask(self, call):
        return super().mask(call) | self.opened(call)[:, None]

    def opened(self, call):
        image = call.input_ids % 3 == 0
        return image[:, :, None] & image[:, None]


class OpensOwnImages(OpensAllImages):
    def opened(self, call):
        return super().opened(call) & together(call.documents)


mistaken = OpensAllImages
sound = OpensOwnImages
