"""What the docstrings under a class's attributes say: help texts are kept where the attributes are."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap


@functools.cache
def attribute_docstrings(owner: type) -> dict[str, str]:
    """The docstrings of a class's own attributes, those that have one, each as one line.

    They are read from the source, since Python keeps none of them.
    """
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
    assert isinstance(definition, ast.ClassDef)
    texts: dict[str, str] = {}
    name = ""
    for statement in definition.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            name = statement.target.id
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant) and name:
            texts[name] = " ".join(str(statement.value.value).split())
            name = ""
    return texts
