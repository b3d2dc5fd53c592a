"""A backend is one file: whatever has a list of them has a new one too."""

import pytest

from autopack.attention import choose


@pytest.mark.parametrize(("implementation", "device", "names"), [
    ("sdpa", "cpu", ("sdpa",)),
    ("eager", "cpu", ("eager",)),
    ("eager", "cuda", ("eager",)),
    ("flex_attention", "cpu", ("flex",)),
    ("flash_attention_2", "cuda", ("flash",)),
    ("paged|flash_attention_2", "cuda", ("flash",)),
    ("of_mine", "cpu", ("eager",)),
])  # fmt: skip
def test_what_auto_may_take(implementation, device, names):
    assert choose.taken_by_auto(implementation, device) == names
