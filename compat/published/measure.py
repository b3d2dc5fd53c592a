"""Build a published configuration at full size on the meta device in the installed transformers,
and enable it.

`python -m compat.published.measure NAME ...` writes a line of JSON for each.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from compat.cells import private_output
from compat.common import quietly, said
from compat.published import PUBLISHED

STATUSES = ("enabled", "refused", "crash", "upstream error", "absent")
BAD = ("refused", "crash")
LIMIT = 300.0
"""Seconds that one configuration may take."""


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
        return {"name": name, "status": "absent"}
    try:
        model = build(name)
    except Exception as error:  # stock's own code may raise anything, of which this is the record
        return {"name": name, "status": "upstream error", "reason": said(error)}
    found: dict[str, Any] = {"name": name, "parameters": sum(p.numel() for p in model.parameters())}
    Path("/proc/self/clear_refs").write_text("5")  # the peak of memory begins anew
    before, began = _memory("VmRSS"), time.process_time()
    try:
        proof = autopack.enable(model).enabled.proof
        found |= {"status": "enabled", "proof": proof.source, "verified": proof.how}
        found |= {
            what: why for what in ("labels", "padded") if (why := getattr(proof, what)) is not None
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


def measured(names: Iterable[str], limit: float = LIMIT) -> Iterator[dict[str, Any]]:
    """Measure configurations, each in a process of its own that finds nothing of the others."""
    import transformers.models.auto.modeling_auto  # noqa: F401  (so that no process imports it anew)

    import autopack  # noqa: F401

    forked = multiprocessing.get_context("fork")
    for name in names:
        here, there = forked.Pipe(duplex=False)
        process = forked.Process(target=_answer, args=(name, there))
        process.start()
        there.close()
        found = {"name": name, "status": "crash", "reason": f"took longer than {limit:.0f} s"}
        try:
            if here.poll(limit):
                found = here.recv()
        except EOFError:
            process.join()
            found["reason"] = f"its process ended with status {process.exitcode}"
        process.kill()
        process.join()
        yield found


def _answer(name: str, there: Connection) -> None:
    there.send(measure(name))


if __name__ == "__main__":
    with private_output() as answers, quietly():
        for each in measured(sys.argv[1:]):
            answers.write(json.dumps(each, ensure_ascii=False) + "\n")
            answers.flush()
