"""Shared by all tests: one thread a process, and no unpoisoned buffer."""

import gc
import os
import sys
from types import FunctionType, ModuleType

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: ranks share few cores

import pytest
import torch
from ranks import poison

try:
    from hypothesis import settings
except ImportError:  # on a bare GPU machine, whose tests draw nothing
    pass
else:
    settings.register_profile("shared", deadline=None)  # the time of a case says nothing on a shared machine
    settings.load_profile("shared")

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported: our kernel runs on the CPU


_BEFORE = pytest.StashKey()
_CPU_SECONDS = {}
"""By test: those of the process that ran it and of all that it started and saw end."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    item.stash[_BEFORE] = sum(os.times()[:4])
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.when == "teardown":  # a report is what a worker of pytest-xdist sends
        report.user_properties = [("CPU seconds", sum(os.times()[:4]) - item.stash[_BEFORE])]
    return report


def pytest_runtest_logreport(report):
    if report.when == "teardown":
        _CPU_SECONDS[report.nodeid] = dict(report.user_properties)["CPU seconds"]


def pytest_terminal_summary(terminalreporter):
    """The dearest tests; on a busy machine their CPU seconds say more than the time they took."""
    dearest = sorted(((s, name) for name, s in _CPU_SECONDS.items() if s >= 1), reverse=True)[:20]
    if dearest:
        terminalreporter.section(
            f"CPU seconds: {sum(_CPU_SECONDS.values()):.0f} in all, and the dearest tests"
        )
        for seconds, name in dearest:
            terminalreporter.write_line(f"{seconds:7.1f}  {name}")


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def few_objects():
    """The garbage collector knows what the test makes, and not all that was imported, which takes seconds."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _no_terminal(monkeypatch):
    """Tables are as wide as in a pipe: pytest-xdist tells its workers the width of a terminal."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture(autouse=True)
def _poisoned_buffers():
    """torch.empty returns NaN, so that a value read before it arrived cannot go unnoticed."""
    poison(True)
    yield
    poison(False)


STARTERS = {
    "ranks.processes",
    "ranks.torchrun",
    "forked.run",
    "forked.start",
    "subprocess",
    "multiprocessing",
}
"""Functions and modules that start processes."""


def pytest_collection_modifyitems(items):
    """Mark the tests that start processes: `make test` runs all others on all cores."""
    known = {}
    for item in items:
        fixtures = [
            d.func for name in item.fixturenames for d in item._fixtureinfo.name2fixturedefs.get(name, ())
        ]
        if any(_starts(function, known) for function in (item.function, *fixtures)):
            item.add_marker("processes")


def _starts(function, known):
    """Whether a function, or one of the tests' own functions that it names, starts processes."""
    function = getattr(function, "__wrapped__", function)
    if not isinstance(function, FunctionType) or function in known:
        return known.get(function, False)
    known[function] = False  # of a circle
    for name in _names(function.__code__):
        value = function.__globals__.get(name)
        if isinstance(value, ModuleType):
            started = value.__name__ in STARTERS
        else:
            where = getattr(value, "__module__", "") or ""
            started = where in STARTERS or f"{where}.{getattr(value, '__name__', '')}" in STARTERS
            started = started or (_of_tests(where) and _starts(value, known))
        known[function] = known[function] or started
    return known[function]


def _names(code):
    yield from code.co_names
    for constant in code.co_consts:
        if hasattr(constant, "co_names"):
            yield from _names(constant)


def _of_tests(module):
    path = getattr(sys.modules.get(module), "__file__", None) or ""
    return os.path.dirname(__file__) in path
