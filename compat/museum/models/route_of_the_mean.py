"""One route for the whole row.

routers: MEO#2

A sequence takes the experts that the mean of its tokens scores highest. The mean was that of the
row, with all documents in it.
"""

from compat.museum.models._plain import Router, means


class RoutesByDocument(Router):
    def chosen(self, scores, documents):
        return super().chosen(means(scores, documents), documents)


class RoutesByRow(RoutesByDocument):
    def chosen(self, scores, documents):
        return super().chosen(scores, documents * 0)


mistaken = RoutesByRow
sound = RoutesByDocument
