"""Releases of transformers that do not exist: the installed one under another number, with some files changed.

Folders in which nothing changes are links to the installed ones, so a release costs next to nothing to make.
"""

import json
import os
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import transformers

NUMBER = f"{transformers.__version__.rpartition('.')[0]}.99"
"""A later patch of the installed release."""
ROOT = Path(__file__).parents[2]
INSTALLED = Path(str(transformers.__file__)).parent
_TIMEOUT = 600.0


class Release:
    """A release of transformers in a folder, which is to come first on the path of a process."""

    def __init__(self, folder, number=NUMBER):
        self.folder = folder.resolve()
        self._package = self.folder / "transformers"
        self._link(INSTALLED, self._package)
        about = self.folder / f"transformers-{number}.dist-info"
        about.mkdir()
        metadata = distribution("transformers").read_text("METADATA")
        assert metadata is not None
        installed = transformers.__version__
        (about / "METADATA").write_text(metadata.replace(f"\nVersion: {installed}", f"\nVersion: {number}", 1))
        self.change("__init__.py", (f'__version__ = "{installed}"', f'__version__ = "{number}"'))

    def change(self, path, *pairs):
        """Replace texts in a file; each has to be there."""
        source = (self._package / path).read_text()
        for old, new in pairs:
            assert old in source, f"{path} has no {old!r}"
            source = source.replace(old, new)
        self.write(path, source)

    def write(self, path, source):
        """Write a file, whether or not the installed release has it."""
        target = self._package / path
        folder = self._package
        for part in Path(path).parent.parts:
            folder = folder / part
            self._make_real(folder)
        assert target.parent.resolve() == target.parent.absolute(), "a link would lead to the installed release"
        target.unlink(missing_ok=True)
        target.write_text(source)

    def ask(self, cases):
        """What `tests.proving.enabling` says of models of this release, in a process of its own."""
        environ = {**os.environ, "PYTHONPATH": f"{self.folder}{os.pathsep}{ROOT}", "PYTHONDONTWRITEBYTECODE": "1"}
        environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-m", "tests.proving.enabling", json.dumps(cases)]
        done = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=_TIMEOUT)
        assert done.returncode == 0, done.stderr[-3000:]
        found = json.loads(done.stdout.splitlines()[-1])
        assert found["transformers"] == [NUMBER, NUMBER, str(self._package)]
        return found["cases"]

    def _make_real(self, folder):
        """Have a folder of links instead of a link to a folder; the one above it is such a folder."""
        if folder.is_symlink():
            folder.unlink()
            self._link(INSTALLED / folder.relative_to(self._package), folder)
        else:
            folder.mkdir(exist_ok=True)

    @staticmethod
    def _link(installed, folder):
        folder.mkdir()
        for path in installed.iterdir():
            if path.name == "__pycache__":  # what is compiled of a changed file must not get there
                (folder / path.name).mkdir()
                for compiled in path.iterdir():
                    (folder / path.name / compiled.name).symlink_to(compiled)
            else:
                (folder / path.name).symlink_to(path)
