"""Names that the installed vLLM knows: arguments of its engine, backends of its attention, environment variables.

Owns how they are read: from vLLM's source, because its import takes seconds. Where that has another form, a list is
empty, and nothing is compared with it. Refuses to judge: `preflight.environment` does.
"""

import ast
import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path


def engine_arguments() -> frozenset[str]:
    """The arguments of `vllm.LLM`."""
    fields = _class("engine/arg_utils.py", "EngineArgs")
    named = {
        each.target.id for each in fields if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    for each in _class("entrypoints/llm.py", "LLM"):
        if named and isinstance(each, ast.FunctionDef) and each.name == "__init__":
            named |= {argument.arg for argument in (*each.args.args, *each.args.kwonlyargs)} - {"self"}
    return frozenset(named)


def attention_backends() -> tuple[str, ...]:
    """The names of vLLM's `AttentionBackendEnum`, in its order."""
    members = _class("v1/attention/backends/registry.py", "AttentionBackendEnum")
    targets = (each.targets[0] for each in members if isinstance(each, ast.Assign))
    return tuple(target.id for target in targets if isinstance(target, ast.Name))


def environment_variables() -> frozenset[str]:
    """The variables `VLLM_...` that vLLM reads."""
    texts = (each.value for each in ast.walk(_module("envs.py")) if isinstance(each, ast.Constant))
    return frozenset(each for each in texts if isinstance(each, str) and each.startswith("VLLM_"))


def _class(place: str, name: str) -> Iterator[ast.stmt]:
    for each in _module(place).body:
        if isinstance(each, ast.ClassDef) and each.name == name:
            yield from each.body


def _module(place: str) -> ast.Module:
    with contextlib.suppress(OSError, SyntaxError, ValueError):
        spec = importlib.util.find_spec("vllm")
        if spec is not None and spec.origin is not None:
            return ast.parse((Path(spec.origin).parent / place).read_text(encoding="utf-8"))
    return ast.Module([], [])
