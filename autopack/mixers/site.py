"""Replacement of the forward of a module for which a family has a strategy of its own."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from functools import partial
from importlib import import_module
from operator import itemgetter
from typing import Any

import numpy as np
import torch
import wrapt
from torch import Tensor

from autopack.errors import UnsupportedModel
from autopack.family import MixerCall, Way
from autopack.inspection import torches
from autopack.inspection.sharding import gathers_inside
from autopack.inspection.source import parameters_of
from autopack.layout.forms import Frame
from autopack.layout.host import upload
from autopack.layout.packed import PackedLayout, real_documents
from autopack.layout.token_map import each_part
from autopack.layout.ways import CACHES
from autopack.mixers.alone import MASKS
from autopack.patching import Site
from autopack.runtime.marks import mark_of
from autopack.runtime.runs import RankRuns, from_the_same_buffers, restoring_state, with_idle
from autopack.runtime.scope import Scope, changed, running_scope, site_scope

Function = Callable[..., Any]
Arguments = dict[str, Any]
_OF_REACH = re.compile(r"window|chunk(?!_size_feed_forward)|local_attention|block")
"""Pattern of fields that limit how far attention looks."""


def adapt_mixer(original: Function, site: Site) -> Function:
    """Return a module's forward that gives every document of a packed row its result alone.

    Raises `UnsupportedModel` if the forward names none of its arguments.
    """
    owner = wrapt.resolve_path(import_module(site.module), site.path)[0]
    names = parameters_of(owner).names
    if not names:
        raise UnsupportedModel(
            f"{site} does not name its arguments, so autopack cannot tell which of them holds the "
            "tokens. Take away what is wrapped around it, or train the model on padded batches, "
            "one document per row.",
            code="other-code",
        )

    @functools.wraps(original, updated=())
    def autopack_mixer(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        first = args[0] if args else kwargs.get(names[0])
        one_token = isinstance(first, Tensor) and first.ndim > 1 and first.shape[1] == 1
        scope = site_scope(self, one_token)
        if scope is not None:
            arguments = {**torches.by_name(names, args), **kwargs}
            if scope.model.groups and not (scope.stock or scope.in_step) and gathers_inside(self):
                return in_step(self, scope, arguments, args, kwargs)
            if scope.layout is not None:
                return run_by_documents(self, scope, arguments, original)
        return original(self, *args, **kwargs)

    @torch._dynamo.disable
    def in_step(
        mixer: torch.nn.Module, scope: Scope, arguments: Arguments, args: Any, kwargs: Any
    ) -> Any:
        """Run the module as often as the rank that runs it most, and return its output."""
        rank_runs = RankRuns(scope.model.groups, scope.agreed.get(id(mixer)))
        runs: list[tuple[tuple[bool, int], Arguments, Any]] = []

        def counted(mixer: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            rank_runs.begin()
            given = {**torches.by_name(names, args), **kwargs}
            repeated = {**given, **dict.fromkeys(given.keys() & CACHES)}
            runs.append((_fullness(repeated), repeated, running_scope()))
            return original(mixer, *args, **kwargs)

        packs = scope.layout is not None
        wants_tuple = packs and arguments.get("return_dict") is False
        if wants_tuple:  # parts of idle runs are told by name
            arguments["return_dict"] = True
        with changed(in_step=True):
            output = (
                run_by_documents(mixer, scope, arguments, counted)
                if packs
                else counted(mixer, *args, **kwargs)
            )
            idle = []
            for _ in rank_runs.idle(None if packs else _why_not_repeatable(mixer, arguments)):
                _, repeated, ran = max(runs, key=itemgetter(0))
                with restoring_state(mixer), changed(layout=ran.layout, memory=ran.memory):
                    idle.append(original(mixer, **repeated))
        scope.agreed[id(mixer)] = rank_runs.count
        output = with_idle(output, idle)
        return output.to_tuple() if wants_tuple else output

    @torch._dynamo.disable
    def run_by_documents(
        mixer: torch.nn.Module,
        scope: Scope,
        arguments: Arguments,
        original: Function,
    ) -> Any:
        mark: Any = mark_of(mixer)
        assert scope.layout is not None
        way: Way = mark.way
        if "use_cache" in names:
            arguments["use_cache"] = False
        first = arguments.get(names[0])
        layout = scope.layout.to(first.device) if isinstance(first, Tensor) else scope.layout
        memory = (
            scope.memory.to(layout.device)
            if scope.memory is not None and mark.reads_encoder
            else None
        )
        if mark.reads_images:
            arguments, memory = _with_own_images(mixer, arguments, layout)
        original = from_the_same_buffers(original, mixer)

        def run(arguments: Arguments, memory: PackedLayout | None = None) -> Any:
            return way.run(
                MixerCall(original, mixer, names[0], arguments, layout, scope.want_weights, memory),
            )

        rows, prefixes = scope.shared, scope.prefixes
        if rows is None and prefixes is None:
            return run(arguments, memory)

        def kept(part: Any) -> Any:
            if isinstance(part, Tensor) and part.shape[:2] == layout.shape:
                if rows is not None:
                    return rows.part(part, 1)
                if prefixes is not None:
                    return prefixes.row.gather(part)
            return part

        arguments = {
            name: each_part(partial(_argument_of_whole_rows, mixer, way, scope, name), value)
            for name, value in arguments.items()
        }
        with changed(shared=None, prefixes=None):
            return each_part(kept, run(arguments))

    return autopack_mixer


def _with_own_images(
    mixer: torch.nn.Module, arguments: Arguments, layout: PackedLayout
) -> tuple[Arguments, PackedLayout]:
    """Return arguments with an image's states per document, and their layout; raise on mismatch.

    The states of images are (images, n, channels), one image for every document and every run of
    padding.
    """
    states, real = arguments.get("encoder_hidden_states"), real_documents(layout)
    if not isinstance(states, Tensor) or states.dim() != 3 or len(states) != real.sum():
        raise UnsupportedModel(
            f"{type(mixer).__name__} attends from text to images in code of its own, and not to "
            f"one for each of the {real.sum()} documents of packed rows. Run the documents one per "
            "row.",
            code="media-mixed",
        )
    number = np.maximum(np.cumsum(real) - 1, 0)  # padding reads that of the document before it
    states = states[upload(number, states.device)]
    documents, each = states.shape[:2]
    bounds = np.arange(documents + 1) * each
    memory = layout.derived(
        ("images", each), lambda: PackedLayout(documents, each, bounds, layout.device)
    )
    return {**arguments, "encoder_hidden_states": states}, memory


def _argument_of_whole_rows(
    mixer: torch.nn.Module, way: Way, scope: Scope, name: str, value: Any
) -> Any:
    """Return a mixer's argument for whole rows, given a part or shared row; raise if unclear."""
    if not isinstance(value, Tensor):
        return value
    assert scope.layout is not None
    (rows, columns), wide = scope.ran, scope.layout.columns
    frame = Frame(rows, columns)
    if scope.prefixes is not None:
        row = scope.prefixes.row
        # a mask of the row, in which columns are in the order of tokens
        if value.dim() == 4 and value.shape[-2:] == (columns, columns):
            places = row.back.to(value.device)
            return value.index_select(2, places).index_select(3, places)
        return frame.changed(name, value, row.restore)
    assert scope.shared is not None
    axis = frame.axis_of(name, value)
    if axis is not None:
        return scope.shared.whole(value, axis)
    if way.counts and name == "position_ids":  # which numbers columns
        return torch.arange(wide, dtype=value.dtype, device=value.device)
    is_mask = name in MASKS and value.dim() == 4 and value.shape[-2] in (1, columns)
    if is_mask and _hides_nothing(value, scope):
        queries = wide if value.shape[-2] > 1 else 1
        return value[..., :1, :1].expand(*value.shape[:2], queries, wide)
    if columns in value.shape:
        raise scope.refused(
            f"{type(mixer).__name__} was given {name} of shape {tuple(value.shape)} for {columns} "
            "columns, and autopack cannot tell what whole rows have there"
        )
    return value


def _hides_nothing(mask: Tensor, scope: Scope) -> bool:
    """Return True if a mask has one value for all pairs and no config limits attention's reach."""
    fields = (item for config in scope.model.anatomy.configs for item in vars(config).items())
    near = any(value and _OF_REACH.search(name) for name, value in fields)
    return not near and bool((mask == mask[..., :1, :1]).all())


def _fullness(arguments: Arguments) -> tuple[bool, int]:
    """Return a run's (True with labels, its documents' length): the greatest run is repeated.

    Parts that short documents do not reach (compressed windows, experts) get no gradient, and FSDP2
    reduces only the gradients that exist.
    """
    tokens = next((each for each in arguments.values() if isinstance(each, Tensor)), None)
    length = 0 if tokens is None else tokens.shape[-1 if tokens.dim() < 2 else 1]
    return arguments.get("labels") is not None, length


def _why_not_repeatable(mixer: torch.nn.Module, arguments: Arguments) -> str | None:
    """Return why a call that packs nothing cannot be repeated, its cache; None if it can."""
    held = [name for name in CACHES if arguments.get(name) is not None]
    if mixer.training or not held:
        return None
    return (
        f"{type(mixer).__name__} has a cache ({held[0]}) on this rank. Pass use_cache=False there."
    )
