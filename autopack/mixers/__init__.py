"""Token mixers other than attention, made to start anew at every document."""

from autopack.mixers.rows import run_per_document_row
from autopack.mixers.site import adapt_mixer

__all__ = ["adapt_mixer", "run_per_document_row"]
