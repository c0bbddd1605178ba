"""Figures of the package's layout, for this checkout or another one.

    python tests/support/house.py
    python tests/support/house.py --root PATH

Owns what counts as touching the trainer, and what has a bar: tests/unit/test_layering.py and test_house.py refuse with
the same functions what is only counted here. Reads files alone: the standard library, and no import of the package.
"""

import argparse
import ast
import functools
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "salesrl_trl"
MOST_METHODS = 15
TRAINER_NAMES = {"trainer", "_trainer"}


FOUR_FILES = ("rollout/pipeline.py", "wiring/components.py", "wiring/trl_access.py", "generation/vllm.py")
"""Through these four each new capability went: the heart, which is to stay small."""
CORE = "salesrl_trl.trainer"
"""What a user of the library imports."""
OF_THE_TRAINER = ("trainer.py", "wiring/trl_access.py", "wiring/trl_generation.py")
"""The trainer and its adapter, through which components use TRL: they alone use its private members."""
LAYERS = ("agents", "judged", "record", "launch", "demo")
"""Folders that the core does not import."""


@functools.cache
def modules(root: Path = ROOT) -> dict[str, ast.Module]:
    """The package's modules by their path in the package, as they were when first asked for."""
    package = root / PACKAGE
    paths = sorted(package.rglob("*.py"))
    return {str(path.relative_to(package)): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


@functools.cache
def nodes(tree: ast.AST) -> list[ast.AST]:
    """All nodes of a tree."""
    return [*ast.walk(tree)]


def is_any(annotation: ast.expr | None) -> bool:
    """Whether `Any` stands in an annotation by itself or in a union: `Any`, `typing.Any | None`, `"Any"`."""
    match annotation:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name == "Any"
        case ast.Constant(value=str() as text):
            return is_any(ast.parse(text, mode="eval").body)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return is_any(left) or is_any(right)
        case ast.Subscript(value=ast.Name(id="Optional"), slice=inner):
            return is_any(inner)
    return False


def declared(tree: ast.AST) -> Iterator[tuple[str, ast.expr | None]]:
    """Each parameter and each annotated variable or attribute of a module: its name and its annotation."""
    for node in nodes(tree):
        match node:
            case ast.arg(arg=name, annotation=annotation):
                yield name, annotation
            case ast.AnnAssign(target=ast.Name(id=name) | ast.Attribute(attr=name), annotation=annotation):
                yield name, annotation


def untyped_trainers(tree: ast.AST) -> list[str]:
    """Names that stand for a trainer and say no type: the circle of imports that imports do not show."""
    return [name for name, annotation in declared(tree) if "trainer" in name.lower() and is_any(annotation)]


def members_of_trainer(tree: ast.AST) -> set[str]:
    """Members of a trainer that a module uses: `trainer.x`, `self._trainer.x`, `getattr(trainer, "x")`.

    A trainer is what is called `trainer` or `_trainer`, and what is annotated with a class whose name ends in
    `Trainer`.
    """
    names = TRAINER_NAMES | {
        name for name, annotation in declared(tree) if annotation and _is_class_of_trainer(annotation)
    }
    imported = {
        alias.asname or alias.name.partition(".")[0]
        for node in nodes(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }

    def is_trainer(node: ast.expr) -> bool:
        match node:
            case ast.Name(id=name):
                return name in names
            case ast.Attribute(value=ast.Name(id=owner), attr=name):
                return name in names and owner not in imported  # `trl.trainer` is a module
            case ast.Attribute(attr=name):
                return name in names
        return False

    found = set()
    for node in nodes(tree):
        match node:
            case ast.Attribute(value=value, attr=member) if is_trainer(value):
                found.add(member)
            case ast.Call(args=[value, ast.Constant(value=str() as member), *_]) if is_trainer(value):
                found.add(member)
    return found


def _is_class_of_trainer(annotation: ast.expr) -> bool:
    parts = [node for node in ast.walk(annotation) if isinstance(node, ast.Name | ast.Constant)]
    return any(str(part.id if isinstance(part, ast.Name) else part.value).endswith("Trainer") for part in parts)


def private(members: set[str]) -> set[str]:
    """Those with a leading underscore, without Python's own such as `__class__`."""
    return {member for member in members if member.startswith("_") and not member.startswith("__")}


@functools.cache
def imports(root: Path = ROOT, *, for_types: bool = True) -> dict[str, set[str]]:
    """Each module and the modules of the package that it imports, inside functions too, and under `TYPE_CHECKING`
    unless `for_types` is false.

    A name at the door is no module: `__init__.py` imports it when it is first asked for.
    """
    trees = {_dotted(path): tree for path, tree in modules(root).items()}
    edges = {}
    for module, tree in trees.items():
        walked = [node for node in nodes(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
        if not for_types:
            skipped = [each for node in nodes(tree) if _is_for_types(node) for each in nodes(node)]
            walked = [node for node in walked if node not in skipped]
        names = {alias.name for node in walked if isinstance(node, ast.Import) for alias in node.names}
        for node in walked:
            if isinstance(node, ast.ImportFrom) and node.module:
                members = {f"{node.module}.{alias.name}" for alias in node.names}
                names |= (members & trees.keys()) or {node.module}
        edges[module] = (names & trees.keys()) - {module, PACKAGE}
    return edges


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def closure(root: Path = ROOT, module: str = CORE) -> set[str]:
    """The module and all that it reaches by imports, other than those for types alone. The package's own door counts:
    Python runs it first."""
    return {PACKAGE, module, *_reached(module, imports(root, for_types=False))}


def calls(trees: dict[str, ast.Module], *names: str) -> list[ast.Call]:
    """Calls of functions by these names."""
    return [
        node
        for tree in trees.values()
        for node in nodes(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) in names
    ]


def indirections(trees: dict[str, ast.Module]) -> int:
    """Lambdas, calls of `partial`, and uses of `Callable`."""
    found = [node for tree in trees.values() for node in nodes(tree) if isinstance(node, ast.Lambda | ast.Name)]
    own = sum(isinstance(node, ast.Lambda) or node.id == "Callable" for node in found)
    return own + len(calls(trees, "partial"))


def _dotted(path: str) -> str:
    return ".".join((PACKAGE, *Path(path).with_suffix("").parts)).removesuffix(".__init__")


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other, directly or by way of others."""
    reached = {module: _reached(module, edges) for module in edges}
    groups = {
        frozenset(other for other in reached[module] if module in reached[other])
        for module in edges
        if module in reached[module]
    }
    return sorted(sorted(group) for group in groups)


def layered(edges: dict[str, set[str]], layers: Iterable[str]) -> list[tuple[str, str]]:
    """Imports of the core that lead into a layer: the importing module, and the imported one. The package's door loads
    what a user names, and `__main__` is the command line's."""
    inside = tuple(f"{PACKAGE}.{layer}." for layer in layers)
    of_core = (module for module in edges if not f"{module}.".startswith(inside))
    doors = {PACKAGE, f"{PACKAGE}.__main__"}
    return sorted(
        (m, other) for m in of_core if m not in doors for other in edges[m] if f"{other}.".startswith(inside)
    )


def of_settings(path: str) -> bool:
    """Whether a module holds settings of a run: in `config/`, or those of the launch."""
    return path.startswith("config/") or re.fullmatch(r"launch/\w+_config\.py", path) is not None


def _reached(module: str, edges: dict[str, set[str]]) -> set[str]:
    reached: set[str] = set()
    waiting = list(edges[module])
    while waiting:
        if (name := waiting.pop()) not in reached:
            reached.add(name)
            waiting += edges[name]
    return reached


def given_twice(names: Iterable[str]) -> list[str]:
    """The names that stand there more than once."""
    return sorted(name for name, count in Counter(names).items() if count > 1)


def class_names(trees: dict[str, ast.Module]) -> list[str]:
    """Names of all classes at the top of a module."""
    return [node.name for tree in trees.values() for node in tree.body if isinstance(node, ast.ClassDef)]


def file_names(trees: dict[str, ast.Module]) -> list[str]:
    """Names of all modules' files, without `__init__` and `__main__`, which every package may have."""
    return [name for path in trees if not (name := Path(path).name).startswith("__")]


def code_lines(tree: ast.Module, text: str) -> int:
    """Lines that hold code: neither blank, nor a comment, nor part of a docstring."""
    docstrings: set[int] = set()
    for node in nodes(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate(text.splitlines(), 1)
    return sum(bool(line := raw.strip()) and line[0] != "#" and number not in docstrings for number, raw in lines)


def settings(trees: dict[str, ast.Module]) -> dict[str, object]:
    """The package's own settings of a run, each with its default: fields of the classes in `config/` and in `launch/`
    whose name ends in `Config`. A judge's provider has settings of its own inside one of them.

    A default that is no plain value is its source.
    """
    constants = {
        target.id: node.value
        for tree in trees.values()
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    return {
        field.target.id: _value(field.value, constants)
        for path, tree in trees.items()
        if of_settings(path)
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name.endswith("Config") and node.name != "JudgeProviderConfig"
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }


def _value(node: ast.expr | None, constants: dict[str, ast.expr]) -> object:
    match node:
        case None:
            return None
        case ast.Name(id=name) if name in constants:
            return _value(constants[name], {})
        case ast.Call(keywords=[ast.keyword(arg="default_factory", value=ast.Name(id="list" | "dict" as kind))]):
            return [] if kind == "list" else {}
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)


def values_of_recipes(root: Path) -> dict[str, list[object]]:
    """The settings of recipes and presets, each with its values there. Those of `small_policy` and `sales_chain`
    count."""
    files = {
        file.resolve()
        for folder in (root / PACKAGE, root / "recipes")
        for kind in ("recipes/*.yaml", "presets/*.yaml", "*.yaml")
        for file in folder.rglob(kind)
        if {"recipes", "presets"} & {*file.parts}
    }
    values: dict[str, list[object]] = {}
    for file in sorted(files):
        recipe = yaml.safe_load(file.read_text(encoding="utf-8"))
        for part in (recipe, recipe.get("small_policy") or {}, recipe.get("sales_chain") or {}):
            for name, value in part.items():
                values.setdefault(name, []).append(value)
    return values


def turned(root: Path = ROOT) -> set[str]:
    """Own settings to which a recipe or a preset gives another value than the default."""
    values = values_of_recipes(root)
    return {
        name
        for name, default in settings(modules(root)).items()
        if any(value != default for value in values.get(name, ()))
    }


def line_counts(root: Path = ROOT) -> dict[str, int]:
    """Lines of the package's modules, by path."""
    return {path: len((root / PACKAGE / path).read_text(encoding="utf-8").splitlines()) for path in modules(root)}


def measured(root: Path = ROOT) -> dict[str, tuple[float, str]]:
    """What has a bar, by name: a figure, and what it is of."""
    trees, lines, edges = modules(root), line_counts(root), imports(root)
    reached, total = closure(root), sum(lines.values())
    widest, longest = max(edges, key=lambda module: len(edges[module])), max(lines, key=lambda path: lines[path])
    computed = computed_names(trees)
    anys = sum(isinstance(node, ast.Name) and node.id == "Any" for tree in trees.values() for node in nodes(tree))
    code = sum(code_lines(tree, (root / PACKAGE / path).read_text(encoding="utf-8")) for path, tree in trees.items())
    large = large_classes(trees)
    return {
        "lines that the trainer's import reaches": (sum(n for p, n in lines.items() if _dotted(p) in reached), CORE),
        "layers that it reaches": (len(layered({module: edges[module] for module in reached}, LAYERS)), CORE),
        "imports from the core into a layer": (len(layered(edges, LAYERS)), ""),
        "fan-out": (len(edges[widest]), widest),
        "lines of the package": (total, ""),
        "lines of code": (code, ""),
        "modules": (len(trees), ""),
        "lines of the largest module": (lines[longest], longest),
        "lines of the four files": (sum(lines.get(path, 0) for path in FOUR_FILES), ", ".join(FOUR_FILES)),
        "`patched` and `setattr`": (len(calls(trees, "patched", "setattr")), ""),
        "`setattr` by a computed name": (len(computed), ", ".join(computed)),
        "lambda, partial and Callable in 1,000 lines": (1000 * indirections(trees) / total, ""),
        "Any in 1,000 lines": (1000 * anys / total, ""),
        "circles of imports": (len(circles(edges)), ""),
        f"classes with more than {MOST_METHODS} methods": (len(large), ", ".join(large)),
    }


def computed_names(trees: dict[str, ast.Module]) -> list[str]:
    """Modules that set an attribute whose name is computed, once for each place."""
    return [
        path
        for path, tree in trees.items()
        for call in calls({path: tree}, "setattr")
        if len(call.args) > 1 and not isinstance(call.args[1], ast.Constant)
    ]


def figures(root: Path) -> Iterator[tuple[str, str]]:
    """The figures, each with its name."""
    trees = modules(root)
    for name, (value, of) in measured(root).items():
        yield name, (f"{value:,}" if isinstance(value, int) else f"{value:.1f}") + f" ({of})" * bool(of)
    at_root = [path for path in trees if "/" not in path and not path.startswith("__")]
    yield "modules at the root, beside __init__ and __main__", f"{len(at_root)}"
    yield "class names given twice", _listed(given_twice(class_names(trees)))
    yield "file names given twice", _listed(given_twice(file_names(trees)))
    own, of_recipes = settings(trees), turned(root)
    yield "settings", f"{len(own)}"
    yield "settings with another value than their default in a recipe or preset", f"{len(of_recipes)}"
    yield "the other settings", _listed(sorted(own.keys() - of_recipes))
    by_module = {path: members_of_trainer(tree) for path, tree in trees.items() if path not in OF_THE_TRAINER}
    used: set[str] = set().union(*by_module.values())
    yield "members of the trainer used outside of it; private", f"{len(used)}; {len(private(used))}"
    paths = (root / "tests").rglob("*.py")
    tests = {str(path.relative_to(root)): len(path.read_text().splitlines()) for path in paths}
    longest = max(tests, key=lambda name: tests[name])
    yield "lines of tests; largest module", f"{sum(tests.values()):,}; {tests[longest]} ({longest})"


def large_classes(trees: dict[str, ast.Module]) -> list[str]:
    """Classes with more than `MOST_METHODS` methods, each with its number."""
    classes = [node for tree in trees.values() for node in nodes(tree) if isinstance(node, ast.ClassDef)]
    methods = {
        node.name: sum(isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) for part in node.body)
        for node in classes
    }
    return [f"{name} {count}" for name, count in methods.items() if count > MOST_METHODS]


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    return f"{len(names)} ({', '.join(names)})" if names else "0"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Figures of the package's layout.")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout; default: this one")
    for name, figure in figures(parser.parse_args().root.resolve()):
        print(f"{name}: {figure}")
