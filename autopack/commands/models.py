"""Models that a command names: saved ones, and types of transformers."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

from autopack.errors import AutopackError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DTYPES = ("float32", "float64", "bfloat16", "float16")


class CannotLoad(AutopackError):
    """There is no model under that name, or not with those options."""


def load_saved(
    name: str, *, attn: str | None, dtype: str, device: str, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Load a model from a directory, or by its name on the Hub from what has been downloaded; nothing is downloaded.

    Its class is the one that it was saved from, where transformers has it, and its causal language model otherwise.
    Raises `CannotLoad`.
    """
    import torch
    import transformers

    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": trust_remote_code}
    try:
        config = transformers.AutoConfig.from_pretrained(name, **options)
        # transformers 4.56 renamed the argument together with the field of the configuration.
        options["dtype" if hasattr(config, "dtype") else "torch_dtype"] = getattr(torch, dtype)
        if attn is not None:
            options["attn_implementation"] = attn
        saved: Any = getattr(transformers, next(iter(getattr(config, "architectures", None) or ()), ""), None)
        if not (isinstance(saved, type) and issubclass(saved, transformers.PreTrainedModel)):
            saved = transformers.AutoModelForCausalLM
        return saved.from_pretrained(name, config=config, **options).to(device)
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        raise CannotLoad(f"transformers {transformers.__version__} cannot load {name}: {error}") from error


def unknown_name(name: str, known: list[str], sort: str) -> CannotLoad:
    """The error for what is neither a directory nor, as `sort` says, one of the types that are known; names some."""
    import transformers

    close = ", ".join(difflib.get_close_matches(name, known, n=5, cutoff=0.5))
    closest = f"did you mean {close}?" if close else f"it knows {len(known)}, from {known[0]} to {known[-1]}"
    wanted = f"{sort} model type of transformers {transformers.__version__}"
    return CannotLoad(f"{name!r} is neither a directory nor {wanted}; {closest}")
