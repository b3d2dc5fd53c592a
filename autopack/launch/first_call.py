"""The moment at which a model is enabled under ``autopack run``: when it is first called in training.

Every model gets a forward pre-hook when it is made. The hook of the outermost model that is called in training enables
it, hands the call on to the entry that this has put on the model, and all such hooks in the model are gone.
"""

from __future__ import annotations

import functools
import sys
from types import FrameType
from typing import Any

import torch
import wrapt
from torch import nn

from autopack.errors import UnsupportedModel
from autopack.launch import launcher
from autopack.launch.session import Session
from autopack.runtime.marks import handle_of

__all__ = ["FirstCall", "prepare"]


class FirstCall:
    """Forward pre-hook of a model that waits for its first call in training. Inert where autopack was not started."""

    def __call__(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        # Compiled code, which may have to be one graph, comes by here and goes no further in evaluation.
        if not (module.training and torch.is_grad_enabled()):
            return None
        return _first_call(self, module, args, kwargs)


def prepare(base: Any) -> None:
    """Let every model that is made from now on wait for its first call in training; `base` is `PreTrainedModel`."""
    original = base.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _wait(self)

    from autopack.integrations import peft

    peft.watch()  # before the hooks below, which see whether it stands there
    wrapt.register_post_import_hook(lambda module: _stand_at_tuner(module.BaseTuner), "peft.tuners.tuners_utils")
    wrapt.register_post_import_hook(lambda module: _stand_at_tuner(module.AdaLoraModel), "peft.tuners.adalora.model")
    base.__init__ = __init__


def _wait(model: Any) -> None:
    if launcher.session is not None and _waits(model) is None:
        model.register_forward_pre_hook(FirstCall(), with_kwargs=True)
        launcher.session.waiting.add(model)


def _waits(module: nn.Module) -> int | None:
    """The number of the hook by which a model waits, or None."""
    return next((number for number, hook in module._forward_pre_hooks.items() if isinstance(hook, FirstCall)), None)


# It changes the hooks of the model, and what it calls reads values on the host.
@torch._dynamo.disable
def _first_call(
    hook: FirstCall, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    session = launcher.session
    if session is None:
        return None
    if getattr(module, "_is_replica", False):
        if _waits(module) is not None:  # the first of the copies, which share their hooks with the model
            reason = "torch.nn.DataParallel runs copies of it; start one process per device with torchrun instead"
            _leave(module, UnsupportedModel(reason))
        return None
    try:
        outer = _passing_through(module)
    except UnsupportedModel as error:  # the PEFT method around it
        _leave(module, error)
        return None
    if outer is not None:
        if outer.training:
            session.bypassed(outer)
        return None
    last = next(reversed(module._forward_pre_hooks))
    if module._forward_pre_hooks[last] is not hook and handle_of(module) is None:
        # Hooks that were put on later take the batch as it comes, so autopack's has to follow them: at the next call.
        module._forward_pre_hooks.move_to_end(_waits(module))
        return None
    if not _enable(module):
        return None

    from autopack.calls.hooks import EntryHook

    # The hooks of this call were looked up before the entry was among them.
    entry = next((h for h in module._forward_pre_hooks.values() if isinstance(h, EntryHook)), None)
    return entry(module, args, kwargs) if entry is not None else None


def _enable(module: Any) -> bool:
    """Enable the model that is about to be called, or the one around it that it is the backbone of.

    False where that is not possible, which is said, and where the script has done it. With `strict`, what `enable`
    raises is raised.
    """
    from autopack.enabling import enable

    session = launcher.session
    if session is None:
        return False
    outermost = _outermost(module, session)
    handle = handle_of(outermost)
    if handle is not None:
        _wait_no_longer(outermost)
        session.enabled(outermost, handle.enabled, " by the script")
        return False
    settings = session.settings
    for model in dict.fromkeys((outermost, module)):
        _wait_no_longer(model)
        try:
            handle = enable.enable(model, backend=settings.backend, unpad=settings.unpad, verify=settings.verify)
        except Exception as error:
            if model is module:
                _leave(module, error)
        else:
            session.enabled(model, handle.enabled)
            return True
    return False


def _leave(model: Any, error: Exception) -> None:
    """Leave a model as it is, for good; with `strict`, raise."""
    _wait_no_longer(model)
    session = launcher.session
    if session is not None:
        if session.settings.strict:
            raise error
        session.left(model, error)


def _outermost(module: Any, session: Session) -> Any:
    """The largest model that holds this one and has not been called in training; else the model itself."""
    around = [model for model in session.waiting if any(part is module for part in model.modules())]
    return max(around, key=lambda model: sum(1 for _ in model.modules()), default=module)


def _wait_no_longer(model: nn.Module) -> None:
    session = launcher.session
    for part in model.modules():
        number = _waits(part)
        if number is not None:
            del part._forward_pre_hooks[number]
            part._forward_pre_hooks_with_kwargs.pop(number, None)
            if session is not None:
                session.waiting.discard(part)  # type: ignore[arg-type]


def _passing_through(module: nn.Module) -> Any:
    """The model around this one whose `forward` is calling it; its own hook has not enabled it, and would have to.

    Raises `UnsupportedModel` where the caller is a PEFT method that cannot be packed.
    """
    from transformers import PreTrainedModel

    from autopack.integrations import peft

    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        # Only of methods: up to Python 3.12 asking for the locals keeps them alive until the frame ends.
        caller = frame.f_locals.get("self") if "forward" in frame.f_code.co_name else None
        if isinstance(caller, nn.Module) and caller is not module and any(part is module for part in caller.modules()):
            peft.base_model(caller)
            if isinstance(caller, PreTrainedModel):
                return caller
        frame = frame.f_back
    return None


def _stand_at_tuner(tuner: Any) -> None:
    """Enable the model before a PEFT tuner that calls its `forward` past its hooks, as all do up to PEFT 0.19."""
    original = tuner.forward
    if not hasattr(original, "autopack_original"):  # what `peft.watch` leaves at those that do
        return

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.model.training and torch.is_grad_enabled() and isinstance(self.model, nn.Module):
            _enable_for_tuner(self.model)
        return original(self, *args, **kwargs)

    tuner.forward = forward


@torch._dynamo.disable
def _enable_for_tuner(model: nn.Module) -> None:
    if _waits(model) is not None:
        _enable(model)
