"""Enable a model, disable it, and the handle that says what was done."""

from __future__ import annotations

import html
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel

from autopack import peft, registry
from autopack.attention import BACKENDS, availability
from autopack.attention.choose import candidates
from autopack.delivery import MARK
from autopack.enabled import Enabled
from autopack.entry import EntryHook, ExitHook, PoolerHook
from autopack.errors import UnsupportedModel
from autopack.rotary import PerDocumentRotary, row_dependent_rotaries
from autopack.unpadding import MODES

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["Handle", "disable", "enable", "is_enabled", "unwrap"]

logger = logging.getLogger(__name__)

_HANDLE = "_autopack_handle"
_VERIFY = ("auto", "always", "never")


class Handle:
    """What `enable` did to one model. Also a context manager that disables on leaving."""

    def __init__(self, model: PreTrainedModel, enabled: Enabled, verified: str):
        self.model = model
        self.enabled = enabled
        self.verified = verified

    def remove(self) -> None:
        """Disable the model: hooks, marks, checkpoint functions and installed functions go back by identity."""
        disable(self.model)

    def __enter__(self) -> Handle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def _facts(self) -> list[tuple[str, str]]:
        enabled = self.enabled
        implementations = ", ".join(enabled.implementations())
        return [
            ("model", f"{type(self.model).__name__} ({enabled.model_type})"),
            ("state", "enabled" if enabled.active else "disabled"),
            ("family", enabled.family),
            ("attention", f"{len(enabled.attention)} modules, attn_implementation={implementations}"),
            ("backend", _describe_backend(self.model, enabled)),
            ("padding", f"unpad={enabled.unpad!r}; {enabled.tally}" if enabled.unpad != "never" else "unpad='never'"),
            ("verified", self.verified),
        ]

    def __repr__(self) -> str:
        facts = self._facts()
        return "autopack.Handle(\n" + "".join(f"  {name + ':':<11}{value}\n" for name, value in facts) + ")"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th style='text-align:left'>{html.escape(name)}</th><td style='text-align:left'>"
            f"{html.escape(value)}</td></tr>"
            for name, value in self._facts()
        )
        return f"<table><caption>autopack</caption>{rows}</table>"


def _describe_backend(model: PreTrainedModel, enabled: Enabled) -> str:
    if enabled.backend != "auto":
        return enabled.backend
    usable = availability()
    names = {name for impl in enabled.implementations() for name in candidates(impl, model)[:2]}
    on_cuda = any(p.is_cuda for p in model.parameters())
    order = [name for name in BACKENDS if name in names and (on_cuda or name not in ("varlen", "flex"))]
    return "auto: " + " or ".join(name for name in order if usable[name][0] or name in ("flash", "flex"))


def unwrap(model: Any) -> PreTrainedModel:
    """The transformers model inside PEFT, DDP, FSDP, accelerate or torch.compile wrappers.

    Raises `UnsupportedModel` for anything that holds none, and for PEFT's prompt and prefix tuning.
    """
    found: Any = model
    for _ in range(16):
        if isinstance(found, PreTrainedModel):
            return found
        if not isinstance(found, nn.Module):
            break
        inner = peft.base_model(found)
        if inner is None:
            names = ("_orig_mod", "module", "_fsdp_wrapped_module")
            inner = next((getattr(found, n) for n in names if isinstance(getattr(found, n, None), nn.Module)), None)
        if inner is None:
            break
        found = inner
    raise UnsupportedModel(
        f"autopack enables transformers models (PreTrainedModel, also inside PEFT, DDP, accelerate or torch.compile); "
        f"found {type(model).__module__}.{type(model).__qualname__}"
    )


def enable(model: Any, *, backend: str = "auto", unpad: str = "auto", verify: str = "auto") -> Handle:
    """Make packed rows exact for this model, and run its padded batches as packed rows.

    Every document of a packed row gets what it would get alone, or the call raises. A padded batch of shape (rows,
    columns), with a 0/1 `attention_mask`, gives what it gave before, in the shape that it gave before.

    Args:
        model: A transformers `PreTrainedModel`, plain or wrapped by PEFT (LoRA and the like), DDP, accelerate or
            `torch.compile`. Only this instance changes: it gets forward hooks, and the attention functions of
            transformers get stand-ins that are inert for every other model.
        backend: What computes attention on packed rows: `auto`, `flash`, `varlen`, `flex`, `sdpa` or `eager`. `auto`
            chooses at each call from the model's `attn_implementation`, device, dtype and what the layer asks for.
        unpad: `auto` runs a padded batch as one packed row and gives its outputs their shape back, zero at padding,
            wherever that is the same and no cache is wanted; `always` does so in evaluation without labels too, and
            where padding takes part in the loss, which it then does not; `never` leaves padded batches as they come.
        verify: `auto` audits a model whose architecture no released run has covered, on the spot, with a few dozen
            tokens; `always` audits any model; `never` trusts the structure that was found.

    Returns:
        A handle whose repr says what was done; `handle.remove()` or leaving `with autopack.enable(model):` takes
        everything back. A second call returns the same handle.

    Raises:
        UnsupportedModel: The model, or the backend with it, cannot be served exactly. Nothing was changed.
        SiteDrift: The installed transformers lacks a function that autopack stands at. Nothing was changed.

    The method follows "Enhancing Training Efficiency Using Packing with Flash Attention" (arXiv 2407.09105), carried to
    every attention implementation.
    """
    if backend not in ("auto", *BACKENDS):
        raise ValueError(f"backend must be one of auto, {', '.join(BACKENDS)}; found {backend!r}")
    if unpad not in MODES:
        raise ValueError(f"unpad must be one of {', '.join(MODES)}; found {unpad!r}")
    if verify not in _VERIFY:
        raise ValueError(f"verify must be one of {', '.join(_VERIFY)}; found {verify!r}")
    base = unwrap(model)
    present = base.__dict__.get(_HANDLE)
    if present is not None:
        for name, wanted in (("backend", backend), ("unpad", unpad)):
            found = getattr(present.enabled, name)
            if wanted not in ("auto", found):
                raise ValueError(
                    f"the model is enabled with {name}={found!r}; call autopack.disable(model) before enabling it with "
                    f"{name}={wanted!r}"
                )
        return present
    peft.check(base)
    owner = next((m.__dict__[MARK] for m in base.modules() if MARK in m.__dict__), None)
    if owner is not None:
        raise UnsupportedModel("a part of this model is enabled on its own; disable that part, then enable the whole")
    family = registry.family_for(base)
    enabled = Enabled(base, family, backend, unpad)
    _check_backend(base, enabled)
    with _all_or_nothing(base, enabled):
        _attach(base, enabled)
        verified = _verify(base, enabled, family.model_types, verify)
        handle = Handle(base, enabled, verified)
        base.__dict__[_HANDLE] = handle
    logger.info(
        "autopack enabled %s (%s): %s attention modules, %s, verified: %s",
        type(base).__name__,
        enabled.model_type,
        len(enabled.attention),
        _describe_backend(base, enabled),
        verified,
    )
    return handle


def _check_backend(model: PreTrainedModel, enabled: Enabled) -> None:
    for implementation in enabled.implementations():
        possible = candidates(implementation, model)
        if enabled.backend != "auto" and enabled.backend not in possible:
            raise UnsupportedModel(
                f"backend={enabled.backend!r} cannot serve {type(model).__name__} with attn_implementation="
                f"{implementation!r}; possible: {', '.join(possible)}. "
                + (
                    "Load the model with a flash attention_implementation to use 'flash'."
                    if enabled.backend == "flash"
                    else "Load the model with another attn_implementation, or use backend='auto'."
                )
            )
        usable, reason = availability()[enabled.backend] if enabled.backend != "auto" else (True, "")
        if not usable and enabled.backend == "varlen":
            raise UnsupportedModel(f"backend='varlen' is not available here: {reason}")


def _attach(model: PreTrainedModel, enabled: Enabled) -> None:
    enabled.acquire()
    enabled.mark()
    for level, module in enumerate(enabled.entries):
        entry, leave = EntryHook(enabled, level), ExitHook(enabled, level)
        enabled.hooks += [
            module.register_forward_pre_hook(entry, with_kwargs=True),
            module.register_forward_hook(leave, always_call=True),
        ]
        pooler = getattr(module, "pooler", None)
        if isinstance(pooler, nn.Module):
            enabled.hooks.append(pooler.register_forward_pre_hook(PoolerHook(enabled)))
    for rotary in row_dependent_rotaries(model):
        enabled.hooks.append(rotary.register_forward_hook(PerDocumentRotary(enabled), with_kwargs=True))
    peft.watch()
    enabled.active = True


def _detach(model: PreTrainedModel, enabled: Enabled) -> None:
    enabled.active = False
    _remove_hooks(model)
    enabled.unmark()
    enabled.unbind()
    model.__dict__.pop(_HANDLE, None)
    enabled.release()


def _remove_hooks(model: nn.Module) -> None:
    # By type and not by handle: a copied model has copies of the hooks, and no handles of its own.
    ours = (EntryHook, ExitHook, PoolerHook, PerDocumentRotary)
    for module in model.modules():
        for hooks, extras in (
            (module._forward_pre_hooks, (module._forward_pre_hooks_with_kwargs,)),
            (module._forward_hooks, (module._forward_hooks_with_kwargs, module._forward_hooks_always_called)),
        ):
            for number in [n for n, hook in hooks.items() if isinstance(hook, ours)]:
                del hooks[number]
                for extra in extras:
                    extra.pop(number, None)


@contextmanager
def _all_or_nothing(model: PreTrainedModel, enabled: Enabled) -> Iterator[None]:
    try:
        yield
    except BaseException:
        _detach(model, enabled)
        raise


def _verify(model: PreTrainedModel, enabled: Enabled, known: frozenset[str], verify: str) -> str:
    if verify == "never":
        return "not asked for (verify='never')"
    if verify == "auto" and enabled.model_type in known:
        return f"by the released leak test of {enabled.model_type}"
    from autopack.auditor import audit

    report = audit(model)
    if not report.exact:
        raise UnsupportedModel(
            f"autopack enabled {type(model).__name__} ({enabled.model_type!r}) and audited it, and it is "
            f"not exact: {report.worst_case}. Something other than attention through transformers' interface mixes "
            f"tokens of different documents. The model is left as it was."
        )
    return f"by an audit of this very model, worst relative error {report.worst:.1e}"


def disable(model: Any) -> None:
    """Take everything back that `enable` did to this model; does nothing to a model that is not enabled."""
    base = unwrap(model)
    handle = base.__dict__.get(_HANDLE)
    if handle is not None:
        _detach(base, handle.enabled)


def is_enabled(model: Any) -> bool:
    """Whether `enable` is in force on this model, or on the transformers model inside it."""
    return unwrap(model).__dict__.get(_HANDLE) is not None


def device_of(model: PreTrainedModel) -> torch.device:
    """The device that inputs of the model belong on."""
    return next(model.get_input_embeddings().parameters()).device
