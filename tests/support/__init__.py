"""Shared code of several tests: models, batches, pages and calls."""
