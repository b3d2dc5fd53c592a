"""Configuration of Sphinx: the Markdown pages as GitHub shows them, and the reference."""

from __future__ import annotations

import re
from pathlib import Path

import autopack

project = "autopack"
author = "The autopack developers"
copyright = "The autopack developers, Apache-2.0"
release = version = autopack.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinxarg.ext",
]
exclude_patterns = ["README.md"]  # index.md takes it in
nitpicky = True
# Docstrings name what other packages hold, and nothing is fetched while the site is built.
nitpick_ignore_regex = [
    (
        r"py:.*",
        r"(torch|transformers|numpy|np|datasets|collections|pathlib|os|nn|Module|Tensor"
        r"|PreTrainedModel).*",
    ),
    (r"py:.*", r"(?!autopack\.[A-Z]).*"),
]

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
suppress_warnings = ["myst.header"]
nb_execution_mode = "off"  # notebooks are kept with their outputs

default_role = "code"  # docstrings write `name`, as Markdown does
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = "autopack"
html_static_path = ["_static"]
html_css_files = ["tables.css"]
pygments_dark_style = "github-dark"
html_copy_source = False
html_show_sphinx = False
html_theme_options = {
    "source_repository": "https://github.com/autopack/autopack/",
    "source_branch": "main",
    "source_directory": "docs/",
}
copybutton_exclude = ".linenos, .gp, .go"
copybutton_prompt_text = "$ "

_BLOB = "https://github.com/autopack/autopack/blob/main/"
_HERE = Path(__file__).parent


def _copy_notebooks(app, config):
    """Copy the notebooks of examples/ into the site, with links from there."""
    (_HERE / "notebooks").mkdir(exist_ok=True)
    for path in sorted(_HERE.parent.glob("examples/*.ipynb")):
        text = path.read_text().replace("](../docs/", "](../")
        text = text.replace("](../README.md", f"]({_BLOB}README.md")
        text = text.replace("](pretrained/", f"]({_BLOB}examples/pretrained/")
        (_HERE / "notebooks" / path.name).write_text(text)


def _on_github(page, text):
    """Links that leave docs/ lead to the repository, where they lead on GitHub.

    Those to notebooks lead to their copies in the site.
    """
    up = page.count("/") + 1
    notebooks = "](" + "../" * (up - 1) + "notebooks/"
    text = re.sub(r"\]\((?:\.\./)+examples/(?=\w+\.ipynb\))", notebooks, text)
    return re.sub(rf"(?<=\]\()(?:\.\./){{{up}}}(?!\.\./)", _BLOB, text)


def _read(app, page, source):
    source[0] = _on_github(page, source[0])


def _include(app, path, page, source):
    source[0] = _on_github(page, source[0])


def setup(app):
    app.connect("config-inited", _copy_notebooks)
    app.connect("source-read", _read)
    app.connect("include-read", _include)
