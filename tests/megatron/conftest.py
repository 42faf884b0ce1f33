"""These tests need megatron-core, and no GPU."""

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
