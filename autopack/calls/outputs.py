"""Outputs in the form that the caller expects, and those with one result per row.

Outputs of an unpadded call are padded again, zero at padding. A pooler is a module, and its hook
hands it the rows of the batch or one document per row. A forward that picks a token by its own code
sees one row of many documents, and its result belongs to none of them. That shows in the output: a
tensor has values per row, and not per token. Then the padded batch is run as it came, or the
documents alone, and the entry is remembered.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from autopack.errors import UnsupportedModel
from autopack.inspection import media
from autopack.layout.forms import Frame, stands_for_no_router
from autopack.layout.packed import PackedLayout
from autopack.layout.pair import Pair
from autopack.layout.token_map import TokenMap, equally_long_documents, in_order
from autopack.runtime.in_graph import Joint, joined
from autopack.runtime.model import EnabledModel
from autopack.runtime.padding_read import PaddingRead
from autopack.runtime.scope import stock

ONE_PER_ROW = "the forward itself makes one result of every row"


@torch._dynamo.disable
def restore(
    output: Any,
    padding: TokenMap | Pair,
    pooled: bool = True,
    read: PaddingRead | None = None,
) -> Any:
    """Return a packed row's output in the rows and columns of the padded batch that it came from.

    A `ModelOutput` is changed in place. `pooled` says that a pooler was handed the rows of the
    batch, so that the output may hold vectors (rows, channels). `read` refuses gradients at padding
    in the other parts of an output with a loss. Logits of such an output are restored only when
    they are used.

    Raises `UnsupportedModel` for a tensor whose place in the batch is not known.
    """
    parts = parts_of(output)
    loss = loss_of(output)
    read = read if loss is not None and loss.requires_grad else None
    of = padding.of if isinstance(padding, Pair) else lambda name: padding

    def made(key: Any, values: Sequence[Any]) -> Any:
        """Return a `Joint` that brings a tensor into the padded form; any other value unchanged."""
        (value,), name = values, key if isinstance(key, str) else None
        if not isinstance(value, Tensor):
            return value
        way = of(name)
        if (
            way is None
            or value.dim() == 0
            or name == media.STATES
            or stands_for_no_router(name, value)
        ):
            return Joint([value])
        if pooled and value is parts[key] and value.dim() == 2 and len(value) == way.shape[0]:
            return Joint([value])
        axis, what = Frame(1, way.tokens).axis_of_output(name, value), name or "an output"
        if axis is None:
            raise UnsupportedModel(
                f"autopack ran a padded batch of shape {way.shape} as one row of {way.tokens} "
                f"tokens, and {what} of shape {tuple(value.shape)} cannot be brought back into the "
                "form of the batch. Use autopack.enable(model, unpad=False).",
                code="unpad-refused",
            )

        refuse = None if read is None else partial(read.refuse, name or f"[{key}]")

        def join(parts: Sequence[Tensor], fill: bool = False) -> Tensor:
            """Return a part in the rows and columns of the padded batch."""
            return way.restore(parts[0], axis, fill)

        def split(gradient: Tensor) -> list[Tensor]:
            """Return the part's gradient, [one tensor], from the padded output's."""
            return [way.gather(gradient, axis)]

        def check(gradient: Tensor) -> None:
            """Call `refuse`, which raises, if a gradient is not zero at padding."""
            gradient = gradient.detach().nan_to_num()
            if refuse is not None and bool((join(split(gradient)) != gradient).any()):
                refuse()

        def refuse_gradient() -> None:
            """Raise `UnsupportedModel`: a token that rows share has no gradient for each row."""
            raise UnsupportedModel(
                f"a gradient of {what} is asked for, and what rows begin with in common has run "
                "once, where that of each row cannot be told. Use autopack.enable(model, "
                "share=False).",
                code="share-refused",
            )

        shared = int(way.real.sum()) > way.tokens
        waits = axis > 0 and loss is not None and name == "logits"
        return Joint(
            [value],
            join,
            split=None if shared else split,
            refuse=refuse_gradient if shared else None,
            # A square of zeros has no slope, by which a reader of padding would be seen.
            values=None if read is None else partial(join, fill=True),
            check=None if read is None else check,
            shape=(*value.shape[: axis - 1], *way.shape, *value.shape[axis + 1 :])
            if waits
            else None,
        )

    return with_parts(output, joined({key: [value] for key, value in parts.items()}, made))


def parts_of(output: Any) -> dict[Any, Any]:
    """Return an output's parts by name or index; an output without parts as {None: output}."""
    if isinstance(output, Mapping):
        return dict(output.items())
    return dict(enumerate(output)) if isinstance(output, tuple | list) else {None: output}


def with_parts(output: Any, changed: Mapping[Any, Any]) -> Any:
    """Return the output with its parts replaced by `changed`; a `ModelOutput` in place."""
    if isinstance(output, ModelOutput):
        for name, value in changed.items():
            output[name] = value
        return output
    parts = {**parts_of(output), **changed}
    if isinstance(output, Mapping):
        return type(output)(parts)  # type: ignore[call-arg]
    return type(output)(parts.values()) if isinstance(output, tuple | list) else parts[None]


def loss_of(output: Any) -> Tensor | None:
    """Return the loss in an output of any form, summed to one number; None without a float loss."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None:
        is_plain = isinstance(output, tuple) and not hasattr(output, "_fields")
        first = output[:1] if is_plain else [output]
        is_number = [isinstance(part, Tensor) and part.dim() == 0 for part in first]
        loss = first[0] if True in is_number else None
    if not isinstance(loss, Tensor) or not loss.is_floating_point():
        return None
    return loss.sum() if loss.dim() else loss


def without(output: Any, names: Collection[str]) -> Any:
    """Return an output without fields `names`, a `ModelOutput` in place; raise for a plain tuple.

    Where the output has attributes, they become None. Raises `UnsupportedModel` for a tuple or
    list, in which fields have no names.
    """
    if isinstance(output, ModelOutput):
        for name in names:
            if name in output:
                OrderedDict.__delitem__(output, name)  # its own raises
                object.__setattr__(output, name, None)
        return output
    if isinstance(output, Mapping):
        return type(output)(  # type: ignore[call-arg]
            {name: value for name, value in output.items() if name not in names},
        )
    if isinstance(output, tuple) and hasattr(output, "_fields"):
        fields: Any = output
        return fields._replace(**{name: None for name in names if name in fields._fields})
    if isinstance(output, tuple | list):
        raise UnsupportedModel(
            f"packed calls leave {', '.join(names)} out of the output, and this call returns a "
            f"{type(output).__name__}, whose parts have no names. Pass return_dict=True.",
            code="output-unknown",
        )
    held = [name for name in names if name in getattr(output, "__dict__", ())]
    if held:
        output = copy.copy(output)
        vars(output).update(dict.fromkeys(held))
    return output


@torch._dynamo.disable
def with_documents_alone(
    model: EnabledModel,
    module: nn.Module,
    arguments: dict[str, Any],
    layout: PackedLayout,
    output: Any,
    names: list[Any],
) -> Any:
    """Return the packed rows' output with the parts at `names` from runs of each document alone.

    Documents of one length share a batch. Raises `UnsupportedModel` for an output with a loss, and
    for parts whose shapes differ by document.
    """
    if parts_of(output).get("loss") is not None:
        raise UnsupportedModel(
            f"{type(module).__name__} makes a loss and one result of every row, and the loss may "
            "be one of them. Compute it from the outputs, or run the documents one per row.",
            code="result-per-row",
        )
    groups = equally_long_documents(layout)
    batches = [TokenMap.of_documents(layout, group) for group in groups]
    frame = Frame(*layout.shape, shared=True)
    runs = []
    for batch in batches:
        given = frame.all_changed(arguments, batch.gather)
        with stock(model):
            runs.append(parts_of(module.forward(**given)))
    changed = {}
    for name in names:
        parts: list[Any] = [run.get(name) for run in runs]
        if all(batch.holds(part) for batch, part in zip(batches, parts, strict=True)):
            continue  # it has a value for each token after all
        changed[name] = in_order(parts, groups)
        if changed[name] is None:
            raise UnsupportedModel(
                f"{type(module).__name__} gives {name or 'its output'} of shapes that differ by "
                "document, and not for each token, so autopack cannot tell what of it is of which "
                "document of a packed row. Run the documents one per row.",
                code="output-unknown",
            )
    return with_parts(output, changed)
