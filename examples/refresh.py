"""Run the notebooks again and keep them with their new outputs: `python examples/refresh.py
[trl.ipynb ...]`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent
NAMES = sorted(path.name for path in FOLDER.glob("*.ipynb"))


def refresh(name: str, output: Path) -> None:
    notebook = nbformat.read(FOLDER / name, as_version=4)
    metadata = dict(notebook.metadata)
    client = NotebookClient(
        notebook, timeout=600, record_timing=False, resources={"metadata": {"path": str(FOLDER)}}
    )
    # tqdm finds itself in a notebook and asks for progress bars that are not used.
    ignored = [os.environ.get("PYTHONWARNINGS"), "ignore:IProgress not found"]
    client.execute(env={**os.environ, "PYTHONWARNINGS": ",".join(filter(None, ignored))})
    notebook.metadata = nbformat.from_dict(metadata)  # without the versions that the kernel adds
    nbformat.write(notebook, output / name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"{', '.join(NAMES)}; all of them if left out"
    )
    parser.add_argument(
        "--output", type=Path, default=FOLDER, help="folder to write to; in their place if left out"
    )
    options = parser.parse_args()
    if unknown := set(options.names) - set(NAMES):
        parser.error(f"no notebooks of this folder: {', '.join(sorted(unknown))}")
    for name in options.names or NAMES:
        refresh(name, options.output)


if __name__ == "__main__":
    main()
