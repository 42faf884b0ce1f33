import pytest

pytest.importorskip("transformers")
