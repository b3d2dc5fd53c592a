"""The state of a linear attention.

states: ms-swift#9618, Automodel#2147

The bounds of documents were dropped on the way to the linear attention of Qwen3.5. Its state and
its convolution went on over the row, while attention beside it kept documents apart.
"""

stock = ("qwen3_5_text",)
