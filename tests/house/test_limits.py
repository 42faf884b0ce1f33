"""A wait of a test that ends too early says which test, which limit, and what to do."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_no_limit_of_a_test_has_a_number_of_its_own():
    """A poll of a second at most is none."""
    for path in (*TESTS.rglob("*.py"), *(TESTS.parent / "examples").rglob("*.py")):
        numbers = re.findall(
            r"(?:timeout=(?:timedelta\(seconds=)?|\b(?:join|wait)\(|\bseconds < )([0-9.]+)", path.read_text()
        )
        assert max(map(float, numbers), default=0) <= 1, path
