"""The signatures of kernels, as the published packages have them: what stand-ins take, and what
calls are held to.

`signatures.json` was read from the sources of the packages: torch's wheels for macOS, flash-attn 2
and 4, and the folder `hopper` of flash-attn's repository, which FlashAttention 3 is. A test holds
it to the installed torch."""

from __future__ import annotations

import inspect
import json
from functools import cache
from pathlib import Path

FILE = Path(__file__).with_name("signatures.json")
TORCHES = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
FLASH_2, FLASH_3 = "flash-attn 2.8.3.post2", "hopper of flash-attn 2.8.3.post2"
FLASH_4 = "flash-attn-4 4.0.0b36"
OF_FLASH = ("flash_attn_func", "flash_attn_varlen_func")


@cache
def recorded() -> dict[str, dict[str, str]]:
    """Parameters by package and function, as Python writes them, without types."""
    return json.loads(FILE.read_text(encoding="utf-8"))


def signature(package: str, function: str) -> inspect.Signature:
    """The signature of a function of a package, such as `signature("torch 2.11.0",
    "varlen_attn")`."""
    return inspect.signature(eval(f"lambda {recorded()[package][function]}: None"))
