"""Optimizer steps cut anew: the documents of a step stay, the micro-batches and the ranks that run
them are chosen."""
