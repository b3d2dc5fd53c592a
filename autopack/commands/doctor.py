"""``autopack doctor``: what is installed, what autopack computes attention with here, and what is broken, by trying."""

from __future__ import annotations

import argparse
import importlib
import json
import platform
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, requires, version
from itertools import product

from autopack.errors import in_a_line
from autopack.pages.parts import text_table
from autopack.version import MINIMUM, __version__, mismatch, problem

OPTIONAL = ("tokenizers", "accelerate", "peft", "trl", "datasets", "matplotlib")

FLASH_ATTENTION = {
    "flash-attn": "flash_attn",
    "flash-attn-3": "flash_attn_interface",
    "flash-attn-4": "flash_attn.cute",
}
"""Distributions of FlashAttention, with the module that transformers imports from each."""

_REPORT = "Please report this with the output of `autopack doctor --json`."


@dataclass
class Diagnosis:
    """Everything that the doctor found, as plain data.

    `packages` holds the installed version of every package that matters, or None. A row of `devices` has `device`, as
    torch names it, `available` and `description`; one of `backends`, by name, `available` and `reason`; one of
    `choices` those that `enable` may choose: `attn_implementation`, `device`, `backend`.
    `problems` says what is broken, with the way out.
    """

    python: str
    autopack: str
    packages: dict[str, str | None] = field(default_factory=dict)
    devices: list[dict[str, str | bool]] = field(default_factory=list)
    backends: dict[str, dict[str, bool | str]] = field(default_factory=dict)
    choices: list[dict[str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Print what is installed, which attention backends work here and why the others do not, and what "
        "autopack.enable would choose; enable a tiny model and audit it. Exit status 1 if something is broken."
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the diagnosis and return 0 if nothing is broken, else 1."""
    diagnosis = examine()
    print(json.dumps(asdict(diagnosis), indent=2) if args.json else write_text(diagnosis))
    return 1 if diagnosis.problems else 0


def examine() -> Diagnosis:
    """Look at the packages, devices and backends of this process; never raises for what it finds broken."""
    found = Diagnosis(f"{platform.python_version()} ({platform.system()} {platform.machine()})", __version__)
    for name in (*MINIMUM, *OPTIONAL, *FLASH_ATTENTION):
        found.packages[name] = None
        with suppress(PackageNotFoundError):
            found.packages[name] = version(name)
    found.problems += filter(None, (problem(name, found.packages[name]) for name in MINIMUM))
    torch, transformers = found.packages["torch"], found.packages["transformers"]
    if torch is not None and transformers is not None:
        found.problems += filter(None, [mismatch(torch, transformers, requires("transformers") or ())])
    versions_fit = not found.problems
    working = [name for name in ("torch", "transformers") if _imports(name, name, found)]
    for distribution, module in FLASH_ATTENTION.items():
        _imports(distribution, module, found)
    if "torch" in working:
        found.devices = _devices()
    if versions_fit and len(working) == 2:
        found.problems += (f"autopack was tried, and {failure}. {_REPORT}" for failure in _failures(found))
    return found


def _imports(name: str, module: str, found: Diagnosis) -> bool:
    """Return True if an installed package can be imported; add a problem to `found` if not."""
    if found.packages.get(name) is None:
        return False
    try:
        importlib.import_module(module)
    except Exception as error:  # a broken binary package fails in any way it likes
        said = f"{name} {found.packages[name]} is installed, but `import {module}` fails: {in_a_line(error)}"
        way = "with what it needs" if name in MINIMUM else "to match the installed torch, or uninstall it"
        found.problems.append(f"{said.rstrip('.')}. Reinstall it {way}.")
        return False
    return True


def _devices() -> list[dict[str, str | bool]]:
    import torch

    found = {"cpu": f"{torch.get_num_threads()} threads"}
    built = f"ROCm {torch.version.hip}" if torch.version.hip else torch.version.cuda and f"CUDA {torch.version.cuda}"
    usable = torch.cuda.is_available()
    for index in range(torch.cuda.device_count() if usable else 0):
        seen = torch.cuda.get_device_properties(index)
        memory = f"{seen.total_memory / 2**30:.0f} GiB"
        found[f"cuda:{index}"] = f"{seen.name}, compute capability {seen.major}.{seen.minor}, {memory}, {built}"
    if not usable:
        reason = "torch finds no usable device" if built else "this torch is built for the CPU only"
        found["cuda"] = f"none: {reason}"
    if torch.backends.mps.is_available():
        found["mps"] = "Apple GPU"
    return [{"device": name, "available": usable or name != "cuda", "description": found[name]} for name in found]


def _examine_backends(found: Diagnosis) -> None:
    from autopack.attention.choose import BACKENDS, availability, taken_by_auto

    found.backends = {name: {"available": yes, "reason": why} for name, (yes, why) in availability().items()}
    kinds = sorted({str(device["device"]).split(":")[0] for device in found.devices if device["available"]})
    for backend, kind in product(BACKENDS.values(), kinds):
        for implementation in backend.implementations():
            if kind == "cuda" or not implementation.startswith("flash"):
                taken = " or ".join(taken_by_auto(implementation, kind))
                row = {"attn_implementation": implementation, "device": kind, "backend": taken}
                found.choices.append(row)


def _failures(found: Diagnosis) -> Iterator[str]:
    """Yield what of autopack does not work here, in words; what is asked of it is added to `found`."""
    tried: dict[str, Callable[[], None]] = {
        "looking for backends": partial(_examine_backends, found),
        "importing autopack's parts": _import_all,
    }
    for implementation in ("sdpa", "eager"):
        tried[f"a tiny Llama with {implementation} attention"] = partial(_try_model, implementation)
    for what, attempt in tried.items():
        try:
            attempt()
        except Exception as error:  # whatever an installation that does not fit may raise
            yield f"{what} fails with {in_a_line(error)}"


def _import_all() -> None:
    import autopack
    from autopack.errors import UnsupportedVersion

    for name in autopack.__all__:
        with suppress(UnsupportedVersion):  # one name may need more than autopack does, and says so where it is used
            getattr(autopack, name)
    autopack.registry.families()
    importlib.import_module("autopack.attention.compiled")  # which registers the operator that compiled graphs hold


def _try_model(implementation: str) -> None:
    from autopack.auditing.auditor import audit
    from autopack.enabling.enable import enable
    from autopack.tiny.models import build

    model = build("llama", attn_implementation=implementation)
    with enable(model, verify=False):
        report = audit(model)
    if not report.exact:
        raise ArithmeticError(str(report.packed or report.labels or report.padded))


def write_text(found: Diagnosis) -> str:
    """The diagnosis for people."""
    packages = [["python", found.python], ["autopack", found.autopack]]
    packages += [[name, installed or "not installed"] for name, installed in found.packages.items()]
    backends = [[name, "yes" if row["available"] else "no", str(row["reason"])] for name, row in found.backends.items()]
    choices = [[*found.choices[0]], *([*row.values()] for row in found.choices)] if found.choices else []
    blocks = {
        "Installed": packages,
        "Devices": [[str(row["device"]), str(row["description"])] for row in found.devices],
        "Attention backends": backends,
        "What autopack.enable(model) computes packed rows with, as a call needs it": choices,
    }
    said = ["\n  ".join([title, *text_table(rows, "<" * len(rows[0]))]) for title, rows in blocks.items() if rows]
    said.append("\n  - ".join(["BROKEN:", *found.problems]) if found.problems else "Nothing is broken.")
    return "\n\n".join(said)
