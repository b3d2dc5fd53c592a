"""Images that see all images of the row.

images: transformers#38080

Tokens of an image see each other in both directions. The mask was opened between all tokens of
images in the row, whichever document they are of.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from compat.museum.models._plain import Plain, together


class OpensAllImages(Plain):
    def forward(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.is_image = input_ids % 3 == 0
        return super().forward(input_ids, *args, **kwargs)

    def mask(self, documents: Tensor, positions: Tensor, attention_mask: Tensor | None) -> Tensor:
        return super().mask(documents, positions, attention_mask) | self.opened(documents)[:, None]

    def opened(self, documents: Tensor) -> Tensor:
        return self.is_image[:, :, None] & self.is_image[:, None]


class OpensOwnImages(OpensAllImages):
    def opened(self, documents: Tensor) -> Tensor:
        return super().opened(documents) & together(documents)


mistaken = OpensAllImages
sound = OpensOwnImages
