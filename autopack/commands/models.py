"""Models that a command names: saved ones, and types of transformers."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopack.bench.subjects import TINY, build
from autopack.errors import AutopackError, did_you_mean
from autopack.options import CHOICES, TASKS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DTYPES = ("float32", "float64", "bfloat16", "float16")


class CannotLoad(AutopackError):
    """There is no model under that name, or not with those options."""

    code = "model-unavailable"


def add_model_options(
    parser: argparse._ActionsContainer, backend: str, dtype: str | None = None, device: str | None = None
) -> None:
    """Add the options of commands that take a model; without a dtype and a device they are those of a GPU if any."""
    parser.add_argument(
        "--attn",
        dest="attn_implementation",
        metavar="NAME",
        help="attn_implementation: eager, sdpa ... (what transformers chooses)",
    )
    parser.add_argument("--backend", choices=CHOICES["backend"], help=f"{backend} (auto)")
    parser.add_argument("--trust-remote-code", action="store_true", help="run the code in the model's directory")
    parser.add_argument(
        "--dtype", choices=DTYPES, default=dtype, help=f"of the weights ({dtype or 'float32; on a GPU bfloat16'})"
    )
    parser.add_argument(
        "--device", default=device, help=f"cpu, cuda, cuda:1, mps ... ({device or 'cuda where there is one'})"
    )


def obtain(
    args: argparse.Namespace,
    tasks: Collection[str],
    task: str | None,
    size: str = TINY,
    longest: int = 0,
    seed: int = 0,
) -> PreTrainedModel:
    """Return the model that `args.model` names: a saved one, a type to build for one of `tasks`, or one of the Hub.

    A type is built for `task`, in a size whose positions reach to `longest`. Of the Hub it is one that has been
    downloaded. Raises `CannotLoad`.
    """
    import torch
    import transformers

    from autopack.tiny import CannotBuild

    check_device(args.device)
    if is_saved(args.model):
        return load_saved(str(Path(args.model).expanduser()), args)
    known = types_for(tasks)
    if args.model in known:
        try:
            return build(
                args.model,
                size,
                str(task),
                longest,
                attn=args.attn_implementation,
                dtype=getattr(torch, args.dtype),
                device=args.device,
                seed=seed,
            )
        except (CannotBuild, RuntimeError) as error:
            reason = error.reason if isinstance(error, CannotBuild) else str(error).partition("\n")[0]
            raise CannotLoad(
                f"cannot build {args.model}: {reason}; choose another type, "
                f"{'--size, ' if hasattr(args, 'size') else ''}--attn, --dtype or --device"
            ) from error
    try:
        return load_saved(args.model, args)
    except CannotLoad as error:
        closest = did_you_mean(args.model, known, f"; it knows {len(known)}, from {known[0]} to {known[-1]}")
        sorts = "" if len(tasks) == len(TASKS) else f" ({' or '.join(tasks)})"
        raise CannotLoad(
            f"{args.model!r} is neither a directory with a saved model, nor a downloaded model of the Hub (nothing is "
            f"downloaded here), nor a model type{sorts} of transformers {transformers.__version__}; name one of "
            f"these{closest}"
        ) from error


def is_saved(name: str) -> bool:
    """Return True for the name of a directory."""
    return Path(name).expanduser().is_dir()


def types_for(tasks: Iterable[str]) -> list[str]:
    """Return the types that have a model for one of these tasks, sorted."""
    from autopack import tiny

    return sorted({name for task in tasks for name in tiny.types_for(task)})


def load_saved(name: str, args: argparse.Namespace) -> PreTrainedModel:
    """Load a model from a directory, or by its name on the Hub from what has been downloaded; nothing is downloaded.

    Its class is the one that it was saved from, where transformers has it, and its causal language model otherwise.
    Raises `CannotLoad`.
    """
    import torch
    import transformers

    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": args.trust_remote_code}
    try:
        config = transformers.AutoConfig.from_pretrained(name, **options)
        # transformers 4.56 renamed the argument together with the field of the configuration.
        options["dtype" if hasattr(config, "dtype") else "torch_dtype"] = getattr(torch, args.dtype)
        if args.attn_implementation is not None:
            options["attn_implementation"] = args.attn_implementation
        saved: Any = getattr(transformers, next(iter(getattr(config, "architectures", None) or ()), ""), None)
        if not (isinstance(saved, type) and issubclass(saved, transformers.PreTrainedModel)):
            saved = transformers.AutoModelForCausalLM
        return saved.from_pretrained(name, config=config, **options).to(args.device)
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        raise CannotLoad(f"transformers {transformers.__version__} cannot load {name}: {error}") from error


def check_device(name: str) -> None:
    """Raise `CannotLoad` for a device on which torch cannot compute here."""
    import torch

    try:
        torch.zeros(1, device=name).item()
    except Exception as error:  # each kind of device fails in its own way, by an AssertionError too
        raise CannotLoad(
            f"--device {name}: torch {torch.__version__} cannot compute on it here; pass --device cpu, or another one "
            f"that `autopack doctor` names"
        ) from error


def task_for(model_type: str, tasks: Iterable[str] = tuple(TASKS)) -> str | None:
    """Return the task that a type is built for unless told otherwise, or None for a type without one of these.

    An encoder is built as a masked language model, an encoder-decoder as one, and others as the first that they can be.
    """
    from transformers.models.auto import modeling_auto

    from autopack import tiny

    found = [task for task in tasks if model_type in tiny.types_for(task)]
    masked = getattr(modeling_auto, f"{TASKS['masked-lm']}_NAMES").get(model_type, "")
    first = "masked-lm" if masked.endswith("ForMaskedLM") else "seq2seq"
    return first if first in found else next(iter(found), None)
