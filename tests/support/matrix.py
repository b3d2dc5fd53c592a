"""A matrix of two releases, and results of it."""

from compat import tables
from compat.matrix import Matrix, Release, Selection

OLD = Release("4.9.0", "0.1", "0.3", ">=3.10,<3.99")
NEW = Release("5.0.0", "0.2", "1.3", ">=3.10,<3.99", ci=True)
MODES = ("eager", "sdpa")
MATRIX = Matrix(
    "2.13.0",
    ("causal-lm",),
    MODES,
    ("llama",),
    Selection(("causal-lm",), MODES, ("llama",)),
    (OLD, NEW),
)
ABOUT = {
    "types": {},
    "torch": "2.13.0+cpu",
    "tokenizers": "0.2",
    "huggingface-hub": "1.3",
    "python": "3.11.7",
}


def cell(model_type, mode, status="exact", **more):
    """Return one cell of a release's results, as a dictionary."""
    return {"task": "causal-lm", "type": model_type, "mode": mode, "status": status, **more}


def result_of(release, *cells):
    """Return a release's results of cells, by default of two exact ones, in compact form."""
    packages = {**ABOUT, "tokenizers": release.tokenizers, "huggingface-hub": release.hub}
    found = cells or (
        cell("llama", "eager", worst=1e-6),
        cell("llama", "sdpa"),
    )
    return tables.compact(release, packages, found)
