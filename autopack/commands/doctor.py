"""Say what is installed, what autopack would use, and what is broken, by trying.

Prints which attention backends work here and why the others do not, and what autopack.enable would
choose; enables a tiny model and audits it. Exit status 1 if something is broken.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any

from autopack.errors import in_a_line
from autopack.pages.parts import text_table
from autopack.version import MINIMUM, __version__, mismatch, problem

OPTIONAL = ("tokenizers", "accelerate", "peft", "trl", "datasets", "matplotlib")
IMPORTED = {
    "torch": "torch",
    "transformers": "transformers",
    "flash-attn": "flash_attn",
    "flash-attn-3": "flash_attn_interface",
    "flash-attn-4": "flash_attn.cute",
}
"""Distributions that are tried, FlashAttention's among them, with the module that is imported from
each."""


SECTIONS = {
    "packages": "Installed",
    "devices": "Devices",
    "backends": "Attention backends",
    "choices": "Backends that autopack.enable(model) uses for packed rows, by attn_implementation",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the diagnosis and return 0 if nothing is broken, else 1."""
    found = examine()
    print(json.dumps(found, indent=2) if args.json else write_text(found))
    return 1 if found["problems"] else 0


def examine() -> dict[str, Any]:
    """Return findings on packages, devices and backends, and what fails when it is tried.

    Each of the `SECTIONS` maps names to texts. `problems` is a list of texts: what is broken, with
    the way out.
    """
    versions: dict[str, str | None] = dict.fromkeys((*MINIMUM, *OPTIONAL, *IMPORTED))
    for name in versions:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    problems = [*filter(None, (problem(name, versions[name]) for name in MINIMUM))]
    torch, transformers = versions["torch"], versions["transformers"]
    if torch is not None and transformers is not None:
        problems += filter(None, [mismatch(torch, transformers, requires("transformers") or ())])
    works = not problems
    for name, module in IMPORTED.items():
        if versions[name] is not None and (why := _failure(partial(import_module, module))):
            works = works and name not in MINIMUM
            problems.append(
                f"{name} {versions[name]} is installed, but `import {module}` fails: "
                f"{why.rstrip('.')}. Reinstall it with what it needs, or uninstall it."
            )
    python = f"{platform.python_version()} ({platform.system()} {platform.machine()})"
    there = {name: installed or "not installed" for name, installed in versions.items()}
    found: dict[str, Any] = {name: {} for name in SECTIONS}
    found["packages"] = {"python": python, "autopack": __version__, **there}
    trials: dict[str, Callable[[], Any]] = {
        "looking for devices": lambda: found["devices"].update(_devices()),
        "looking for backends": partial(_examine_backends, found),
        "importing autopack's parts": _import_all,
        "a tiny Llama with sdpa attention": partial(_try_model, "sdpa"),
        "a tiny Llama with eager attention": partial(_try_model, "eager"),
    }
    for what, attempt in trials.items() if works else ():
        if said := _failure(attempt):
            problems.append(
                f"autopack was tried, and {what} fails with {said}. Please report this with the "
                "output of `autopack doctor --json`."
            )
    return found | {"problems": problems}


def _failure(attempt: Callable[[], Any]) -> str:
    """Call `attempt` and return its error in one line, or "" if it succeeds."""
    try:
        attempt()
    except Exception as error:
        # a broken binary package, or an installation that does not fit, fails in any way
        return in_a_line(error)
    return ""


def _devices() -> dict[str, str]:
    """Return a description of each device that torch can use here, by the device's name."""
    import torch

    found = {"cpu": f"threads: {torch.get_num_threads()}"}
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index in range(count):
        seen = torch.cuda.get_device_properties(index)
        memory = f"{seen.total_memory / 2**30:.0f} GiB"
        found[f"cuda:{index}"] = (
            f"{seen.name}, compute capability {seen.major}.{seen.minor}, {memory}"
        )
    if not count:
        built = torch.version.cuda or torch.version.hip
        reason = "torch finds no usable device" if built else "this torch is built for the CPU only"
        found["cuda"] = f"none: {reason}"
    if torch.backends.mps.is_available():
        found["mps"] = "Apple GPU"
    return found


def _examine_backends(found: dict[str, Any]) -> None:
    """Add to `found` the state of each backend, and the one that `enable` takes per device."""
    from autopack.attention.choose import availability, flash_implementations, taken_by_auto

    there = availability()
    found["backends"] = {
        name: f"{'yes' if yes else 'no'}: {why}" for name, (yes, why) in there.items()
    }
    # those of CUDA have numbers
    kinds = sorted({name.split(":")[0] for name in found["devices"] if name != "cuda"})
    anywhere = ["eager", "sdpa", *(["flex_attention"] if there["flex"][0] else [])]
    for kind in kinds:
        for implementation in [*anywhere, *(flash_implementations() if kind == "cuda" else [])]:
            found["choices"][f"{implementation} on {kind}"] = " or ".join(
                taken_by_auto(implementation, kind)
            )


def _import_all() -> None:
    """Import every public name of autopack and the modules of all families."""
    import autopack

    for name in autopack.__all__:
        try:
            getattr(autopack, name)
        except ImportError as error:
            # one name may need an extra, and its message says which
            if "autopack[" not in str(error):
                raise
    autopack.registry.families()


def _try_model(implementation: str) -> None:
    """Enable and audit a tiny Llama; raise `ArithmeticError` if it is not exact."""
    from autopack.auditing.auditor import audit
    from autopack.enabling.enable import enable
    from autopack.tiny.models import build

    model = build("llama", attn_implementation=implementation)
    with enable(model, verify=False):
        report = audit(model)
    if not report.exact:
        raise ArithmeticError(str(report.packed or report.labels or report.padded))


def write_text(found: dict[str, Any]) -> str:
    """Return the findings of `examine` as text."""
    blocks = {title: [*map(list, found[name].items())] for name, title in SECTIONS.items()}
    said = ["\n  ".join([title, *text_table(rows, "<<")]) for title, rows in blocks.items() if rows]
    problems = found["problems"]
    said.append("\n  - ".join(["BROKEN:", *problems]) if problems else "Nothing is broken.")
    return "\n\n".join(said)
