"""Shared by all tests: one thread a process, and no unpoisoned buffer."""

import os

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


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _poisoned_buffers():
    """torch.empty returns NaN, so that a value read before it arrived cannot go unnoticed."""
    poison(True)
    yield
    poison(False)
