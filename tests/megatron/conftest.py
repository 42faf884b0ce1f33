"""These tests need megatron-core, and no GPU."""

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
pytest.register_assert_rewrite("models")
