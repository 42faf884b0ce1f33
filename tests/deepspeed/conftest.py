import pytest

pytest.importorskip("deepspeed")
pytest.importorskip("transformers")
