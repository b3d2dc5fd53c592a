"""Find the transformers models inside the user's objects: wrappers, modules, trainers."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, MappingView, Set
from functools import partial
from types import ModuleType
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from autopack.errors import UnsupportedModel
from autopack.inspection.foreign import is_in, is_own_file
from autopack.integrations import peft
from autopack.integrations.trainers import derives_from
from autopack.runtime.model import Around

_AROUND = ("lightning pytorch_lightning sentence_transformers setfit deepspeed trl opacus").split()
"""Libraries whose modules around a model are known here, beside PEFT, accelerate and torch."""
unclear = partial(UnsupportedModel, code="which-model")
"""The error about what holds no model to enable, or several of which one is meant."""


def unwrap(model: Any) -> PreTrainedModel:
    """Return the one transformers model inside a wrapper (PEFT, DDP, torch.compile) or any module.

    If an object is no module, its attributes are searched: a pipeline's model, or the body of a
    SetFit model. Raises `UnsupportedModel` for anything that holds none or several, and for PEFT's
    prompt and prefix tuning.
    """
    modules = [model] if isinstance(model, nn.Module) else _held_by(model)
    found = list(dict.fromkeys(inner for module in modules for inner in _outermost(module)))
    if len(found) == 1:
        return found[0]
    kind = f"{type(model).__module__}.{type(model).__qualname__}"
    if _is_lightning_trainer(model) and not modules:
        raise unclear(
            "a lightning.Trainer holds no model before trainer.fit(model). Call "
            "autopack.enable(model) on the LightningModule."
        )
    if found:
        names = ", ".join(type(inner).__name__ for inner in found)
        raise unclear(
            f"{kind} holds {len(found)} transformers models ({names}), and nothing says which of "
            "them is meant. Enable those that you train: autopack.enable([first, second])."
        )
    raise unclear(
        "autopack enables transformers models (a PreTrainedModel, also inside PEFT, DDP, "
        "accelerate, torch.compile or a module or an object of your own that holds one), "
        "transformers Trainers, and lists, tuples and dicts of these; found "
        f"{f'{model!r}, which is to be loaded first' if isinstance(model, type | str) else kind}. "
        "Pass the model that you train."
    )


def forward_around(model: Any, base: PreTrainedModel) -> Around | None:
    """Return the third-party forward that wraps a model, or None if only known libraries do.

    Such a forward receives the model's output and is not proven with it.
    """
    around = model if isinstance(model, nn.Module) else None
    while around is not None and around is not base:
        forward = inspect.unwrap(inspect.getattr_static(type(around), "forward", None))
        code = getattr(forward, "__code__", None)
        file: Any = getattr(code, "co_filename", None)
        # The modules of some libraries pass on or train a model's output.
        if code is not None and not (
            is_own_file(file) or any(is_in(file, each) for each in _AROUND)
        ):
            seen = code.co_varnames[:1] == ("self",)  # a wrapper that hides what it wraps is not
            place = forward.__globals__["__name__"] if seen else None
            return Around(f"{type(around).__qualname__}.forward", place, code.co_name)
        around = next(
            (c for c in around.children() if any(part is base for part in c.modules())), None
        )
    return None


def parts_of(models: Any) -> dict[Any, Any] | None:
    """Return the models of a list, tuple or dict, by name; None for a single model.

    Raises `UnsupportedModel` if there are none, or if they can be read only once or in no order.
    """
    if isinstance(models, Iterator | Set | MappingView):
        raise unclear(
            "autopack enables a model, or a list, tuple or dict of models; found a "
            f"{type(models).__name__}, which does not keep them in an order. Pass list(models)."
        )
    if not isinstance(models, list | tuple | dict):
        return None
    if not models:
        raise unclear(
            f"wanted models, found an empty {type(models).__name__}. Pass the models that you "
            "train."
        )
    if isinstance(models, dict):
        return dict(models)
    return {f"[{number}]": model for number, model in enumerate(models)}


def _held_by(holder: Any) -> list[nn.Module]:
    """Return the modules among the attributes of an object.

    If it has none, return the modules among the attributes of its `model`, as in a SetFit trainer.
    A class or a Python module holds no models.
    """
    if isinstance(holder, type | ModuleType):
        return []
    if _is_lightning_trainer(holder):
        return [] if holder.lightning_module is None else [holder.lightning_module]
    attributes = getattr(holder, "__dict__", {})
    own = [value for value in attributes.values() if isinstance(value, nn.Module)]
    inner = getattr(attributes.get("model", attributes.get("_model")), "__dict__", {})
    return own or [value for value in inner.values() if isinstance(value, nn.Module)]


def _is_lightning_trainer(subject: Any) -> bool:
    """Return True for a trainer of Lightning."""
    return derives_from(
        subject, "Trainer", "lightning.pytorch.trainer.trainer", "pytorch_lightning.trainer.trainer"
    )


def holds_models(module: nn.Module) -> bool:
    """Return True if a module is a transformers model, or holds one."""
    return next(_outermost(module), None) is not None


def _outermost(module: nn.Module) -> Iterator[PreTrainedModel]:
    """Yield the transformers models in a module that lie in no other one."""
    if isinstance(module, PreTrainedModel):
        yield module
        return
    peft.check(module)
    for child in module.children():
        yield from _outermost(child)


def models_of_trainer(trainer: Any) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
    """Return two dicts of a trainer's models by name: ones that see its batches, ones that score.

    The first are the policy, the reference model and their like. The second, in lists such as
    `reward_funcs`, make batches of their own.
    """
    if getattr(trainer, "model_init", None) is not None:
        raise unclear(
            "the trainer has a model_init, and makes a new model when training begins. Call "
            "autopack.enable(model) in your model_init, before it returns the model."
        )
    first: dict[str, nn.Module] = {}
    second: dict[str, nn.Module] = {}
    seen: set[nn.Module] = set()
    # The policy first: it is what the trainer is asked about. `model_wrapped` is the same in
    # wrappers.
    attributes = {"model": trainer.model, **vars(trainer)}
    for name, value in attributes.items():
        listed = isinstance(value, list | tuple)
        for number, part in enumerate(value if listed else [value]):
            models = list(_outermost(part)) if isinstance(part, nn.Module) else []
            if not models or models[0] in seen or name == "model_wrapped":
                continue
            seen.update(models)
            (second if listed else first)[f"{name}[{number}]" if listed else name] = part
    if "model" not in first:
        raise unclear(
            f"{type(trainer).__name__} holds no transformers model in its attribute 'model'. "
            "Pass the model that you train to autopack.enable."
        )
    return first, second
