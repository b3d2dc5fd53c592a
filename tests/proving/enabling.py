"""Enable tiny models and print as JSON what came of it; run by `tests.proving.fabricated` on a release of its own.

    python -m tests.proving.enabling '[{"type": "llama", "task": "causal-lm"}]'

A case may name an attention implementation, and whether to `verify`.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path

import transformers

import autopack
from autopack import tiny
from autopack.errors import AutopackError
from autopack.patching import _installed
from tests.conftest import attributes, same


def case(asked):
    """What comes of one model: proof, message and measured errors, or what was raised and whether anything changed."""
    model = tiny.build(asked["type"], task=asked["task"], attn_implementation=asked.get("attention", "sdpa"))
    before, library = attributes(model), _library(model)
    try:
        handle = autopack.enable(model, verify=asked.get("verify", True))
    except AutopackError as error:
        unchanged = same(attributes(model), before) and same(_library(model), library) and not _installed
        return {"raised": type(error).__name__, "message": str(error), "unchanged": unchanged}
    proof = handle.enabled.proof
    with handle:
        # What it is enabled for, however it was proven.
        report = autopack.audit(model, modes=tuple(asked.get("modes", ("default", "two rows"))), gradients=False)
    return {
        "source": proof.source,
        "message": handle.verified,
        "padded": proof.padded,
        "labels": proof.labels,
        "exact": report.exact,
        "worst": report.worst,
    }


def _library(model):
    """What stands in the modules of transformers that a model runs, in its classes, and in tables, by name."""
    classes = {cls for module in model.modules() for cls in type(module).__mro__}
    names = {cls.__module__ for cls in classes}
    names |= {"transformers.modeling_utils", "transformers.masking_utils", "transformers.loss.loss_utils"}
    owners = [*classes, *(sys.modules[name] for name in names if name.startswith("transformers."))]
    owners += [held for owner in owners for held in vars(owner).values() if isinstance(held, type)]
    found = {f"{owner.__name__}.{key}": value for owner in owners for key, value in vars(owner).items()}
    tables = {name: value for name, value in found.items() if type(value) is dict}
    return found | {f"{name}[{key}]": value for name, table in tables.items() for key, value in table.items()}


if __name__ == "__main__":
    cases = [case(asked) for asked in json.loads(sys.argv[1])]
    where = [transformers.__version__, version("transformers"), str(Path(str(transformers.__file__)).parent)]
    print(json.dumps({"transformers": where, "cases": cases}))
