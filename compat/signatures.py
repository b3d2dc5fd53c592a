"""The signatures of kernels, as the published packages have them: what stand-ins take, and what calls are held to.

    python -m compat.signatures            download the packages (about 1.5 GB) and write signatures.json
    python -m compat.signatures --check    fail where a package has another signature; write nothing

They are read from the sources of the packages, which are not installed: torch's from its wheels for macOS, which are
the smallest. FlashAttention 3 is no package of its own; its interface lies in flash-attn's, in the folder `hopper`.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

FILE = Path(__file__).with_name("signatures.json")
TORCHES = ("2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
FLASH_2, FLASH_3 = "flash-attn 2.8.3.post2", "hopper of flash-attn 2.8.3.post2"
FLASH_4 = "flash-attn-4 4.0.0b36"
OF_FLASH = ("flash_attn_func", "flash_attn_varlen_func")
_OF_TORCH = {
    "torch/nn/attention/varlen.py": ("varlen_attn",),
    "torch/nn/attention/flex_attention.py": ("flex_attention", "create_block_mask"),
}
_SCHEMAS = "torchgen/packaged/ATen/native/native_functions.yaml"
_OPERATORS = ("_flash_attention_forward", "_flash_attention_backward")


@cache
def recorded() -> dict[str, dict[str, str]]:
    """Parameters by package and function, as Python writes them, without types."""
    return json.loads(FILE.read_text(encoding="utf-8"))


def signature(package: str, function: str) -> inspect.Signature:
    """The signature of a function of a package, such as `signature("torch 2.10.0", "varlen_attn")`."""
    return inspect.signature(eval(f"lambda {recorded()[package][function]}: None"))


def functions_in(source: str, names: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """The parameters of functions of a Python source; of several definitions the last, as for Python."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name in names:
            yield node.name, ast.unparse(_Bare().visit(node.args))


class _Bare(ast.NodeTransformer):
    """Parameters without types, and with the names of constants in place of the constants."""

    def visit_arg(self, node: ast.arg) -> ast.arg:
        return ast.arg(node.arg)

    def visit_Name(self, node: ast.Name) -> ast.Constant:
        return ast.Constant(node.id)


def operators_in(schemas: str) -> Iterator[tuple[str, str]]:
    """The parameters of torch's flash operators, from its list of native functions."""
    for name in _OPERATORS:
        (found,) = re.findall(rf"^- func: {name}\((.*)\) -> ", schemas, flags=re.MULTILINE)
        yield name, ", ".join(part.rpartition(" ")[2] for part in found.split(", "))


def published() -> dict[str, dict[str, str]]:
    """The same as `recorded`, from the packages."""
    from compat.kernels import packages

    folder = packages.directory()
    interfaces = {FLASH_2: "flash_attn/flash_attn_interface.py", FLASH_3: "hopper/flash_attn_interface.py"}
    found = {
        package: dict(functions_in((folder / path).read_text(encoding="utf-8"), OF_FLASH))
        for package, path in interfaces.items()
    }
    with _wheel(*FLASH_4.split()) as wheel:
        found[FLASH_4] = dict(functions_in(_text(wheel, "flash_attn/cute/interface.py"), OF_FLASH))
    for release in TORCHES:
        with _wheel("torch", release) as wheel:
            functions = [each for path, names in _OF_TORCH.items() for each in functions_in(_text(wheel, path), names)]
            found[f"torch {release}"] = dict([*functions, *operators_in(_text(wheel, _SCHEMAS))])
    return found


def _wheel(package: str, release: str) -> zipfile.ZipFile:
    platforms = [option for mac in (11, 14) for option in ("--platform", f"macosx_{mac}_0_arm64")]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    with tempfile.TemporaryDirectory() as folder:
        command += [*platforms, "--python-version", "3.12", "--dest", folder, f"{package}=={release}"]
        subprocess.run(command, check=True)
        (path,) = Path(folder).iterdir()
        return zipfile.ZipFile(path)  # the file stays readable where its name is gone


def _text(wheel: zipfile.ZipFile, path: str) -> str:
    return wheel.read(path).decode("utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail where the record is another one; write nothing")
    asked = parser.parse_args()
    found = published()
    if asked.check:
        differing = [package for package in {**found, **recorded()} if found.get(package) != recorded().get(package)]
        print("\n".join(f"{package}: recorded otherwise in {FILE.name}" for package in differing) or "as recorded")
        return bool(differing)
    FILE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"{FILE}: {sum(map(len, found.values()))} functions of {len(found)} packages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
