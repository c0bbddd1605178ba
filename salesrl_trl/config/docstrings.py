"""The text of each setting: the docstring below its field. `--help`, messages and docs/API.md are made of it.

It is read from the source when somebody asks: `config.ranges` where a value is refused, `build.settings` for `--help`.
"""

import ast
import inspect
import textwrap


def texts_of(kind: type) -> dict[str, str]:
    """The texts of the fields that a class itself defines, on one line each."""
    [tree] = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(tree, ast.ClassDef)
    texts = {}
    for node, below in zip(tree.body, tree.body[1:], strict=False):
        match node, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str() as text)):
                texts[name] = " ".join(text.split())
    return texts
