"""Run the notebook again and keep it with its new outputs: `python examples/refresh.py`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).with_name("trainer.ipynb")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=NOTEBOOK, help="where to write it; in its place if left out")
    options = parser.parse_args()

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    metadata = dict(notebook.metadata)
    client = NotebookClient(
        notebook, timeout=600, record_timing=False, resources={"metadata": {"path": str(NOTEBOOK.parent)}}
    )
    # tqdm finds itself in a notebook and asks for progress bars that are not used.
    ignored = [os.environ.get("PYTHONWARNINGS"), "ignore:IProgress not found"]
    client.execute(env={**os.environ, "PYTHONWARNINGS": ",".join(filter(None, ignored))})
    notebook.metadata = nbformat.from_dict(metadata)  # without the versions that the kernel adds
    nbformat.write(notebook, options.output)


if __name__ == "__main__":
    main()
