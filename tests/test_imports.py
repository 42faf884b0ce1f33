"""The architecture: imports point one way, from higher floors to lower, and frameworks stay in adapters."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "burst_mcore"
FLOORS = [
    {
        *(
            "version",
            "config",
            "layout",
            "registry",
            "mask",
            "rates",
            "machines",
            "digest",
            "dtypes",
            "agreement",
        ),
        *("packages", "loss", "files", "words"),
    },
    {"attention"},
    {"checkpointing"},
    {"megatron", "deepspeed"},
    {"explain"},
    {"step"},
    {"plan"},
    {"bench"},
    {"calibrate", "options"},
    {"cli"},
]
WITHIN = {
    "attention": [
        {"recompute", "shard"},
        {"geometry"},
        {"schedule", "numerics"},
        {"kernels", "runtime"},
        {"autotune"},
        {"cached", "call", "checks"},
        {"forward", "backward", "request"},
        {"prepare"},
        {"operator"},
        {"api"},
    ],
    "deepspeed": [{"errors"}, {"config"}, {"ranks"}, {"data"}, {"models"}, {"engine"}, {"accelerate"}],
}
"""The maps of packages that have folders, in their __init__.py too, lowest first."""
FRAMEWORKS = {
    "megatron": {"megatron"},
    "deepspeed": {"deepspeed"},
    "transformers": {"deepspeed"},
    "accelerate": {"deepspeed"},
}


def _modules():
    return sorted(path for path in PACKAGE.rglob("*.py"))


def _name(path):
    parts = ("burst_mcore", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(path):
    """Dotted names that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _floor(name, floors, depth):
    part = name.split(".")[depth] if name.count(".") >= depth else None
    return next((i for i, floor in enumerate(floors) if part in floor), None)


@pytest.mark.parametrize("path", _modules(), ids=_name)
def test_imports_point_down(path):
    name = _name(path)
    own = _floor(name, FLOORS, 1)
    assert own is not None or name == "burst_mcore", f"{name} is on no floor: add it to FLOORS"
    for imported in _imports(path):
        if not imported.startswith("burst_mcore.") or own is None:
            continue
        other = _floor(imported, FLOORS, 1)
        assert other is not None, f"{name} imports {imported}, which is on no floor"
        same_package = imported.split(".")[1] == name.split(".")[1]
        assert other < own or same_package or own == other == 0, (
            f"{name} imports {imported}, which is above it"
        )
        package = name.split(".")[1]
        if package in WITHIN and name.count(".") > 1 and imported.startswith(f"burst_mcore.{package}."):
            here, there = (_floor(x, WITHIN[package], 2) for x in (name, imported))
            assert here is not None, f"{name}: add it to WITHIN"
            if there is None:  # a name of the package itself
                continue
            inside_one = imported.split(".")[2] == name.split(".")[2]
            assert inside_one or there <= here, f"{name} imports {imported}, which is above it"


def test_folders_are_small_and_on_the_map():
    for folder in {path.parent for path in _modules()} - {PACKAGE}:
        files = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
        most = 9 if folder == PACKAGE / "attention" else 14
        assert len(files) <= most, f"{folder} has {len(files)} files"
    for package, floors in WITHIN.items():
        text = (PACKAGE / package / "__init__.py").read_text()
        on_the_map = {part for floor in floors for part in floor}
        assert all(part in text for part in on_the_map)
        assert {p.stem for p in (PACKAGE / package).iterdir() if p.stem[0] != "_"} == on_the_map


def test_no_circle():
    graph = {_name(path): set(_imports(path)) for path in _modules()}
    graph.pop("burst_mcore")
    done, under_way = set(), []

    def visit(name):
        assert name not in under_way, f"circle: {' -> '.join([*under_way[under_way.index(name) :], name])}"
        if name in done or name not in graph:
            return
        under_way.append(name)
        for imported in graph[name]:
            visit(imported)
        under_way.pop()
        done.add(name)

    for name in graph:
        visit(name)


@pytest.mark.parametrize("path", _modules(), ids=_name)
def test_frameworks_stay_in_their_adapters(path):
    for imported in _imports(path):
        adapters = FRAMEWORKS.get(imported.split(".")[0])
        if adapters is not None:
            package = _name(path).split(".")[1]
            assert package in adapters | {"bench"}, f"{_name(path)} imports {imported}"


def test_importing_the_package_imports_no_framework():
    code = "import sys, burst_mcore; print([m for m in sys.modules if m.split('.')[0] in %r])" % [
        *FRAMEWORKS,
        "flash_attn",
        "transformer_engine",
        "matplotlib",
    ]
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
