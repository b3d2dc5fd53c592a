"""A failing case as a few lines of Python that a person can paste and change."""

from __future__ import annotations

from typing import Any

import torch

from compat.fuzz.case import Case
from compat.fuzz.judge import Verdict
from compat.fuzz.model import Model
from compat.fuzz.session import kernels

_TEMPLATE = """\
# {status}: {reason}
{imports}

with contextlib.ExitStack() as stack:
{kernels}    stock, model = ({built} for _ in range(2))
    autopack.enable(model{enable})
    for each in (stock, model):
        each.train({training}){checkpointing}
    arguments = {arguments}
    output = model(**arguments)
{documents}"""
_DOCUMENT = """\
    alone = stock({arguments})
    print((output[{field!r}][{place}] - alone[{field!r}][0]).abs().max())  # wanted: 0, but for rounding
"""


def snippet(case: Case, verdict: Verdict) -> str:
    """Python that builds the model, makes the call, and prints how far logits are from those of each document alone.

    Labels, gradients and results of rows are compared by `python -m compat.fuzz --case`, which takes the JSON.
    """
    with kernels(case.spec):
        model = Model(case.spec, enabled=False)
        asked = model.call(case.call)
        fields = model.alone(asked.picks[0], 0, case.call, False)[0]
        lines = []
        for place in range(len(asked.picks)):
            row, (first, end) = asked.call.sides.halves[0].place_of(place)
            given = model.by_itself(asked.picks[place], case.call.offsets[place], False)
            field = "logits" if "logits" in fields else next(iter(fields))
            arguments = ", ".join(f"{name}={_code(value)}" for name, value in given.items())
            of_tokens = fields[field].dim() > 1 and fields[field].shape[1] == len(model.pool.documents[asked.picks[0]])
            found = f"{row}, {first}:{end}" if of_tokens else str(place)
            lines.append(_DOCUMENT.format(arguments=arguments, field=field, place=found))
    spec, call = case.spec, case.call
    overrides = "".join(f", {name}={value!r}" for name, value in spec.overrides().items())
    given = {
        name: value for name, value in (("backend", spec.backend), ("unpad", spec.unpad)) if value not in ("auto", True)
    }
    standins = sorted({spec.implementation, spec.backend} & {"flash", "flex"})
    reentrant = {"use_reentrant": call.checkpointing == "reentrant"}
    checkpointing = f"\n        each.gradient_checkpointing_enable({reentrant})"
    return _TEMPLATE.format(
        status=verdict.status,
        reason=verdict.reason,
        imports="import contextlib\n\nimport torch\n\nimport autopack\nfrom compat.exactness import built, stand_in",
        kernels="".join(f"    stack.enter_context(stand_in({name!r}))\n" for name in standins),
        built=f"built({spec.model_type!r}, {spec.implementation!r}, torch.{spec.dtype}, {spec.task!r}{overrides})",
        enable="".join(f", {name}={value!r}" for name, value in given.items()),
        training=call.training,
        checkpointing=checkpointing if call.checkpointing else "",
        arguments="{" + ", ".join(f"{name!r}: {_code(value)}" for name, value in asked.arguments.items()) + "}",
        documents="".join(lines),
    )


def _code(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    dtype = "" if value.dtype in (torch.int64, torch.float32) else f", dtype={value.dtype}"
    return f"torch.tensor({value.tolist()}{dtype})"
