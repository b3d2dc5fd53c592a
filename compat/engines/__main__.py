"""Train tiny models on several processes (gloo, CPU) by every engine, and compare with one process
of stock code.

    python -m compat.engines --record                         every engine with its types
    python -m compat.engines fsdp2/llama zero3                some of them

A cell is an engine and a type: three optimizer steps on packed rows of unequal numbers of
documents, the last after a checkpoint has been saved and loaded into a new model. Loss, gradients
and parameters after each step have to be those of a plain model that gets each document alone. One
that is neither exact nor refused is wrong."""

from __future__ import annotations

from compat import study
from compat.common import packages
from compat.engines.cells import ENGINES, types_of
from compat.engines.start import run
from compat.study import Study

GOOD = ("exact", "refused", "absent", "no stock")
STUDY = Study(
    "engines",
    str(__doc__),
    lambda: [f"{engine}/{kind}" for engine in ENGINES for kind in types_of(engine)],
    lambda names, asked: run(names, asked.timeout),
    lambda _, verdict: None if verdict["status"] in GOOD else verdict["status"],
    lambda: packages("accelerate"),
    {
        "timeout": {
            "type": float,
            "default": 60.0,
            "help": "seconds after which a rank that waits has hung",
        }
    },
)

if __name__ == "__main__":
    raise SystemExit(study.main(STUDY))
