"""One route for the whole row.

routers: MEO#2

A sequence takes the experts that the mean of its tokens scores highest. The mean was that of the
row, with all documents in it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compat.museum.models._plain import Router, means, of


class RoutesByRow(Router):
    def chosen(self, scores: Tensor, documents: Tensor) -> Tensor:
        return super().chosen(means(scores, torch.zeros_like(documents)), documents)


class RoutesByDocument(Router):
    def chosen(self, scores: Tensor, documents: Tensor) -> Tensor:
        return super().chosen(means(scores, documents), documents)


mistaken = of(RoutesByRow)
sound = of(RoutesByDocument)
