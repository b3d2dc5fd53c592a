"""A scale that counts the masked tokens of the row.

norms: bionemo-recipes#1221

ESM-2 scales embeddings by the share of masked tokens in a sequence. In packed input it was the
share of the whole row.
"""

from compat.museum.models._plain import Plain, means


class ScalesByDocument(Plain):
    def embed(self, call):
        masked = (call.input_ids % 5 == 0)[..., None].to(self.embedding.weight.dtype)
        return super().embed(call) / (1.2 - means(masked, self.sequences(call.documents)))

    def sequences(self, documents):
        return documents


class ScalesByRow(ScalesByDocument):
    def sequences(self, documents):
        return documents * 0


mistaken = ScalesByRow
sound = ScalesByDocument
