"""Who may import whom, and the few other rules of shape that the packages keep.

Every rule reads the syntax trees of the packages, imports inside functions and under TYPE_CHECKING included.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from support.paths import ROOT

PACKAGES = ("scheduler", "wire", "checkpoint", "main_node", "shadow_node", "worker_node", "odmoe")
NODES = ("main_node", "shadow_node", "worker_node")
MAX_LINES = 500
"""A longer file has more than one idea in it; most have below 200 lines."""
MAX_INIT_LINES = 3
MAX_PARAMETERS = 7
LISTS_NAMES = (ROOT / "odmoe" / "__init__.py",)
"""What users import has to be named somewhere, for them and for their type checkers. It costs nothing all the same:
each name is imported when it is first used, as tests/odmoe/api/test_public_names.py shows."""

# Beside the standard library and the package itself. A dotted name allows that module and what is below it.
SCHEDULER_TYPES = (
    "scheduler.errors",
    "scheduler.types",
    "scheduler.held",
    "scheduler.limits",
    "scheduler.model_limits",
)
NODE_IMPORTS = ("torch", "transformers", "bitsandbytes", "wire", "scheduler", "checkpoint")
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "scheduler": ("yaml", "msgpack", "numpy"),
    "wire": ("grpc", "google.protobuf", "xxhash", "scheduler.trace", *SCHEDULER_TYPES),
    "checkpoint": (
        "torch",
        "transformers",
        "safetensors",
        "huggingface_hub",
        "xxhash",
        "hqq",
        "bitsandbytes",
        "compressed_tensors",
        "gguf",
        "numpy",
        "greenlet",
        "llvmlite",
        "numba",
        *SCHEDULER_TYPES,
    ),
    "main_node": NODE_IMPORTS,
    "shadow_node": NODE_IMPORTS,
    "worker_node": NODE_IMPORTS,
}

each_package = pytest.mark.parametrize("package", PACKAGES)


def sources(package: str) -> list[Path]:
    found = sorted((ROOT / package).rglob("*.py"))
    assert ROOT / package / "__init__.py" in found, f"{package}/__init__.py is missing: is the package gone or renamed?"
    return found


def written(package: str) -> list[Path]:
    """What people wrote: the sources less the generated stubs."""
    return [path for path in sources(package) if not path.stem.endswith(("_pb2", "_pb2_grpc"))]


@cache
def nodes(path: Path) -> list[ast.AST]:
    """All nodes of a file's syntax tree."""
    return list(ast.walk(tree(path)))


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def at(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def imports_of(path: Path) -> list[tuple[int, str]]:
    """(line, dotted name) of each import; `from a import b` is `a.b`, whether b is a module or not."""
    return _imports_of(path, ROOT)


@cache
def _imports_of(path: Path, root: Path) -> list[tuple[int, str]]:
    return list(found_imports(path, root))


def found_imports(path: Path, root: Path) -> Iterator[tuple[int, str]]:
    home = path.relative_to(root).parent.parts
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = home[: len(home) - node.level + 1] if node.level else ()
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args:
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            first = node.args[0]
            if name in ("import_module", "__import__") and isinstance(first, ast.Constant):
                yield node.lineno, str(first.value)


def within(name: str, roots: tuple[str, ...]) -> bool:
    return any(name == root or name.startswith(f"{root}.") for root in roots)


def report(rule: str, offences: list[str]) -> None:
    assert not offences, "\n".join([rule, *(f"  {offence}" for offence in offences)])


def test_imports_are_read_in_every_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pkg" / "sub").mkdir(parents=True)
    path = tmp_path / "pkg" / "sub" / "m.py"
    path.write_text(
        "import a.b as c, d\nfrom e.f import g\nfrom . import h\nfrom ..i import j\n"
        "def late():\n    import k\n    importlib.import_module('l.m')\n    __import__('n')\n"
    )
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    names = {name for _, name in imports_of(path)}
    assert names == {"a.b", "d", "e.f.g", "pkg.sub.h", "pkg.i.j", "k", "l.m", "n"}
    assert within("scheduler.errors.LinkError", SCHEDULER_TYPES)
    assert not within("scheduler.errors_too", SCHEDULER_TYPES)
    assert not within("scheduler", SCHEDULER_TYPES)


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_only_what_the_table_allows(package: str) -> None:
    allowed = (package, *MAY_IMPORT[package])
    offences = [
        f"{at(path, line)} imports {name}"
        for path in sources(package)
        for line, name in imports_of(path)
        if name.partition(".")[0] not in sys.stdlib_module_names and not within(name, allowed)
    ]
    report(f"{package} may import the standard library, itself, {', '.join(MAY_IMPORT[package])}:", offences)


@pytest.mark.parametrize("package", NODES)
def test_nodes_do_not_import_each_other(package: str) -> None:
    others = tuple(node for node in NODES if node != package)
    offences = [
        f"{at(path, line)} imports {name}"
        for path in sources(package)
        for line, name in imports_of(path)
        if within(name, others)
    ]
    report(f"{package} speaks to {' and '.join(others)} through wire only:", offences)


@each_package
def test_only_on_ray_imports_ray(package: str) -> None:
    offences = [
        f"{at(path, line)} imports {name}"
        for path in sources(package)
        for line, name in imports_of(path)
        if within(name, ("ray",)) and ROOT / "odmoe" / "on_ray" not in path.parents
    ]
    report("ray may be imported in odmoe/on_ray/ and nowhere else:", offences)


@each_package
def test_nothing_imports_scripts_or_tests(package: str) -> None:
    offences = [
        f"{at(path, line)} imports {name}"
        for path in sources(package)
        for line, name in imports_of(path)
        if within(name, ("scripts", "tests"))
    ]
    report("scripts and tests may import any package; no package may import them:", offences)


@each_package
def test_no_bare_except(package: str) -> None:
    offences = [
        f"{at(path, node.lineno)} catches everything"
        for path in written(package)
        for node in nodes(path)
        if isinstance(node, ast.ExceptHandler) and node.type is None
    ]
    report("an `except` must name what it catches:", offences)


@each_package
def test_no_assert_statements(package: str) -> None:
    offences = [
        f"{at(path, node.lineno)} asserts"
        for path in written(package)
        for node in nodes(path)
        if isinstance(node, ast.Assert)
    ]
    report("raise an error of scheduler/errors.py in place of `assert`, which `python -O` drops:", offences)


def test_no_circles_of_imports() -> None:
    """Imports in functions and under TYPE_CHECKING count: what needs them to hide is a circle all the same."""
    modules = {module_of(path): path for package in PACKAGES for path in sources(package)}
    graph = {name: imported(path, modules) - {name} for name, path in modules.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"these modules import each other in a circle: {' <- '.join(error.args[1])}")


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: Path, modules: Collection[str]) -> set[str]:
    """Of `modules`, those that a file imports; `from a import b` imports a.b where that is a module, else a."""
    found = set()
    for _, name in imports_of(path):
        known = next((n for n in (name, name.rpartition(".")[0]) if n in modules), None)
        if known is not None:
            found.add(known)
    return found


def test_a_circle_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pkg").mkdir()
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    texts = {"a": "from pkg import b", "b": "def late():\n    from pkg.c import thing", "c": "import pkg.a"}
    for name, text in texts.items():
        (tmp_path / "pkg" / f"{name}.py").write_text(text)
    modules = {module_of(path): path for path in sorted((tmp_path / "pkg").glob("*.py"))}
    graph = {name: imported(path, modules) for name, path in modules.items()}
    assert graph == {"pkg.a": {"pkg.b"}, "pkg.b": {"pkg.c"}, "pkg.c": {"pkg.a"}}
    with pytest.raises(CycleError):
        TopologicalSorter(graph).prepare()


def folders_imported(files: Mapping[str, Path]) -> dict[Path, set[Path]]:
    """Of each folder those that it imports, less those within it and those around it. `files`: by module."""
    found: dict[Path, set[Path]] = {}
    for name, path in files.items():
        others = {files[other].parent for other in imported(path, files) - {name}}
        found.setdefault(path.parent, set()).update(other for other in others if is_apart(other, path.parent))
    return found


def is_apart(here: Path, there: Path) -> bool:
    return here != there and here not in there.parents and there not in here.parents


def test_no_folders_import_each_other_in_a_circle() -> None:
    """A folder is one idea. One within another is a part of it, and the two may know each other."""
    files = {module_of(path): path for package in (*PACKAGES, "scripts") for path in (ROOT / package).rglob("*.py")}
    try:
        TopologicalSorter(folders_imported(files)).prepare()
    except CycleError as error:
        circle = " <- ".join(str(folder.relative_to(ROOT)) for folder in error.args[1])
        pytest.fail(f"what these folders share belongs into one of them, or above all: {circle}")


def test_a_circle_of_folders_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {"a/b/x": "from a.c import y", "a/c/y": "import a.d.z", "a/d/z": "", "a/d/v": "import a.b.w"}
    texts |= {"a/b/w": "import a.top", "a/top": "import a.b.x"}
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    found = folders_imported({module_of(path): path for path in sorted(tmp_path.rglob("*.py"))})
    b, c, d = (tmp_path / "a" / name for name in "bcd")
    assert found == {b: {c}, c: {d}, d: {b}, tmp_path / "a": set()}
    with pytest.raises(CycleError):
        TopologicalSorter(found).prepare()


@each_package
def test_constructors_take_few_parameters(package: str) -> None:
    offences = [
        f"{at(path, method.lineno)} takes {count}"
        for path in written(package)
        for node in nodes(path)
        if isinstance(node, ast.ClassDef)
        for method in node.body
        if isinstance(method, ast.FunctionDef)
        and method.name == "__init__"
        and (count := len(method.args.posonlyargs + method.args.args + method.args.kwonlyargs) - 1) > MAX_PARAMETERS
    ]
    report(f"a constructor has at most {MAX_PARAMETERS} parameters; those that belong together make a type:", offences)


def too_long(paths: list[Path], limit: int) -> list[str]:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in paths}
    return [f"{at(path, limit + 1)} goes past the limit, to line {n}" for path, n in lengths.items() if n > limit]


PROBE = ROOT / "odmoe" / "machines" / "probe.py"
"""Sent to a host as one text, before anything of ours is there: it cannot be split."""


@each_package
def test_files_are_short(package: str) -> None:
    offences = too_long([path for path in written(package) if path != PROBE], MAX_LINES)
    report(f"a file has one idea; with more than {MAX_LINES} lines it has several, so split it by them:", offences)


@each_package
def test_init_files_are_nearly_empty(package: str) -> None:
    inits = [path for path in sources(package) if path.name == "__init__.py" and path not in LISTS_NAMES]
    offences = too_long(inits, MAX_INIT_LINES)
    report(f"an __init__.py may have {MAX_INIT_LINES} lines, so that importing a package costs nothing:", offences)


@pytest.mark.parametrize("folder", ["tests", "proto"])
def test_no_init_file_where_it_would_shadow_a_package(folder: str) -> None:
    offences = [at(path, 1) for path in sorted((ROOT / folder).rglob("__init__.py"))]
    report(f"{folder} is not a package, it may have no __init__.py at any depth:", offences)


def test_scheduler_imports_without_torch_ray_or_grpc() -> None:
    parts = [path.relative_to(ROOT).with_suffix("").parts for path in sources("scheduler")]
    modules = [".".join(p[:-1] if p[-1] == "__init__" else p) for p in parts if p[-1] != "__main__"]
    code = (
        "import importlib, sys\n"
        "for name in ('torch', 'ray', 'grpc'):\n"
        "    sys.modules[name] = None\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *modules], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, f"scheduler must import where torch, ray and grpc cannot be:\n{done.stderr}"
