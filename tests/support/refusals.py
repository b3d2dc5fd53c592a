"""Errors of autopack by their codes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from autopack import AutopackError


@contextmanager
def refused(code: str, match: str | None = None) -> Iterator[pytest.ExceptionInfo[AutopackError]]:
    """Want an error of autopack with this code; `match` where its very words are what is tested."""
    with pytest.raises(AutopackError, match=match) as caught:
        yield caught
    assert caught.value.code == code, str(caught.value)
