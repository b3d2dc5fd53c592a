"""The subcommands of ``autopack``, one module each, and what several of them have in common.

Each has `add_arguments`, which describes it and its options, and `run`, which returns the exit
status.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import shlex
from collections.abc import Collection, Iterable
from contextlib import suppress
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopack.bench.subjects import TINY, build
from autopack.errors import AutopackError, did_you_mean
from autopack.options import TASKS
from autopack.pages import parts
from autopack.pages.figure import formats
from autopack.version import __version__

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def add_data_options(parser: argparse._ActionsContainer) -> None:
    """Add the options of commands that take a data set: --column, --tokenizer, --batch-size."""
    parser.add_argument(
        "--column",
        action="extend",
        type=lambda text: text.split(","),
        help="the column of lengths, tokens, text or messages (input_ids, length or lengths; with "
        "--tokenizer text or messages); several, as prompt,completion, add up",
    )
    parser.add_argument(
        "--tokenizer",
        metavar="NAME",
        help="a tokenizer of transformers, for text and for messages of a chat",
    )
    parser.add_argument(
        "--batch-size", type=int, default=8, help="documents of a padded batch (%(default)s)"
    )


def add_outputs(parser: argparse.ArgumentParser) -> None:
    """Add the options --json, --html and --plot, for `check_outputs` and `show`."""
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="print everything as JSON")
    group.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="also write it as a page that needs nothing but itself (figures need matplotlib)",
    )
    group.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="also draw it (needs matplotlib)"
    )


def check_outputs(args: argparse.Namespace) -> None:
    """Raise `AutopackError` if a file that --html or --plot names cannot be written."""
    for option, path in (("--html", args.html), ("--plot", args.plot)):
        wrong = ""
        if path is None:
            continue
        if not path.parent.is_dir():
            wrong = f"there is no directory {path.parent}; create it or name another one"
        elif path.is_dir():
            wrong = "wanted a file, found a directory; name a file in it"
        elif path is args.plot and path.suffix.lstrip(".").lower() not in (known := formats()):
            wrong = f"wanted a file name that ends with one of {', '.join(known)}"
        if wrong:
            raise AutopackError(f"{option} {path}: {wrong}", code="cannot-write")


def show(args: argparse.Namespace, title: str, found: Any, data: dict[str, Any]) -> None:
    """Print `found` as text, or `data` as JSON, and write the files for --html and --plot.

    The page has a title, the pieces that a notebook shows too, and what was run by what.
    """
    # nan and infinities are no JSON
    finite = json.loads(json.dumps(data, default=_plain), parse_constant=lambda name: None)
    print(json.dumps(finite, indent=1) if args.json else found)
    if args.html is not None:
        versions = [f"{name} {version(name)}" for name in ("torch", "transformers", "numpy")]
        made = {
            "command": shlex.join(["autopack", *args.argv]),
            "versions": ", ".join(
                [f"autopack {__version__}", *versions, f"Python {platform.python_version()}"]
            ),
            "platform": platform.platform(),
            "date": datetime.now(timezone.utc).isoformat(sep=" ", timespec="seconds"),
        }
        # A path may hold bytes that are no text, which print escapes too.
        page = parts.whole(title, made.items(), found._repr_html_())
        args.html.write_text(page, encoding="utf-8", errors="backslashreplace")
    if args.plot is not None:
        found.plot().savefig(args.plot)
    for name, path in (("Page", args.html), ("Picture", args.plot)):
        if path is not None and not args.json:
            print(f"\n{name}: {path}")


def _plain(value: Any) -> list[Any]:
    """Return an array as a list, and a set as a sorted list."""
    return value.tolist() if hasattr(value, "tolist") else sorted(value)


def keep_freed_memory() -> None:
    """Make glibc keep memory that this process frees; do nothing with another C library.

    Otherwise it gives the padded batches' large tensors back to the system after every use, and on
    small virtual machines a fifth of the padded arm's time is page faults: packing would look
    better than it is.
    """
    trim_threshold, top_pad, mmap_max = -1, -2, -4
    with suppress(OSError, AttributeError, TypeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(mmap_max, 0)
        libc.mallopt(trim_threshold, 2**31 - 1)
        libc.mallopt(top_pad, 2**28)


DTYPES = ("float32", "float64", "bfloat16", "float16")


class CannotLoad(AutopackError):
    """Error for a model that is not there, or cannot be loaded or built with the options."""

    code = "model-unavailable"


def add_model_options(
    parser: argparse._ActionsContainer,
    dtype: str | None = None,
    device: str | None = None,
) -> None:
    """Add --attn, --trust-remote-code, --dtype and --device; a default of None stays None.

    The help says that None stands for a GPU if there is one, and for bfloat16 there, else float32:
    the caller fills that in.
    """
    parser.add_argument(
        "--attn-implementation",
        "--attn",
        metavar="NAME",
        help="eager, sdpa, flash_attention_2 ... (what transformers chooses)",
    )
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run the code in the model's directory",
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default=dtype,
        help=f"of the weights ({dtype or 'float32; on a GPU bfloat16'})",
    )
    parser.add_argument(
        "--device",
        default=device,
        help=f"cpu, cuda, cuda:1, mps ... ({device or 'cuda where there is one'})",
    )


def obtain(
    args: argparse.Namespace, tasks: Collection[str], size: str = TINY, longest: int = 0
) -> PreTrainedModel:
    """Return the model that `args.model` names: saved, of the Hub's cache, or built by its type.

    A type is built for one of `tasks`, in a size whose positions reach to `longest`. Of the Hub it
    is one that has been downloaded; nothing is downloaded here. The class of a saved model is the
    one that it was saved from, where transformers has it, and its causal language model otherwise.
    Raises `CannotLoad`.
    """
    import torch
    import transformers

    from autopack.tiny import CannotBuild

    try:
        torch.zeros(1, device=args.device).item()
    except Exception as error:  # each kind of device fails in its own way, by an AssertionError too
        raise CannotLoad(
            f"--device {args.device}: torch {torch.__version__} cannot compute on it here; pass "
            "--device cpu, or another one that `autopack doctor` names"
        ) from error
    if is_built(args.model, tasks):
        form = {
            "attn": args.attn_implementation,
            "dtype": getattr(torch, args.dtype),
            "device": args.device,
        }
        try:
            return build(args.model, size, _task_for(args.model, tasks), longest, **form)
        except (CannotBuild, RuntimeError) as error:
            raise CannotLoad(
                f"{error}; choose another type, size, --attn, --dtype or --device"
            ) from error
    options: dict[str, Any] = {
        "local_files_only": True,
        "trust_remote_code": args.trust_remote_code,
    }
    name = str(Path(args.model).expanduser())
    try:
        config = transformers.AutoConfig.from_pretrained(name, **options)
        # transformers 4.56 renamed the argument together with the field of the configuration.
        options["dtype" if hasattr(config, "dtype") else "torch_dtype"] = getattr(torch, args.dtype)
        if args.attn_implementation is not None:
            options["attn_implementation"] = args.attn_implementation
        names = getattr(config, "architectures", None) or [""]
        saved: Any = getattr(transformers, names[0], None)
        if not (isinstance(saved, type) and issubclass(saved, transformers.PreTrainedModel)):
            saved = transformers.AutoModelForCausalLM
        return saved.from_pretrained(name, config=config, **options).to(args.device)
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        said = f"transformers {transformers.__version__} cannot load {name}: {error}"
        if not is_saved(args.model):
            sorts = "" if len(tasks) == len(TASKS) else f" ({' or '.join(tasks)})"
            said = (
                f"{args.model!r} is neither a directory with a saved model, nor a downloaded model "
                f"of the Hub (nothing is downloaded here), nor a model type{sorts} of transformers "
                f"{transformers.__version__}; name one{did_you_mean(args.model, types_for(tasks))}"
            )
        raise CannotLoad(said) from error


def is_saved(name: str) -> bool:
    """Return True if a name is the path of a directory."""
    return Path(name).expanduser().is_dir()


def is_built(name: str, tasks: Iterable[str]) -> bool:
    """Return True if a name is no directory, and a model type with a model for one of the tasks."""
    return not is_saved(name) and name in types_for(tasks)


def types_for(tasks: Iterable[str]) -> list[str]:
    """Return the model types that have a model for one of these tasks, sorted."""
    from autopack import tiny

    return sorted({name for task in tasks for name in tiny.types_for(task)})


def _task_for(model_type: str, tasks: Iterable[str]) -> str:
    """Return which of `tasks` a type is built for: its own (masked-lm, seq2seq), or the first.

    An encoder is built as a masked language model, an encoder-decoder as one, and others as the
    first that they can be.
    """
    from transformers.models.auto import modeling_auto

    from autopack import tiny

    found = [task for task in tasks if model_type in tiny.types_for(task)]
    masked = getattr(modeling_auto, f"{TASKS['masked-lm']}_NAMES").get(model_type, "")
    first = "masked-lm" if masked.endswith("ForMaskedLM") else "seq2seq"
    return first if first in found else found[0]
