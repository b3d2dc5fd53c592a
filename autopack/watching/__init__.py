"""Checks of calls while a model is used: other documents are replaced, and nothing else may
move."""
