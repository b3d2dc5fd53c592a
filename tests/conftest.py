"""One thread per test process: tiny models gain nothing from more, and parallel workers would fight for the cores."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
