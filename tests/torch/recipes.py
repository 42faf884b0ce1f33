"""The blocks and modules of the recipes in docs/frameworks, run with stand-ins for parts of a stack."""

import re
import sys
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parents[2] / "docs/frameworks"
PAGES = "".join((FOLDER / f"recipes{name}.md").read_text() for name in ("", "-packed", "-rl"))
FENCED = re.findall(r"^```(?:python torchrun=\d)?\n(.*?)^```$", PAGES, re.MULTILINE | re.DOTALL)
FENCED += [path.read_text() for path in sorted(FOLDER.parents[1].glob("examples/recipes/*.py"))]
PLAYED = "# What a stack does"
"""Where a block goes on with a call site of its own, which tests/house/test_docs.py runs."""


def run(words, **names):
    """Run the one block that has these words, without a call site of its own; return the names it makes."""
    (block,) = (block for block in FENCED if words in block)
    exec(block.partition(PLAYED)[0].replace('dist.init_process_group("gloo")', ""), names)
    return names


def stand_in(name, **attributes):
    """Put a module with these attributes, and the packages around it, where imports look; return it."""
    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        path = ".".join(parts[:i])
        module = sys.modules.setdefault(path, ModuleType(path))
        module.__path__ = []
        if i > 1:
            setattr(sys.modules[".".join(parts[: i - 1])], parts[i - 1], module)
    vars(module).update(attributes)
    return module
