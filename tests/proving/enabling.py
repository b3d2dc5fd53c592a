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
from tests.conftest import attributes, installed_functions, same


def case(asked):
    """What comes of one model: proof, message and measured errors, or what was raised and whether anything changed."""
    model = tiny.build(asked["type"], task=asked["task"], attn_implementation=asked.get("attention", "sdpa"))
    before = attributes(model) | installed_functions()
    try:
        handle = autopack.enable(model, verify=asked.get("verify", True))
    except AutopackError as error:
        unchanged = same(attributes(model) | installed_functions(), before) and not _installed
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


if __name__ == "__main__":
    cases = [case(asked) for asked in json.loads(sys.argv[1])]
    where = [transformers.__version__, version("transformers"), str(Path(str(transformers.__file__)).parent)]
    print(json.dumps({"transformers": where, "cases": cases}))
