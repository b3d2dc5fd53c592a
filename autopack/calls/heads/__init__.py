"""Heads with one result per document."""
