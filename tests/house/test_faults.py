"""The ledger of faults, tests/faults: each can be planted, and what its runner says is so."""

import sys
from collections import Counter
from pathlib import Path

import limits
import plant
import pytest

ROOT = Path(__file__).parents[2]
LEDGER = plant.ledger(plant.HERE)
NO_FAULT = """\
## nothing is changed
in attention/runtime/executor.py; tests/test_fake_cuda.py::test_nothing_is_found[ring]
-            for work in works:
+            for work in [*works]:
"""


@pytest.mark.parametrize("fault", LEDGER, ids=lambda fault: fault.name)
def test_a_fault_is_legal_code_and_its_test_is_there(fault):
    compile(fault.planted(), fault.file, "exec")
    file, _, function = fault.test.partition(" -k ")[0].partition("::")
    assert f"def {function.partition('[')[0]}(" in (ROOT / file).read_text()


def test_every_folder_has_three_faults_and_names_are_apart():
    names = Counter(fault.name for fault in LEDGER)
    assert names.most_common(1)[0][1] == 1
    within = Counter(folder for fault in LEDGER for folder in (plant.PACKAGE / fault.file).parents)
    folders = {file.parent for file in plant.PACKAGE.rglob("*.py")}
    assert not [str(folder) for folder in folders if within[folder] < 3]


def test_the_page_counts_them():
    of_device = sum("test_fake_cuda" in fault.test for fault in LEDGER)
    page = (ROOT / "docs" / "evidence" / "verification.md").read_text()
    assert f"has {len(LEDGER)} of them, {of_device} of what happens on these devices" in page


def test_the_fake_device_finds_faults_and_the_runner_says_what_survives(tmp_path):
    """A race and a deadlock; and a change that no test can find."""
    cuda = (plant.HERE / "cuda.txt").read_text().split("## ")[1:]
    names = "no stream waits for a step", "rank 0 connects fewer communicators"
    chosen = [text for text in cuda if text.splitlines()[0] in names]
    (tmp_path / "some.txt").write_text("".join(f"## {text}" for text in chosen) + NO_FAULT)
    ran = limits.run([sys.executable, plant.__file__, "--ledger", tmp_path], cwd=ROOT)
    assert ran.returncode == 1
    survived, found = (
        [line for line in ran.stdout.splitlines() if word in line] for word in ("SURVIVED", "found:")
    )
    assert [line.split(" | ")[0].removeprefix("!| ") for line in survived] == ["nothing is changed"]
    assert {line.split(" | ")[0].removeprefix("| ") for line in found} == {*names}
