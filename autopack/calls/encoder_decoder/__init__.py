"""Encoder-decoders: both halves of a call, and each half inside it."""
