"""Models that a command names: saved ones, and types of transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autopack.errors import AutopackError, did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DTYPES = ("float32", "float64", "bfloat16", "float16")
TASKS = (
    "causal-lm",
    "masked-lm",
    "seq2seq",
    "sequence-classification",
    "token-classification",
    "question-answering",
    "next-sentence-prediction",
    "multiple-choice",
    "image-text-to-text",
    "multimodal-lm",
)
"""Those of `autopack.tiny`, which imports torch."""


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

    closest = did_you_mean(name, known, f"; it knows {len(known)}, from {known[0]} to {known[-1]}")
    wanted = f"{sort} model type of transformers {transformers.__version__}"
    return CannotLoad(f"{name!r} is neither a directory nor {wanted}{closest}")


def check_device(name: str) -> None:
    """Raise `CannotLoad` for a device on which torch cannot compute here."""
    import torch

    try:
        torch.zeros(1, device=name).item()
    except Exception as error:  # each kind of device fails in its own way, by an AssertionError too
        there = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
        there += [kind for kind in ("mps", "xpu") if hasattr(torch, kind) and getattr(torch, kind).is_available()]
        wanted = f"pass --device {' or '.join(['cpu', *there])}"
        raise CannotLoad(f"--device {name}: torch {torch.__version__} cannot compute on it here; {wanted}") from error


def task_for(model_type: str) -> str | None:
    """Return what a type is built for unless told otherwise, or None for a type without a task.

    An encoder is built as a masked language model, an encoder-decoder as one, and others as the first that they can be.
    """
    from autopack import tiny
    from autopack.bench.subjects import task_of

    tasks = {task_of(model_type): None, "seq2seq": None, **dict.fromkeys(TASKS)}
    by_type = [task for task in tasks if model_type in tiny.types_for(task)]
    if by_type[:2] == ["causal-lm", "seq2seq"]:
        return "seq2seq"
    return by_type[0] if by_type else None
