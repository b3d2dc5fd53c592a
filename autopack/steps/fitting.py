"""Find how many tokens of a micro-batch fit into the memory of a device, from a step's peak."""

from __future__ import annotations

import torch

AUTO = "auto"
"""Value of `max_tokens` that asks for what fits."""
SHARE = 0.8
"""Share of the memory that is planned for: rows of other documents take a little more, and
allocators have gaps."""


class Memory:
    """The memory that torch's allocator hands out on one device, in bytes.

    Raises `ValueError` for a device whose memory torch does not count, as a CPU.
    """

    def __init__(self, device: torch.device):
        self.device = device
        if device.type == "cpu" or not hasattr(
            torch.get_device_module(device), "max_memory_allocated"
        ):
            raise ValueError(
                "max_tokens='auto' measures the memory of a device, which torch does not count on "
                f"{device.type}. Give a number of tokens."
            )
        self._module = torch.get_device_module(device)

    def begin(self) -> int:
        """Forget the peak so far; return the bytes that are held now."""
        self._module.reset_peak_memory_stats(self.device)
        return int(self._module.memory_allocated(self.device))

    def peak(self) -> int:
        """Return the most bytes held since `begin`."""
        return int(self._module.max_memory_allocated(self.device))

    def total(self) -> int:
        """Return the bytes that this process may hold: the held and the free ones."""
        free, _ = self._module.mem_get_info(self.device)
        return int(free + self._module.memory_reserved(self.device))


def tokens_that_fit(held: int, peak: int, tokens: int, total: int) -> int:
    """Return the number of tokens that fit into `SHARE` of `total` bytes, at least 1.

    `tokens` of them took `peak` bytes, where `held` bytes were there before. Gradients count as
    bytes of tokens, so the number is rather too small than too large.
    """
    of_a_token = max(peak - held, 1) / tokens
    return max(1, int((SHARE * total - held) / of_a_token))
