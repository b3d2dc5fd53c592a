"""Values of tensors on the host, also under the transforms of torch.func."""

from __future__ import annotations

import numpy as np
import torch

from autopack.errors import UnsupportedModel

_WITHOUT_VALUES = (
    "autopack reads on the host where documents begin, and here position_ids, attention_mask or the like have no "
    "values: the call is recorded (torch.export) or stands for many (torch.vmap). Do that with the stock model, after "
    "`autopack.disable(model)`, or give it tokens alone."
)


def host_values(tensor: torch.Tensor) -> np.ndarray:
    """Copy an integer or boolean tensor of any shape to the host: int64 or bool where it had to be unwrapped.

    Raises `UnsupportedModel` where it has no values: in a call that is recorded (`torch.export`) or stands for many
    (`torch.vmap`).
    """
    host = tensor.detach().cpu()
    try:
        return host.numpy()
    except RuntimeError as error:
        if type(host) is not torch.Tensor:
            raise UnsupportedModel(_WITHOUT_VALUES) from error
    try:
        # Tensors of torch.func's derivatives share no memory with numpy, and can be read.
        found = host.tolist()
    except RuntimeError as error:
        raise UnsupportedModel(_WITHOUT_VALUES) from error
    return np.array(found, dtype=bool if host.dtype == torch.bool else np.int64).reshape(tuple(host.shape))
