"""The documents of a call, its runs in a check, and the calls that are checked: those that go
beyond the calls checked before.

A proof runs a few dozen tokens. Code may begin to mix them at more, at a token that it has not met,
in an argument that it was not given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from autopack.auditing.cases import tokens_named
from autopack.auditing.compare import UNDIVIDED, Arguments, Difference, Fields, how_far
from autopack.auditing.fields import Side, Sides, fields_of
from autopack.auditing.running import listening, preserved, stock_again
from autopack.calls.call import LAST_LOGITS, Call
from autopack.calls.encoder_decoder import PairCall
from autopack.inspection import media, torches
from autopack.inspection.randomness import afterwards, generators_restored
from autopack.layout.host import host_values
from autopack.layout.packed import PackedLayout, real_documents, real_tokens
from autopack.layout.pair import Half

TRAINS = "mode", True, True
"""The kind of calls in training mode with gradients."""


class CannotTell(Exception):
    """Error of a call, or of a part of it, that cannot be checked; the message says why."""


def layout_of(call: Call) -> PackedLayout | None:
    """Return the layout of a call's packed rows; None if it has none, or two of a pair."""
    return call.one_sided_layout() if isinstance(call, PairCall) else call.declared.layout


def pair_halves(call: Call) -> tuple[Half, ...]:
    """Return both halves of a pair's call that packs or pads them; () for other calls."""
    pair = call.find_pair() if isinstance(call, PairCall) and layout_of(call) is None else None
    return () if pair is None else pair.halves


def is_padded(call: Call) -> bool:
    """Return True if a call brings a padded batch."""
    packs = isinstance(call, PairCall) and bool(pair_halves(call)) and call.pair.packs
    return layout_of(call) is None and not packs


def sides_of(call: Call) -> Sides:
    """Return the `Sides` of a call; raise `CannotTell` if its documents are unknown."""
    if call.brings_choices:
        raise CannotTell("its rows are choices of questions")
    layout, real = layout_of(call), None if isinstance(call, PairCall) else call.declared.real
    if call.part is not None:
        layout = call.part[0]
    if layout is not None:
        owner = _owner(real_tokens(layout), layout.sizes[real_documents(layout)])
        sides = [Side(owner if call.part is None else owner[:, call.part[1]])]
    elif halves := pair_halves(call):
        prefixes = ("decoder_", "")  # of an encoder that takes no tokens there is no half
        sides = [
            Side(_owner(half.places.real, half.layout.lengths), prefix)
            for half, prefix in zip(halves[::-1], prefixes, strict=False)
        ]
    elif real is not None:
        sides = [Side(_owner(real, real.sum(1)))]
    else:
        raise CannotTell("its documents are declared further in")
    for asked in map(call.arguments.get, LAST_LOGITS):
        if isinstance(asked, Tensor) or (type(asked) is int and asked != 0):
            last: Any = (
                host_values(asked).reshape(-1) if isinstance(asked, Tensor) else slice(-asked, None)
            )
            sides.append(Side(sides[0].owner[:, last], sides[0].prefix))
    return Sides(sides)


def _owner(real: np.ndarray, lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return every token's document (rows, columns) from documents' `lengths`; -1 if not `real`."""
    owner = np.full(real.shape, -1)
    owner[real] = np.repeat(np.arange(len(lengths)), lengths)
    return owner


def shape_of(call: Call, closely: bool) -> tuple[tuple[int, ...], set[Any]]:
    """Return (sizes, kinds) of a call, in the form that `Checked` keeps.

    The call packs, or runs a padded batch without its padding.
    Tokens and media are read on the host only for code that is checked `closely`.
    """
    padded = is_padded(call)
    kinds: set[Any] = {
        (padded, name) for name, value in call.arguments.items() if value is not None
    }
    kinds.add(("mode", call.module.training, torch.is_grad_enabled()))
    inputs = call.inputs
    if call.prefixes is not None:
        kinds.add("rows that begin alike")
    if padded:
        on_the_right = (
            all(half.places.on_the_right for half in pair_halves(call))
            if isinstance(call, PairCall)
            else call.declared.real is None or call.padding.on_the_right
        )
        kinds.add(("padding on the right", on_the_right))
    if inputs is not None:
        weight = next(call.module.parameters(), None)
        lowered = torches.autocast_dtype(inputs.device.type)
        kinds |= {("dtype", None if weight is None else weight.dtype), ("autocast", lowered)}
    tokens: set[int] = set()
    if closely:
        ids = call.arguments.get("input_ids")
        tokens = set(host_values(ids).reshape(-1).tolist()) if isinstance(ids, Tensor) else set()
        kinds |= {("token", token) for token in tokens_named(call.module.config) & tokens}
    of_media = _sizes_of_media(call) if closely else (0, 0)
    return (*_sizes_of_rows(call), max(tokens, default=0), *of_media), kinds


def _sizes_of_rows(call: Call) -> tuple[int, int, int, int]:
    """Return a call's (longest document, number of documents, rows, columns).

    Documents that are only declared further in count as zero.
    """
    rows = 0 if call.inputs is None else call.inputs.shape[0]
    layout = layout_of(call)
    real = None if isinstance(call, PairCall) or layout is not None else call.declared.real
    if real is not None:  # which runs as one row
        return int(real.sum(1).max()), rows, rows, int(real.sum())
    layouts = [half.layout for half in pair_halves(call)] if layout is None else [layout]
    longest = documents = columns = 0
    for each in layouts:
        longest, columns = max(longest, each.max_seqlen), max(columns, each.columns)
        documents = max(documents, len(each.bounds) - 1)
    return longest, documents, rows, columns


def _sizes_of_media(call: Call) -> tuple[int, int]:
    """Return (numbers in a call's largest media tensor, longest side of any, in pixels)."""
    values = tree_leaves([call.arguments[name] for name in media.given(call.arguments)])
    tensors = [value for value in values if isinstance(value, Tensor)]
    sides = [max(value.shape[1:], default=0) for value in tensors if value.is_floating_point()]
    # Of images of which only the sum of all has a size, a grid of whole numbers says how large each
    # is.
    grids = [
        int(value.max()) for value in tensors if not value.is_floating_point() and value.numel()
    ]
    return max((value.numel() for value in tensors), default=0), max([*sides, *grids], default=0)


class Runs:
    """Runs of one call, each from the same random state, buffers and tensors of modules.

    Code that keeps something of a row there would hand it on to the next run.
    """

    def __init__(self, call: Call, renew: Callable[[], None]):
        self._call, self._module, self._renew = call, call.module, renew
        self._count = 0
        # ranks that share rows, or gather parameters, run each call equally often
        self.together = bool(call.model.groups) or call.part is not None

    def __call__(self, arguments: Arguments) -> Any:
        """Run the model on arguments from the same state as all runs; return its output."""
        self._count += 1
        self._renew()
        with generators_restored(self._module):
            return self._module(**arguments)

    def stock(self, arguments: Arguments) -> Any:
        """Return stock's output for these arguments, from the same state as all runs."""
        with stock_again(self._module):
            try:
                return self(arguments)
            except CannotTell:
                raise
            except Exception:  # of a row without its padding some types make no cache
                return self({**arguments, "use_cache": False})

    def widened(self, worst: Difference, before: Fields, arguments: Arguments) -> Difference:
        """Return a difference, its tolerance widened if two equal runs differ.

        Atomic additions, and draws from an unknown generator, differ from run to run. Raises
        `CannotTell` where there is no tolerance that could be widened.
        """
        if worst.excess <= 1:
            return worst
        again, name = fields_of(self(arguments)), worst.name.removesuffix(UNDIVIDED)
        moved = (
            how_far(name, before[name], again[name]).excess
            if name in before and name in again
            else 0.0
        )
        # Whole numbers and undivided fields have no tolerance that could be widened.
        if moved == math.inf or (moved > 1 and worst.tolerance == 0):
            raise CannotTell(f"{name} differs from run to run")
        return replace(worst, tolerance=worst.tolerance * max(1.0, 8 * moved))

    @contextmanager
    def on_ranks(self, packs: bool, own: int, count: int) -> Iterator[None]:
        """Run a block; then, if ranks run together, the call until this rank has `count` runs.

        The first `own` runs are of the call as it came, the others of stock. A rank whose call does
        not pack makes nothing else: it raises `CannotTell`.
        """
        try:
            if not packs:
                raise CannotTell("the call packed nothing")
            yield
        finally:
            while self.together and self._count < count:
                (self if self._count < own else self.stock)(self._call.arguments)


@contextmanager
def unnoticed(call: Call, share: bool = True, **kept: bool) -> Iterator[Runs]:
    """Yield `Runs` of a call without gradients or compiled code; restore all state at the end.

    Without `share` each document computes its own beginning. `kept` goes to `preserved`.
    """
    caches = torch.is_autocast_cache_enabled()
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        if hasattr(torch.compiler, "set_stance"):  # since torch 2.6
            # Documents have lengths that no graph was made for.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        renew = stack.enter_context(preserved(call.module, call.model, **kept))
        stack.enter_context(afterwards(lambda: torch.set_autocast_cache_enabled(caches)))
        # Weights that are cast without gradients must not be found by a later call under the same
        # autocast.
        torch.set_autocast_cache_enabled(False)
        if not share:
            call.model.options = replace(call.model.options, share=False)
        yield Runs(call, renew)


@contextmanager
def precisions() -> Iterator[set[torch.dtype]]:
    """Yield a set into which go, in a block, the dtypes in which layers of this thread run."""
    dtypes: set[torch.dtype] = set()

    def note(module: nn.Module, given: dict[Any, Any], output: Any) -> None:
        weight = dict(module._parameters).get("weight")
        for tensor in (weight, given.get(0)):
            if isinstance(tensor, Tensor) and tensor.is_floating_point() and weight is not None:
                # by the rule of layers, which is the same
                dtypes.add(torches.taken_by_sdpa(tensor))

    with listening(note):
        yield dtypes
