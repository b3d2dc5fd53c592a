"""Fields that the user wants left out of what packed calls return: of these nobody can tell what belongs to whom."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import Any

from transformers.utils import ModelOutput

from autopack.errors import UnsupportedModel


def without(output: Any, names: Collection[str]) -> Any:
    """An output without the fields of these names; they read as None where the output has attributes.

    Raises `UnsupportedModel` for a tuple, in which fields have no names.
    """
    if isinstance(output, ModelOutput):
        for name in names:
            if name in output:
                OrderedDict.__delitem__(output, name)  # its own raises
                object.__setattr__(output, name, None)
        return output
    if isinstance(output, Mapping):
        return type(output)({name: value for name, value in output.items() if name not in names})  # type: ignore[call-arg]
    if isinstance(output, tuple) and hasattr(output, "_fields"):
        fields: Any = output
        return fields._replace(**{name: None for name in names if name in fields._fields})
    if isinstance(output, tuple | list):
        raise UnsupportedModel(
            f"leave_out={list(names)!r} names fields of the output, and this call returns a {type(output).__name__}, "
            f"whose parts have no names. Pass return_dict=True."
        )
    held = [name for name in names if name in getattr(output, "__dict__", ())]
    if held:
        output = copy.copy(output)
        vars(output).update(dict.fromkeys(held))
    return output
