"""Sphinx configuration.  The build needs no network: names of other projects are not looked up."""

from __future__ import annotations

from importlib.metadata import version as installed_version
from typing import Any

from sphinx.ext.napoleon import GoogleDocstring

project = "trio_llm"
author = "The trio_llm maintainers"
copyright = author
release = version = installed_version("trio-llm")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinxcontrib_trio"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"trio_llm {release}"

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

default_role = "code"  # in docstrings, `name` is code
autodoc_member_order = "bysource"
autodoc_typehints = "signature"

# with -n every name in a signature must resolve; these belong to other projects
_OTHERS = (
    "attrs?|cattrs|collections|contextlib|enum|hypercorn|pathlib|quart|quart_trio|structlog|torch|transformers|trio"
)
nitpick_ignore_regex = [("py:.*", rf"(?:{_OTHERS})\..*"), ("py:.*", r"(?:typing|types)\..*")]

nitpick_ignore = [
    ("py:class", "Prompt"),  # an alias of a union
    ("py:class", "array"),  # Python's
    ("py:class", "Grammar"),  # what a structured output is compiled to: nothing to use by itself
    ("py:class", "trio_llm.core.engine_core.EngineCore"),  # only in the constructor of Engine, which open_engine calls
]


def _google_style(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Translate `Args:`, `Raises:` and the like.

    As the napoleon extension does, but not for attributes: of those it reads what
    stands before the first colon as their type.
    """
    if what not in ("attribute", "data", "property"):
        lines[:] = GoogleDocstring(list(lines), what=what, name=name, obj=obj, options=options).lines()


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", _google_style)
