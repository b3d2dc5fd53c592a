"""Build a published configuration at full size on the meta device in the installed transformers,
and enable it.

`python -m compat.published.measure NAME` says that it has begun, and writes a line of JSON.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from compat.cells import private_output
from compat.common import quietly, said
from compat.published import PUBLISHED


def config_of(name: str, **changes: Any) -> Any:
    """The configuration as `from_pretrained` reads it from the published file."""
    from transformers import AutoConfig

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(
            json.dumps({**PUBLISHED[name][1], **changes}), encoding="utf-8"
        )
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)


def build(name: str, cls: Any = None, **changes: Any) -> Any:
    """The model at full size on the meta device, in its published dtype; of another class where one
    is given."""
    import torch
    import transformers

    config = config_of(name, **changes)
    with torch.device("meta"):
        return (cls or getattr(transformers, PUBLISHED[name][0]))._from_config(config)


def absent(name: str) -> bool:
    """Whether the installed release has no such type or class."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    cls, fields = PUBLISHED[name]
    return fields["model_type"] not in CONFIG_MAPPING or not hasattr(transformers, cls)


def measure(name: str) -> dict[str, Any]:
    """Enable one configuration by the default call: `status`, and what it cost or the `reason`
    against it.

    Of what is enabled, `proof` says where its proof comes from and `padded` why padded batches keep
    their padding."""
    import autopack
    from autopack.errors import AutopackError

    if absent(name):
        return {"status": "absent"}
    try:
        model = build(name)
    except Exception as error:  # stock's own code may raise anything, of which this is the record
        return {"status": "upstream error", "reason": said(error)}
    found: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters())}
    Path("/proc/self/clear_refs").write_text("5")  # the peak of memory begins anew
    before, began = _memory("VmRSS"), time.process_time()
    try:
        proof = autopack.enable(model).enabled.proof
        found |= {"status": "enabled", "proof": proof.source, "verified": proof.how}
        found |= {
            what: why
            for what, why in (
                ("labels", proof.why_not_labels),
                ("padded", proof.why_not_unpadded),
            )
            if why is not None
        }
    except AutopackError as error:
        found |= {"status": "refused", "reason": error.message}
    except Exception as error:  # a crash is a result, too
        found |= {"status": "crash", "reason": said(error)}
    seconds, peak = time.process_time() - began, _memory("VmHWM")
    return {**found, "seconds": round(seconds, 2), "megabytes": round((peak - before) / 2**20)}


def _memory(name: str) -> int:
    """Return a figure of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


if __name__ == "__main__":
    import transformers.models.auto.modeling_auto  # noqa: F401  (no time of `enable`)

    import autopack  # noqa: F401

    with private_output() as answers, quietly():
        print({}, file=answers, flush=True)
        print(json.dumps(measure(sys.argv[1]), ensure_ascii=False), file=answers, flush=True)
