"""The offline demonstration: padded against packed training on text that is in every Python installation."""
