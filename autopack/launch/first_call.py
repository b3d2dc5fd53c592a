"""Enable a model under ``autopack run`` at its first call in training.

Every model gets a forward pre-hook when it is made. When the outermost model is called in training,
its hook enables it, removes all such hooks in the model, and hands the call to the entry that now
stands on the model.
"""

from __future__ import annotations

import functools
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from autopack.calls.hooks import ForwardGuard
from autopack.errors import UnsupportedModel
from autopack.inspection.callers import FORWARDS, callers
from autopack.inspection.foreign import looks_at_rows
from autopack.integrations import peft, trainers, wrappers
from autopack.launch import session
from autopack.launch.session import Session
from autopack.launch.settings import FOR_ENABLE
from autopack.patching import Site, SiteLease
from autopack.proving.apart import is_apart
from autopack.runtime.marks import enabled_at

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from autopack.runtime.model import EnabledModel

logger = logging.getLogger(__name__)


class FirstCall(ForwardGuard):
    """Forward pre-hook that waits for the first call of its model in training.

    The hook does nothing in a process in which autopack was not started. While it waits, `lease`
    holds the site that makes `model.forward(...)` the same as `model(...)`.
    """

    _passed = _evaluated = False

    def __init__(self, model: PreTrainedModel):
        self.lease = SiteLease(functools.partial(_forward_sites, type(model)))
        self.lease.follow(())

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Compiled code, which may have to be one graph, comes by here and goes no further in
        # evaluation.
        compiling = torch.compiler.is_compiling()
        if not compiling:
            self._passed = True
        trains = module.training and torch.is_grad_enabled() if compiling else _trains(module)
        if trains:
            return _first_call(self, module, args, kwargs)
        if not (compiling or self._evaluated or session.current is None):
            self._evaluated = True
            if _outermost(session.current, module) is module:
                why = "it was not trained, only called without gradients, or with none of its own"
                session.current.left_so_far(module, why)
        return None

    def is_past(self, module: nn.Module) -> bool:
        """Return True if a training call reached `forward` without this hook; resets `_passed`."""
        passed, self._passed = self._passed, False
        return not passed and _trains(module)


def _trains(module: nn.Module) -> bool:
    """Return True if a call of the module now would be a training call.

    Such a call has gradients, and is in training mode or has parameters that require gradients:
    Lightning trains the models of `from_pretrained` in the evaluation mode that they come in.
    """
    return torch.is_grad_enabled() and (
        module.training or any(each.requires_grad for each in module.parameters())
    )


def prepare(base: Any) -> None:
    """Patch `PreTrainedModel` (`base`) so that models made from now on wait for training."""
    original = base.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _wait(self)

    peft.watch()
    peft.before_tuner = _before_tuner
    base.__init__ = __init__


def _wait(model: Any) -> None:
    """Put a hook on a model that enables it at its first training call, unless it has one."""
    if session.current is not None and _hook_id(model) is None and not is_apart():
        model.register_forward_pre_hook(FirstCall(model), with_kwargs=True)
        session.current.waiting.add(model)


def _forward_sites(kind: type[nn.Module], _: tuple[str, ...]) -> list[Site]:
    """Return the sites of a model class's `forward`, for a `SiteLease`."""
    from autopack.enabling.attach import forward_sites

    return list(forward_sites([kind]))


def _hook_id(module: nn.Module, kind: type = FirstCall) -> int | None:
    """Return the id of the hook of class `kind` on a model; None if it has none."""
    return next(
        (number for number, hook in module._forward_pre_hooks.items() if isinstance(hook, kind)),
        None,
    )


# It changes the hooks of the model, and what it calls reads values on the host.
@torch._dynamo.disable
def _first_call(hook: FirstCall, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Enable a model at its first training call; return its new `EntryHook`'s result, or None."""
    here = session.current
    if here is None:
        return None
    if getattr(module, "_is_replica", False):
        # the first of the copies, which share their hooks with the model
        if _hook_id(module) is not None:
            reason = (
                "torch.nn.DataParallel copies it; start one process per device with torchrun "
                "instead"
            )
            _leave(here, module, UnsupportedModel(reason, code="rows-on-ranks"))
        return None
    try:
        outer = _passing_through(module)
    except UnsupportedModel as error:  # the PEFT method around it
        _leave(here, module, error)
        return None
    if outer is not None:
        if _trains(outer):
            here.left_so_far(outer, "its forward is called directly, and not the model itself")
        return None
    hooks: list[Any] = list(module._forward_pre_hooks.values())
    if enabled_at(module) is None and any(map(looks_at_rows, hooks[hooks.index(hook) + 1 :])):
        # Hooks that were put on later take the batch as it comes, so autopack's has to follow them:
        # at the next call.
        module._forward_pre_hooks.move_to_end(_hook_id(module))
        return None

    from autopack.calls.hooks import EntryHook

    # The hooks of this call were looked up before the entry was among them.
    entry = _hook_id(module, EntryHook) if _enable(here, module) else None
    return None if entry is None else module._forward_pre_hooks[entry](module, args, kwargs)


def _enable(here: Session, module: Any) -> bool:
    """Enable the largest waiting model around `module`, or `module`; return True if that is done.

    Return False if that is impossible, which is logged, or if the script has enabled it already.
    With `strict`, raise the error of `enable`.
    """
    from autopack.enabling import enable

    outermost = _outermost(here, module)
    by_script = enabled_at(outermost)
    if by_script is not None:
        _remove_hooks(here, outermost)
        here.enabled(outermost, by_script, " by the script")
        return False
    options = {name: getattr(here.settings, name) for name in FOR_ENABLE}
    for model in dict.fromkeys((outermost, module)):
        _remove_hooks(here, model)
        try:
            enabled = enable.enable(model, **options).enabled
        except Exception as error:
            if model is module:
                _leave(here, model, error)
        else:
            enabled.lenient = not here.settings.strict
            here.enabled(model, enabled)
            _cut_steps(here, enabled)
            reference = _reference()
            if (
                reference is not None
                and reference is not module
                and _hook_id(reference) is not None
            ):
                _enable(here, reference)
            return True
    return False


def _cut_steps(here: Session, enabled: EnabledModel) -> None:
    """Have the running trainer cut its next steps, if the command asks for that."""
    most, (trainer, _) = here.settings.max_tokens, next(trainers.at_work(), (None, None))
    if most is None or trainer is None:
        return
    from autopack.steps.trainers import cut_steps

    try:
        cut_steps(trainer, enabled, most, lenient=not here.settings.strict)
    except (UnsupportedModel, ValueError) as error:
        if here.settings.strict:
            raise
        logger.warning("autopack leaves the steps of this run as they are: %s", error)


def _reference() -> PreTrainedModel | None:
    """Return the reference model of the running trainer; None if none is known.

    A reference model is never trained, so its own calls show nothing; but the trainer compares its
    outputs with the outputs of the trained model.
    """
    for trainer, adapter in trainers.at_work():
        if (reference := getattr(trainer, adapter.reference or "", None)) is not None:
            with suppress(UnsupportedModel):  # it stays as it is, as any that is not trained
                return wrappers.unwrap(reference)
    return None


def _outermost(here: Session, module: Any) -> Any:
    """Return the largest waiting model that holds this one, or the model itself."""
    around = [model for model in here.waiting if any(part is module for part in model.modules())]
    return max(around, key=lambda model: sum(1 for _ in model.modules()), default=module)


def _leave(here: Session, model: Any, error: Exception) -> None:
    """Record that a model stays without autopack, and remove its hooks; raise `error` if strict."""
    _remove_hooks(here, model)
    if here.settings.strict:
        raise error
    here.left(model, error)


def _remove_hooks(here: Session, model: nn.Module) -> None:
    """Remove the `FirstCall` hooks of a model and all its parts, and release their sites."""
    for part in model.modules():
        if (number := _hook_id(part)) is not None:
            hook: Any = part._forward_pre_hooks.pop(number)
            hook.lease.release()
            part._forward_pre_hooks_with_kwargs.pop(number, None)
            here.waiting.discard(part)  # type: ignore[arg-type]


def _passing_through(module: nn.Module) -> Any:
    """Return the model around this one whose `forward` is calling it; None if there is none.

    The hook of that model has not enabled it, and has to. Raises `UnsupportedModel` if the caller
    is a PEFT method that cannot be packed.
    """
    from transformers import PreTrainedModel

    for caller in callers(function=FORWARDS):
        if (
            isinstance(caller, nn.Module)
            and caller is not module
            and any(part is module for part in caller.modules())
        ):
            peft.check(caller)
            if isinstance(caller, PreTrainedModel):
                return caller
    return None


def _before_tuner(model: Any) -> None:
    """Enable a model in training before a PEFT tuner calls its `forward` past its hooks."""
    if isinstance(model, nn.Module) and _trains(model):
        _enable_for_tuner(model)


@torch._dynamo.disable
def _enable_for_tuner(model: nn.Module) -> None:
    """Enable a model that waits for its first call, which a PEFT tuner is about to make."""
    if session.current is not None and _hook_id(model) is not None:
        _enable(session.current, model)
