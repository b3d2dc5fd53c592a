"""The backbone of an unpadded call whose loss is the model's: what its documents begin with runs once, in it alone.

Labels differ where documents part, so head and loss get every token of every document, as they would without this.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autopack.calls.call import Call
from autopack.calls.outputs import restore
from autopack.calls.plan import Plan
from autopack.layout.forms import Frame, Of
from autopack.layout.prefixes import SharedPadding
from autopack.runtime.scope import Activation, Scope


class PrefixesInside(Plan):
    """Packed rows of documents, with what they begin with taken together."""

    what = "runs what its documents begin with once"
    reason = "the loss of the model around it is of every token of every document"

    def __init__(self, call: Call, scope: Scope, padding: SharedPadding):
        self._padding, prefixes = padding, padding.prefixes
        self.arguments, frame = dict(call.arguments), Frame(*padding.shape)
        for name, value in call.arguments.items():
            form = frame.form_of(name, value)
            if form.of is Of.TOKEN:
                self.arguments[name] = frame.each(value, form, self._padding.gather)
        super().__init__(replace(scope, layout=prefixes.documents, prefixes=prefixes))

    @classmethod
    def at(cls, call: Call, outer: Activation) -> PrefixesInside | None:
        """The plan for a call inside one that was decided about, if this is where it is to be."""
        padding = None if outer.plan is None else outer.plan.prefixes_inside
        if padding is None or call.entry.inner or outer.scope.layout is None:
            return None
        frame = Frame(*padding.shape)
        forms = [frame.form_of(name, value).of for name, value in call.arguments.items()]
        if call.inputs is None or tuple(call.inputs.shape[:2]) != padding.shape or Of.UNKNOWN in forms:
            return None
        return cls(call, outer.scope, padding)

    @torch._dynamo.disable
    def finish(self, module: nn.Module, output: Any) -> Any:
        return restore(output, self._padding, pooled=False)
