"""Figures of the package's layout, for this checkout or another one.

    python tests/support/house.py
    python tests/support/house.py --root PATH

Owns what counts as touching the trainer: tests/unit/test_layering.py refuses with the same functions what is only
counted here. Reads files alone: the standard library, and no import of the package.
"""

import argparse
import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "salesrl_trl"
MOST_METHODS = 15
MOST_LINES = 400
TRAINER_NAMES = {"trainer", "_trainer"}


@dataclass(frozen=True)
class Change:
    """A change that people want to make, and the files of the package that it edits."""

    what: str
    files: tuple[str, ...] = ()
    setting: str | None = None
    """Names a text file or a class outside of the package. With it, no file of the package is edited."""


CHANGES = (
    Change("a third branch", setting="branches"),
    Change("a rubric", setting="rubric_dir"),
    Change("a KL law", ("kl/law.py",), "kl_law"),
    Change("a figure on TensorBoard", ("names.py", "reward/figures.py")),
    Change("a stage of the reward", ("names.py", "reward/chain.py"), "reward_stages"),
    Change("another generation engine", ("generation/sampler.py",), "sampler"),
    Change("a figure of a quick evaluation", ("evaluation/figures.py",), "quick_eval_figures"),
    Change("a dataset in a format of its own", ("data/formats/__init__.py",), "dataset_format"),
)


def modules(root: Path = ROOT) -> dict[str, ast.Module]:
    """The package's modules by their path in the package."""
    package = root / PACKAGE
    paths = sorted(package.rglob("*.py"))
    return {str(path.relative_to(package)): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


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
    for node in ast.walk(tree):
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
        for node in ast.walk(tree)
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
    for node in ast.walk(tree):
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


def figures(root: Path) -> Iterator[str]:
    """The figures, a line each."""
    trees = modules(root)
    lines = {
        path: len((root / PACKAGE / path).read_text(encoding="utf-8").splitlines())
        for path in trees
    }  # fmt: skip
    total = sum(lines.values())
    at_root = [path for path in trees if "/" not in path and path != "__init__.py"]
    yield f"package: {len(trees)} modules, {total} lines"
    yield f"modules at the root: {len(at_root)}"
    yield f"lines of trainer.py: {lines['trainer.py']}"
    by_module = {path: members_of_trainer(tree) for path, tree in trees.items() if path != "trainer.py"}
    used: set[str] = set().union(*by_module.values())
    yield f"members of the trainer used outside of it: {len(used)}, of which private: {len(private(used))}"
    for path, members in by_module.items():
        if members:
            yield f"  {path}: {len(members)}, private: {len(private(members))}"
    yield f"trainers of type Any: {sum(len(untyped_trainers(tree)) for tree in trees.values())}"
    anys = sum(isinstance(node, ast.Name) and node.id == "Any" for tree in trees.values() for node in ast.walk(tree))
    yield f"Any: {anys}, per 1,000 lines: {1000 * anys / total:.1f}"
    large = [f"{path} {count}" for path, count in lines.items() if count > MOST_LINES]
    yield f"modules over {MOST_LINES} lines: {', '.join(large) or 'none'}"
    classes = [
        f"{node.name} {methods}"
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        and (methods := sum(isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) for each in node.body))
        > MOST_METHODS
    ]
    yield f"classes with more than {MOST_METHODS} methods: {', '.join(classes) or 'none'}"
    yield "files that a change edits in the package, and the setting that does it from outside of the package:"
    known = settings(trees)
    for change in CHANGES:
        files = [file if file in trees else f"{file} (not here)" for file in change.files]
        setting = change.setting or "-"
        missing = "" if change.setting is None or change.setting in known else " (not here)"
        yield f"  {change.what}: {len(files)} ({', '.join(files) or '-'}); setting: {setting}{missing}"


def settings(trees: dict[str, ast.Module]) -> set[str]:
    """Names of all settings: annotated attributes of classes in `config/`."""
    return {name for path, tree in trees.items() if path.startswith("config/") for name, annotation in declared(tree)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Figures of the package's layout.")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout; default: this one")
    print(*figures(parser.parse_args().root), sep="\n")
