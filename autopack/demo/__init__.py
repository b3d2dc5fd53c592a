"""The offline demonstration: a small Llama trained padded and packed, on text that is in every Python installation."""
