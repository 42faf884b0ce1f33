"""These tests need megatron-core, and no GPU."""

from importlib.metadata import version

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
pytest.register_assert_rewrite("models")

OF_OURS = {"test_models.py", "test_packed.py", "test_fused_loss.py", "test_layouts.py"}
"""Files in which the cells of a test meet the same of Megatron, and differ in our settings."""


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is slow
def pytest_collection_modifyitems(items):
    """On the earlier of two versions of Megatron-Core one cell of such a test, the last, is not slow."""
    if version("megatron-core").startswith("0.16."):
        few = [item for item in items if item.path.name in OF_OURS and not item.get_closest_marker("slow")]
        last = {item.function: item for item in few}
        for item in few:
            if item is not last[item.function]:
                item.add_marker(pytest.mark.slow)
