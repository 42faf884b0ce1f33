"""The architecture: imports point one way, from higher floors to lower, and frameworks stay in adapters."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ["burst_mcore", "burst_plan", "burst_bench"]
"""Lowest first: each imports those before it, never those after it."""
BUDGET = {"burst_mcore": 24422, "burst_plan": 6989, "burst_bench": 5990}
"""Lines of Python at most. A number changes only with its reason and its figure in decisions.md."""
FILES = 14
"""Files of a folder at most, besides __init__.py."""
FLOORS = {
    "burst_mcore": [
        """version config layout mask rates dtypes agreement packages words latest
        scripts wrap loss""".split(),
        ["attention"],
        ["checkpointing", "recurrent"],
        ["rollouts"],
        ["megatron", "transformers"],
        ["deepspeed", "torch", "compat"],
    ],
    "burst_plan": [
        ["words", "files", "tables", "provenance", "machines", "simulate"],
        ["explain"],
        ["step", "patch"],
        ["doctor"],
        ["options"],
        ["cli"],
    ],
    "burst_bench": [
        ["core", "memory", "launch", "emulate"],
        ["published"],
        ["methods"],
        ["gate", "stage", "results", "trace"],
        ["calibrate"],
        ["subjects"],
        ["report", "run"],
        ["check", "__main__"],
    ],
}
"""What each package has, lowest first."""
WITHIN = {
    "attention": [
        {"geometry"},
        {"schedule", "numerics"},
        {"choose"},
        {"kernels", "runtime"},
        {"call", "checks"},
        {"forward", "backward", "request"},
        {"resolve", "replay"},
        {"agree"},
        {"function"},
        {"compiled"},
        {"api"},
    ],
    "transformers": [{"errors"}, {"data"}, {"models"}, {"prepare"}, {"trainer"}],
}
"""The maps of packages that have folders, in their __init__.py too, lowest first."""
FRAMEWORKS = {
    "megatron": {"megatron"},
    "deepspeed": {"deepspeed", "doctor"},
    "transformers": {"transformers", "deepspeed", "torch", "compat", "doctor"},
    "accelerate": {"transformers", "deepspeed", "torch"},
    "pydantic": {"deepspeed"},
}


MODULES = {
    ".".join(part for part in path.relative_to(ROOT).with_suffix("").parts if part != "__init__"): path
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
}


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


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_down(name):
    package, _, rest = name.partition(".")
    own = _floor(name, FLOORS[package], 1)
    assert own is not None or not rest, f"{name} is on no floor: add it to FLOORS"
    for imported in _imports(MODULES[name]):
        other_package = imported.split(".")[0]
        if other_package not in PACKAGES:
            continue
        assert PACKAGES.index(other_package) <= PACKAGES.index(package), (
            f"{name} imports {imported}: {package} imports nothing of {other_package}"
        )
        if other_package != package or own is None or "." not in imported:
            continue
        other = _floor(imported, FLOORS[package], 1)
        assert other is not None or not (ROOT / Path(*imported.split("."))).with_suffix(".py").exists(), (
            f"{name} imports {imported}, which is on no floor"
        )
        same_folder = imported.split(".")[1] == name.split(".")[1]
        assert other is None or other < own or same_folder or (other == own and _on_ground(package, own)), (
            f"{name} imports {imported}, which is above it"
        )
        folder = name.split(".")[1]
        if folder in WITHIN and name.count(".") > 1 and imported.startswith(f"{package}.{folder}."):
            here, there = (_floor(x, WITHIN[folder], 2) for x in (name, imported))
            assert here is not None, f"{name}: add it to WITHIN"
            if there is None:  # a name of the package itself
                continue
            inside_one = imported.split(".")[2] == name.split(".")[2]
            assert inside_one or there <= here, f"{name} imports {imported}, which is above it"


def _on_ground(package, floor):
    """Whether files of this floor may import each other: the small ones that the rest stands on."""
    return floor == 0


def test_every_file_is_named_in_the_map_of_its_folder():
    for folder in {path.parent for path in MODULES.values()}:
        text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
        for path in folder.iterdir():
            if path.name[0] != "_" and (path.suffix == ".py" or any(path.glob("*.py"))):
                assert re.search(rf"\b{path.stem}\b", text), f"the map of {folder} lacks {path.stem}"
        for line in text.splitlines():  # "name, name   what it is; name: what it is"
            columns = re.findall(r"(?:^|\s{2,})(\w+(?:, \w+)*)/?\s{2,}(?=\S)", line)
            for name in [*", ".join(columns).split(", "), *re.findall(r"; (\w+): ", line)]:
                there = (folder / name, folder / f"{name}.py", folder.parent / name)  # or beside the folder
                assert any(path.exists() for path in there), f"the map of {folder} has {name}, which is gone"


def test_maps_of_floors_are_whole():
    for package, floors in FLOORS.items():
        there = {p.stem for p in (ROOT / package).iterdir() if p.suffix == ".py" or any(p.glob("*.py"))}
        assert there - {"__init__"} == {part for floor in floors for part in floor}
    for folder, floors in WITHIN.items():
        on_the_map = {part for floor in floors for part in floor}
        assert {p.stem for p in (ROOT / "burst_mcore" / folder).iterdir() if p.stem[0] != "_"} == on_the_map


def test_no_two_files_of_tests_have_one_name():
    """pytest imports them by their bare names."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert len({*names}) == len(names), sorted(name for name in {*names} if names.count(name) > 1)


def test_folders_are_small():
    tests = {path.parent for path in (ROOT / "tests").rglob("*.py")}
    for folder in tests.union(path.parent for path in MODULES.values()):
        files = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
        assert len(files) <= FILES, f"{folder} has {len(files)} files"


@pytest.mark.parametrize("package", BUDGET)
def test_budget_of_lines(package):
    modules = [path for name, path in MODULES.items() if name.split(".")[0] == package]
    lines = sum(len(path.read_text().splitlines()) for path in modules)
    assert lines <= BUDGET[package], f"{package} has {lines} lines: delete {lines - BUDGET[package]}"
    decided = (ROOT / "docs" / "evidence" / "decisions.md").read_text()
    assert f"| `{package}` | {BUDGET[package]:,} |" in decided, "BUDGET and docs/evidence/decisions.md differ"


def test_programs_are_typed():
    """Programs carry rows, or numbers of rows for the cost model: `Any` would hide one behind the other."""
    for path in (ROOT / "burst_mcore" / "attention" / "schedule").glob("*.py"):
        assert "typing.Any" not in _imports(path), f"{path.name} has Any"


def test_no_circle():
    graph = {name: {*_imports(path)} - {name} for name, path in MODULES.items()}
    for package in PACKAGES:
        graph.pop(package)
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


@pytest.mark.parametrize("name", MODULES)
def test_frameworks_stay_in_their_adapters(name):
    for imported in _imports(MODULES[name]):
        adapters = FRAMEWORKS.get(imported.split(".")[0])
        if adapters is not None:
            assert name.split(".")[0] == "burst_bench" or name.split(".")[1] in adapters, (
                f"{name} imports {imported}"
            )


def test_importing_attention_imports_no_framework_and_no_cost_model():
    names = [*FRAMEWORKS, "flash_attn", "transformer_engine", "matplotlib"]
    code = f"""import sys, burst_mcore.attention.api
print([m for m in sys.modules if m.split(".")[0] in {[*names, "burst_plan"]}])"""
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
