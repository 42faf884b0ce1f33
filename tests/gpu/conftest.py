"""These tests need a GPU, and of Python's packages torch, triton, numpy and pytest alone."""

import pytest
import torch

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


def pytest_collection_modifyitems(items):
    """Skip all of this folder without a GPU."""
    for item in items:
        if "/gpu/" in str(item.path):
            item.add_marker(needs_gpu)


@pytest.fixture(autouse=True)
def seeded():
    """The same numbers in every run."""
    torch.manual_seed(0)
