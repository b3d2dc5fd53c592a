"""The order of an epoch is drawn from the state of chance, which a resumed run does not have
yet."""

from __future__ import annotations

from compat.museum.data import _trainer
from compat.museum.exhibit import Exhibit

EXHIBIT = Exhibit(
    kind="resume",
    reported=("accelerate#4233", "transgenic#59"),
    says="The order of an epoch is drawn from torch's global generator when the epoch begins. A "
    "resumed run begins it in another state, and skips the first batches of another order.",
    mistaken=lambda: _trainer.trainer(accelerator_config={"use_seedable_sampler": False}),
    sound=lambda: _trainer.trainer(),
)
