"""A wait of a test that ends too early says which test, which limit, and what to do."""

import queue
import re
import subprocess
import sys
import time
from pathlib import Path

import forked
import limits
import pytest
import torch.distributed as dist
from ranks import processes

TESTS = Path(__file__).parents[1]
HANGS = "import time; time.sleep(3600)"


def _one_hangs(rank, size):
    time.sleep(3600 * rank)


def _hangs(folder):
    (folder / "hangs.py").write_text(HANGS)
    forked.run(folder, folder / "hangs.py", seconds=0.5)


def _process():
    return subprocess.Popen([sys.executable, "-c", HANGS], stderr=subprocess.PIPE, text=True)


WAITS = {
    "ranks .1. of 2 did not answer": lambda folder: processes(2, _one_hangs, timeout=0.5),
    "hangs.py on 1 ranks, which wrote .*, did not end": _hangs,
    "-c 'import time; .*' did not end": lambda folder: limits.run([sys.executable, "-c", HANGS], 0.5),
    "-c .*sleep.3600.' did not end": lambda folder: limits.told(_process(), 0.5),
    "no message came from another thread": lambda folder: limits.taken(queue.Queue(), 0.5),
    "no other rank said yes": lambda folder: limits.keys(dist.HashStore(), "yes", seconds=0.5),
    "nothing began": lambda folder: limits.until(lambda: False, "nothing began", 0.5),
}


@pytest.mark.parametrize("words", WAITS)
def test_a_limit_that_is_hit_says_which_test_which_limit_and_what_to_do(words, tmp_path, request):
    with pytest.raises(AssertionError) as caught:
        WAITS[words](tmp_path)
    ours = (
        f"{words} within the limit of 0.5 s. The test hangs, or this machine is slow or busy: TEST_PATIENCE=4"
    )
    assert str(caught.value).startswith(f"{request.node.nodeid}: ")
    assert re.search(ours, str(caught.value)), caught.value


def test_no_limit_of_a_test_has_a_number_of_its_own():
    """A poll of a second at most is none."""
    for path in (*TESTS.rglob("*.py"), *(TESTS.parent / "examples").rglob("*.py")):
        numbers = re.findall(
            r"(?:timeout=(?:timedelta\(seconds=)?|\b(?:join|wait)\(|\bseconds < )([0-9.]+)", path.read_text()
        )
        assert max(map(float, numbers), default=0) <= 1, path
