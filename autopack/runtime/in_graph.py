"""The outputs of a call in one another's graphs, where autopack makes them of results.

A model makes its later results of earlier ones. The caller gets outputs that are joined from these:
padded, or put together from the batches that documents ran in. In stock an output is the result
itself, and a gradient by a state, or a hook on it, has its part in the backward pass. So every
output gets a place behind its result::

    result 1 ── what the model does ── result 2
       └─ `_Place` ─> output 1 ···········─┴─ `_Place` ─> output 2

Behind the dots nothing goes forward. In backward, the place of output 2 passes its gradient on to
result 2. If a gradient of output 1 is asked for, this place also sends it the share that result 1
gets from there. The place of output 1 subtracts that share again from the gradient that it passes
on, so it does not count twice. If none is asked for, nothing is sent.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_map_only

from autopack.runtime.padding_read import Look

Join = Callable[[Sequence[Tensor]], Tensor]
Merge = Callable[[str, list[Any]], Any]


@dataclass(eq=False)
class Joint:
    """Result tensors of a model, with the functions that join them to one output."""

    parts: Sequence[Tensor]
    join: Join | None = None
    """A linear map of the parts to the output; None if the only part is the output."""
    split: Callable[[Tensor], Sequence[Tensor]] | None = None
    """Its transpose, if that is cheaper than differentiating it."""
    values: Join | None = None
    """The same as `join`, but with the values that fill places without a part."""
    check: Callable[[Tensor], None] | None = None
    """A function that sees the gradient that comes back to the output, and may raise."""
    refuse: Callable[[], None] | None = None
    """A function that raises, called if later outputs have a gradient for this one."""
    shape: tuple[int, ...] | None = None
    """The shape of an output that is joined at its first use."""

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Return `parts` joined to one output by `join`."""
        return parts[0] if self.join is None else self.join(parts)

    def output(self) -> Tensor:
        """Return the joined output, in no graph; a placeholder without values if `shape` is set."""
        parts, join = [part.detach() for part in self.parts], self.values or self.joined
        if self.shape is not None:
            return _placeholder(parts[0], self.shape)
        if self.join is None and parts[0].dim() == 0:
            # a view could not be changed in place, as Trainer changes the loss
            return parts[0].clone()
        return join(parts)


def joined(
    parts: Mapping[Any, Sequence[Any]], make: Callable[[Any, Sequence[Any]], Any]
) -> dict[Any, Any]:
    """Return an output's parts, joined from the runs' parts, each in the graph of all later ones.

    `make` returns a `Joint` from a part's key and the runs' values of it, or the final value of
    what is no tensor; it is called once for a value that has several keys.
    """
    results: dict[tuple[int, ...], Any] = {}
    whole = {key: _made(make, key, each, results) for key, each in parts.items()}
    joints = [each for each in results.values() if isinstance(each, Joint)]
    found = (
        _in_graph_of_later(joints)
        if torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active()
        else {}
    )
    for result in joints:
        waits = result.shape is not None
        if result not in found:
            waits = waits and not any(part.requires_grad for part in result.parts)
            found[result] = result.output() if waits else result.joined(result.parts)
        if waits:
            _delay_values(found[result], result)
    return {key: _replace_joints(value, found) for key, value in whole.items()}


def _made(
    make: Callable[[Any, Sequence[Any]], Any],
    key: Any,
    each: Sequence[Any],
    results: dict[tuple[int, ...], Any],
) -> Any:
    """Return `make` of the runs' values of a part, kept in `results`; a tuple or list by items.

    A recursive inner function would be a reference cycle, which keeps the results until the garbage
    collector runs.
    """
    if isinstance(each[0], tuple | list):
        return type(each[0])(_made(make, key, own, results) for own in zip(*each, strict=True))
    known = tuple(map(id, each))
    if known not in results:
        results[known] = make(key, each)
    return results[known]


def _replace_joints(value: Any, outputs: Mapping[Joint, Tensor]) -> Any:
    """Return a value, tuple or list with each `Joint` in it replaced by its tensor in `outputs`."""
    if isinstance(value, tuple | list):
        return type(value)(_replace_joints(part, outputs) for part in value)
    return outputs[value] if isinstance(value, Joint) else value


def merged(outputs: Sequence[Any], merge: Merge, loss: Tensor | None, as_tuple: bool) -> Any:
    """Return one output of several runs' outputs; `merge` makes each field of its name and parts.

    `merge` is linear in the parts. `loss` takes the place of the runs' losses.
    """

    def made(name: str, each: Sequence[Any]) -> Any:
        """Return the `Joint` of a field's parts, or the merged field itself if it is no tensor."""
        if name == "loss":
            return None if loss is None else Joint(each)
        with torch.no_grad():
            whole = merge(name, list(each))
        if not isinstance(whole, Tensor):
            return whole
        return Joint(each, join=lambda parts: merge(name, list(parts)), values=lambda parts: whole)

    fields = {name: [output.get(name) for output in outputs] for name in outputs[0]}
    found = joined(fields | {"loss": [loss]}, made)
    whole = type(outputs[0])(**{name: value for name, value in found.items() if value is not None})
    return whole.to_tuple() if as_tuple else whole


def _in_graph_of_later(results: Collection[Joint]) -> dict[Joint, Tensor]:
    """Return outputs by `Joint`, each in the graph of all later ones; {} for fewer than two."""
    tied = [result for result in results if all(map(_is_in_graph, result.parts))]
    tied.sort(key=lambda result: max(map(_graph_number, result.parts)))
    # What comes before all that is joined is in the graph of what comes after as it is.
    first = next(
        (number for number, result in enumerate(tied) if result.join is not None), len(tied)
    )
    tied = tied[first:]
    found: dict[Joint, Tensor] = {}
    if len(tied) < 2:
        return {}
    # Whether a backward pass goes to every leaf is seen by one that nobody can ask for.
    probe = torch.zeros(0, device=tied[0].parts[0].device, requires_grad=True).view(0)
    earlier: tuple[tuple[_SentGradients, Any], ...] = ()
    for result in tied:
        way = replace(result, parts=(), values=None)  # the graph must not keep what it was made of
        stands = [_StandIn.apply(part) for part in result.parts]
        sent = _SentGradients(way, stands, result.parts)
        place = (way, sent, stands, earlier, probe.grad_fn)
        output = _Place.apply(place, [result.output()], probe, *stands, *found.values())
        # so that it has a place for hooks, which outlives it
        output.register_hook(lambda gradient: None).remove()
        sent.output, sent.hooks = weakref.ref(output), output._backward_hooks
        found[result], earlier = output, (*earlier, (sent, output.grad_fn))
    return found


class _SentGradients:
    """Gradients that later outputs send to one earlier output, which is held weakly."""

    def __init__(self, way: Joint, stands: Sequence[Tensor], parts: Sequence[Tensor]):
        self.edges = [get_gradient_edge(part) for part in parts]
        self.zeros, self.joined, self.refuse = stands, way.joined, way.refuse
        self.output: weakref.ref[Tensor] | None = None
        self.hooks: Any = None
        self._task = -1
        self._parts: list[Tensor] = []

    def is_wanted(self, node: Any, to_every_leaf: bool) -> bool:
        """Return True if this backward pass wants the output's gradient; `node` made the output."""
        output = None if self.output is None else self.output()
        if to_every_leaf:  # of one that waits nothing was asked for
            is_asked = any(not isinstance(hook, Look) for hook in self.hooks.values())
            return is_asked or (type(output) is Tensor and output.retains_grad)
        return torch._C._will_engine_execute_node(node)

    def add(self, parts: Sequence[Tensor | None]) -> Tensor | None:
        """Add parts' gradients; return the output's, None if all are None; call `refuse` if set."""
        if all(part is None for part in parts):
            return None
        if self.refuse is not None:
            self.refuse()
        given = [
            torch.zeros_like(zero) if p is None else p
            for p, zero in zip(parts, self.zeros, strict=True)
        ]
        before, self._task = self.take(), torch._C._current_graph_task_id()
        self._parts = (
            given if before is None else [a + b for a, b in zip(before, given, strict=True)]
        )
        return self.joined(given)

    def take(self) -> list[Tensor] | None:
        """Return and forget the gradients sent in this backward pass; None if there are none."""
        found = self._parts if self._task == torch._C._current_graph_task_id() else None
        self._task, self._parts = -1, []
        return found


class _StandIn(torch.autograd.Function):
    """Autograd function that returns a tensor's stand-in without memory, to differentiate by."""

    @staticmethod
    def forward(ctx: Any, part: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return _placeholder(part, tuple(part.shape))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Tensor | None:
        return gradient


class _Place(torch.autograd.Function):
    """Autograd function that returns a joined output; gradients go to the result's parts."""

    @staticmethod
    def forward(
        ctx: Any,
        place: tuple[Any, ...],
        output: list[Tensor],
        *others: Tensor,
    ) -> Tensor:
        ctx.place = place
        ctx.set_materialize_grads(False)
        return output.pop()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        way, sent, stands, earlier, probe = ctx.place
        if gradient is None:
            return (None,) * (3 + len(stands) + len(earlier))
        if way.check is not None:
            way.check(gradient)
        found, before = _gradients_of_parts(way, stands, gradient), sent.take()
        if before is not None:
            found = [part - other for part, other in zip(found, before, strict=True)]
        to_every_leaf = torch._C._will_engine_execute_node(probe)
        wanted = [other for other, node in earlier if other.is_wanted(node, to_every_leaf)]
        gradients: dict[_SentGradients, Tensor | None] = {}
        if wanted and (before is None or any(bool(part.any()) for part in found)):
            edges = [edge for other in wanted for edge in other.edges]
            options = {
                "retain_graph": True,
                "create_graph": torch.is_grad_enabled(),
                "allow_unused": True,
            }
            parts = list(torch.autograd.grad(stands, edges, found, **options))
            for other in wanted:
                gradients[other] = other.add([parts.pop(0) for _ in other.edges])
        return None, None, None, *found, *(gradients.get(other) for other, _ in earlier)


def _gradients_of_parts(way: Joint, stands: Sequence[Tensor], gradient: Tensor) -> list[Tensor]:
    """Return the gradients of a result's parts for a gradient of its output."""
    if way.join is None:
        return [gradient]
    if way.split is not None:
        return list(way.split(gradient))
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        leaves = [stand.detach().requires_grad_() for stand in stands]
        whole = way.join(leaves)
        return list(
            torch.autograd.grad(whole, leaves, gradient, create_graph=again, materialize_grads=True)
        )


class _Waiting(Tensor):
    """An output that computes its values when a function of torch first uses it.

    Code that bypasses torch's functions finds no numbers in it (NaN).
    """

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        tree_map_only(cls, _fill_waiting, (args, kwargs))
        return function(*args, **(kwargs or {}))


def _delay_values(output: Any, result: Joint) -> None:
    """Turn an output, in place, into a `_Waiting` tensor that joins `result` at its first use."""
    parts, join = [part.detach() for part in result.parts], result.values or result.joined
    inference = torch.is_inference_mode_enabled()

    def values() -> Tensor:
        with torch.inference_mode(inference), torch.no_grad():
            return join(parts)

    output.values_to_come = values
    output.__class__ = _Waiting


def _fill_waiting(output: Any) -> None:
    """Turn a `_Waiting` tensor, in place, into a plain one with its values; leave others alone."""
    if type(output) is _Waiting:  # and was not met twice in one call
        values = output.__dict__.pop("values_to_come")
        output.__class__ = Tensor  # type: ignore[assignment]
        output.data = values()


def _placeholder(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor of `shape`, all NaN (0 for integers), in the memory of one number."""
    number = like.new_full((), float("nan")) if like.is_floating_point() else like.new_zeros(())
    return like.new_empty(0).set_(number.untyped_storage(), 0, shape, (0,) * len(shape))


def _is_in_graph(tensor: Tensor) -> bool:
    """Return True if a gradient can go to a tensor.

    It cannot go to a view that a `Function` made in its forward, though that view requires
    gradients: Reformer's hidden states are such views.
    """
    if not tensor.requires_grad or tensor.grad_fn is not None:
        return tensor.requires_grad
    leaf = tensor.view_as(tensor).grad_fn
    return leaf is not None and leaf.next_functions[0][0] is not None


def _graph_number(tensor: Tensor) -> int:
    """Return a number that grows along the graph: -1 for a leaf, else its node's number."""
    return -1 if tensor.grad_fn is None else tensor.grad_fn._sequence_nr()
