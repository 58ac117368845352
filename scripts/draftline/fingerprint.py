"""Fingerprint of the code behind a command: syntax trees without comments and docstrings, of the modules it imports.

Reformatting, comments, docstrings and touching a file change nothing; an edit to a statement changes the fingerprint of
exactly those commands whose imports reach it. Modules that cannot change an artifact's content are outside.
"""

import ast
import functools
import hashlib
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent.parent
OUTSIDE = frozenset(
    f"draftline.{name}"
    for name in (
        "activity",
        "cli",
        "engines.client",
        "errors",
        "fingerprint",
        "gpus",
        "preflight",
        "processes",
        "progress",
        "server",
        "settings",
        "slurm",
        "staging",
        "staleness",
        "table",
        "writing",
    )
)
TEXTS = (".j2", ".css")
"""Templates of a package count as its code."""


def fingerprint(command: str) -> str:
    """16 hex digits for the code that `scripts/{command}.py` runs. The script itself is plumbing and outside."""
    seen: dict[str, str] = {}
    queue = sorted(_imports(ast.parse((SCRIPTS / f"{command}.py").read_text(encoding="utf-8")), package=""))
    while queue:
        name = queue.pop()
        if name in seen or name in OUTSIDE:
            continue
        path = _source(name)
        if path is None:
            continue
        seen[name], imports = _module(path, path.stat().st_mtime_ns, path.stat().st_size)
        if path.name == "__init__.py":
            texts = sorted(text for text in path.parent.iterdir() if text.suffix in TEXTS)
            seen |= {f"{name}/{text.name}": hashlib.sha256(text.read_bytes()).hexdigest() for text in texts}
        queue.extend(imports)
    lines = "\n".join(f"{name} {digest}" for name, digest in sorted(seen.items()))
    return hashlib.sha256(lines.encode()).hexdigest()[:16]


def _source(module: str) -> Path | None:
    """File of a module of ours; None for a name inside a module (``from draftline.x import name``)."""
    path = SCRIPTS.joinpath(*module.split("."))
    for candidate in (path / "__init__.py", path.with_suffix(".py")):
        if candidate.exists():
            return candidate
    return None


@functools.cache
def _module(path: Path, mtime_ns: int, size: int) -> tuple[str, tuple[str, ...]]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imports = _imports(tree, package=".".join(path.relative_to(SCRIPTS).parts[:-1]))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            _drop_docstring(node)
    return hashlib.sha256(_canonical(tree).encode()).hexdigest(), tuple(sorted(imports))


def _canonical(node: object) -> str:
    """A syntax tree as text, the same for every version of Python: fields that are empty may be new or left out in another."""
    if isinstance(node, ast.AST):
        fields = ((name, value) for name, value in ast.iter_fields(node) if value is not None and value != [])
        return f"{type(node).__name__}({', '.join(f'{name}={_canonical(value)}' for name, value in fields)})"
    if isinstance(node, list):
        return f"[{', '.join(map(_canonical, node))}]"
    return repr(node)


def _drop_docstring(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> None:
    first = node.body[0] if node.body else None
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        node.body = node.body[1:]


def _imports(tree: ast.Module, package: str) -> set[str]:
    """Names of ours that a module imports, wherever the import stands (type-checking blocks included)."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names if alias.name.split(".")[0] == "draftline")
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join(filter(None, [*package.split(".")[: len(package.split(".")) - node.level + 1], base]))
            if base.split(".")[0] == "draftline":
                found.add(base)
                found.update(f"{base}.{alias.name}" for alias in node.names)
    return found
