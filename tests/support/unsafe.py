"""Calls that run what a file or a neighbour says, and sockets that the network reaches, found in source.

Owns what counts as such. tests/unit/test_security.py says where which of them is allowed.
"""

import ast
from collections.abc import Iterator

_UNPICKLES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "jsonpickle"}
_READS = {"load", "loads", "Unpickler", "open", "decode"}
_EVERY_INTERFACE = {"", "0.0.0.0", "::", "*"}
_LISTENS = {"bind", "create_server", "start_server", "TCPSite", "HTTPServer", "ThreadingHTTPServer", "run_app"}


def findings(source: str) -> Iterator[str]:
    """What is unsafe in a module, as `"<line>: <what>"`."""
    tree = ast.parse(source)
    names = _imported(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield from (f"{node.lineno}: {what}" for what in _of_call(node, names))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from (f"{node.lineno}: trust_remote_code by default" for _ in _trusting(node.args))
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any("trust_remote_code" in ast.unparse(each) for each in targets) and _is(node.value, True):
                yield f"{node.lineno}: trust_remote_code by default"


def _imported(tree: ast.AST) -> dict[str, str]:
    """What each name of an import stands for: `{"t": "torch", "loads": "pickle.loads"}`."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {each.asname or each.name.partition(".")[0]: each.asname and each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
    return {name: given or name for name, given in names.items()}


def _of_call(node: ast.Call, names: dict[str, str]) -> Iterator[str]:
    written = ast.unparse(node.func)
    first, dot, rest = written.partition(".")
    name = names.get(first, first) + dot + rest
    package, last = name.partition(".")[0], name.rpartition(".")[2]
    given = {each.arg: each.value for each in node.keywords}
    if name in ("eval", "exec", "builtins.eval", "builtins.exec", "os.system", "os.popen"):
        yield name
    if name == "torch.load" and not _is(given.get("weights_only"), True):
        yield "torch.load without weights_only=True"
    if package in _UNPICKLES and last in _READS:
        yield name
    if package in ("numpy", "pandas") and (last == "read_pickle" or _is(given.get("allow_pickle"), True)):
        yield f"{name} with pickle"
    if package == "yaml" and (last.startswith(("unsafe_", "full_")) or last in ("load", "load_all")):
        loader = given.get("Loader", node.args[1] if len(node.args) > 1 else None)
        # `getattr(yaml, "CSafeLoader", yaml.SafeLoader)` names two, both of them safe
        said = [] if loader is None else [each for each in _words(loader) if each.endswith("Loader")]
        if last.startswith(("unsafe_", "full_")) or not said or not all(each.endswith("SafeLoader") for each in said):
            yield f"{name} without SafeLoader"
    if "shell" in given and not _is(given["shell"], False):
        yield f"{name} with a shell"
    if _is(given.get("trust_remote_code"), True):
        yield f"{name} with trust_remote_code"
    if last in _LISTENS or package == "uvicorn":
        hosts = [*node.args, *(value for word, value in given.items() if word == "host")]
        hosts += [each for host in hosts if isinstance(host, ast.Tuple) for each in host.elts]
        if any(isinstance(host, ast.Constant) and host.value in _EVERY_INTERFACE for host in hosts):
            yield f"{name} on every interface"
    if last == "add_argument" and "--host" in [each.value for each in node.args if isinstance(each, ast.Constant)]:
        match given.get("default"):
            case ast.Constant(value="127.0.0.1"):
                pass
            case _:
                yield "--host without the loopback as its default"


def _words(node: ast.expr) -> Iterator[str]:
    for each in ast.walk(node):
        if isinstance(each, ast.Attribute):
            yield each.attr
        elif isinstance(each, ast.Name):
            yield each.id
        elif isinstance(each, ast.Constant):
            yield str(each.value)


def _trusting(arguments: ast.arguments) -> Iterator[ast.arg]:
    by_place = [*arguments.posonlyargs, *arguments.args]
    defaults = [*zip(by_place[::-1], arguments.defaults[::-1], strict=False)]
    defaults += zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    yield from (each for each, default in defaults if each.arg == "trust_remote_code" and _is(default, True))


def _is(node: ast.expr | None, value: bool) -> bool:
    return isinstance(node, ast.Constant) and node.value is value
