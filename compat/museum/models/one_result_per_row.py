"""A classifier with one result per row.

heads: trl#3780

Classifiers and reward models give one result per row of their batch, that of its last token. A
packed row has several documents, and all but one get none.
"""

stock = ("llama", "sequence-classification")
