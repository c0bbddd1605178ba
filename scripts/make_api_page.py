"""The page of the API, made from the docstrings of the package's names. make_reference.py writes it.

Reads source files alone, and imports none of them: torch takes seconds.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import salesrl_trl

ROOT = Path(__file__).resolve().parents[1]
SECTION = re.compile(r"(Args|Returns|Raises):")
ARGUMENT = re.compile(r"(\*{0,2}\w+)( \(.*\))?:")
TYPE = re.compile(r"`[^`]+`( or `[^`]+`)*:")
WIDTH = 100

Entry = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def names() -> dict[str, str]:
    """Each public name of the package and its module, in the order of the table in `salesrl_trl/__init__.py`."""
    return dict(salesrl_trl._MODULES)


def page() -> str:
    """The text of the page."""
    sections, index = list[str](), list[str]()
    for name, module in names().items():
        path = f"salesrl_trl/{module.replace('.', '/')}.py"
        entry = _entry(ROOT / path, name)
        sections += [f"## {name}", *_described(entry), f"Source: [{path}](../../{path})", *_members(entry)]
        index.append(f"- [`{name}`](#{name.lower()}): {_first_sentence(_docstring(entry))}")
    head = [
        "# API reference",
        "The names that `from salesrl_trl import ...` provides. Each is imported on first use.",
        "\n".join(index),
    ]
    return "\n\n".join([*head, *sections]) + "\n"


def _entry(path: Path, name: str) -> Entry:
    tree = ast.parse(path.read_text("utf-8"))
    *_, found = (node for node in tree.body if isinstance(node, Entry) and node.name == name)  # behind its overloads
    return found


def _first_sentence(text: str) -> str:
    return " ".join(re.split(r"(?<=\.)\s|\n\n|:\n", text)[0].split())


def _docstring(entry: Entry) -> str:
    text = ast.get_docstring(entry)
    if not text:
        raise ValueError(f"{entry.name} has no docstring")
    return text


def _described(entry: Entry) -> Iterator[str]:
    """The signature, and the docstring as Markdown."""
    lines = [f"@{ast.unparse(each)}" for each in entry.decorator_list]
    if isinstance(entry, ast.ClassDef):
        made = [each for each in entry.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
        bases = ", ".join(map(ast.unparse, entry.bases))
        lines += [f"class {entry.name}({bases})" if bases else f"class {entry.name}"]
        lines += [_signature(each, entry.name) for each in made]
    else:
        kind = "async def" if isinstance(entry, ast.AsyncFunctionDef) else "def"
        lines += [f"{kind} {_signature(entry, entry.name)}"]
    yield "\n".join(["```python", *lines, "```"])
    yield markdown(_docstring(entry))


def _signature(function: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> str:
    arguments = [each for each in _arguments(function.args) if each.split(":")[0] not in ("self", "cls")]
    returned = f" -> {ast.unparse(function.returns)}" if function.returns and name == function.name else ""
    text = f"{name}({', '.join(arguments)}){returned}"
    if len(text) <= WIDTH:
        return text
    return "\n".join([f"{name}(", *(f"    {each}," for each in arguments), f"){returned}"])


def _arguments(given: ast.arguments) -> Iterator[str]:
    plain = [*given.posonlyargs, *given.args]
    defaults = [*[None] * (len(plain) - len(given.defaults)), *given.defaults]
    yield from map(_argument, plain, defaults)
    if given.vararg or given.kwonlyargs:
        yield f"*{ast.unparse(given.vararg) if given.vararg else ''}"
    yield from map(_argument, given.kwonlyargs, given.kw_defaults)
    if given.kwarg:
        yield f"**{ast.unparse(given.kwarg)}"


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    return ast.unparse(argument) + (f" = {ast.unparse(default)}" if default else "")


def _members(entry: Entry) -> Iterator[str]:
    """The public fields and methods of a class that have a docstring of their own."""
    if not isinstance(entry, ast.ClassDef):
        return
    fields = list[str]()
    for node, after in zip(entry.body, [*entry.body[1:], None], strict=True):
        match node, after:
            case (
                (ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)])),
                ast.Expr(value=ast.Constant(value=str() as told)),
            ):
                kind = f"`{ast.unparse(node.annotation)}`" if isinstance(node, ast.AnnAssign) else ""
                default = f"defaults to `{ast.unparse(node.value)}`" if node.value else ""
                given = ", ".join(filter(None, (kind, default)))
                fields.append(f"- **{name}** ({given}): {_indented(told)}")
            case ast.FunctionDef(name=name), _ if _is_property(node) and _is_public(node):
                kind = f" (`{ast.unparse(node.returns)}`)" if node.returns else ""
                if told := ast.get_docstring(node):
                    fields.append(f"- **{name}**{kind}: {_indented(told)}")
    if fields:
        yield "**Fields:**"
        yield "\n".join(fields)
    for node in entry.body:
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if is_function and _is_public(node) and not _is_property(node) and ast.get_docstring(node):
            yield f"### {entry.name}.{node.name}"
            yield from _described(node)


def _is_public(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return not node.name.startswith("_") or node.name == "__call__"


def _is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(isinstance(each, ast.Name) and each.id == "property" for each in node.decorator_list)


def _indented(text: str) -> str:
    return textwrap.indent(inspect.cleandoc(text), "  ").strip()


def markdown(docstring: str) -> str:
    """A docstring with its sections `Args`, `Returns` and `Raises` as lists."""
    lines, section = list[str](), ""
    for line in docstring.splitlines():
        if heading := SECTION.fullmatch(line):
            section = heading[1]
            lines += [f"**{section}:**", ""]
        elif not section or not line.startswith("    "):
            section = section if line else ""
            lines.append(line)
        else:
            text = line.removeprefix("    ")
            begins = (ARGUMENT if section == "Args" else TYPE).match(text) or not lines[-1]
            text = ARGUMENT.sub(r"**\1**\2:", text, count=1) if section == "Args" and begins else text
            lines.append(f"- {text}" if begins else f"  {text.strip()}")
    return "\n".join(lines)
