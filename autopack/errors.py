"""What autopack raises. Every message names what was wanted, what was found and the way out."""

from __future__ import annotations


class AutopackError(Exception):
    """Base of every error that autopack raises on purpose."""


class UnsupportedModel(AutopackError):
    """The model, or what was asked of it, cannot be served exactly; nothing was changed."""


class UnsupportedVersion(AutopackError, ImportError):
    """A package that autopack needs is installed in a version that is too old, for autopack or for transformers."""


class InvalidPacking(AutopackError, ValueError):
    """A call or a batch declares its documents wrongly, or two declarations disagree."""


class SiteDrift(AutopackError):
    """The installed transformers no longer has the shape that a patch was written for."""


class OutsideForward(AutopackError, RuntimeError):
    """An enabled module was reached without passing its model's entry, so its documents are unknown."""
