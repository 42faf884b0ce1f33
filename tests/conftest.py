"""Shared by all tests: one thread a process, and no unpoisoned buffer."""

import gc
import os
import sys

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
def _accelerate_forgets():
    """The ranks of a later test would inherit what Accelerate knows of this one: how many ranks there are."""
    yield
    if (state := sys.modules.get("accelerate.state")) is not None:
        for each in (state.AcceleratorState, state.GradientState, state.PartialState):
            each._reset_state()


@pytest.fixture(autouse=True)
def _poisoned_buffers():
    """torch.empty returns NaN, so that a value read before it arrived cannot go unnoticed."""
    poison(True)
    yield
    poison(False)
