"""Plants the faults of this folder in burst_mcore, one at a time, and prints which their tests find.

`make faults` plants all of them, one on each core at a time; `make faults ARGS='loss/ wait'` those that have
one of the words in file or name; `make faults ARGS=--none` runs their tests without a fault: all must pass.

A fault is its name after ##; its file in burst_mcore, the test that must find it, and, where that may fail
for other reasons, words of which the failure has one; lines that go (-), and lines that come instead (+).
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import linecache
import os
import re
import signal
import sys
import tempfile
import time
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
PACKAGE = HERE.parents[1] / "burst_mcore"
SECONDS = 300 * float(os.environ.get("TEST_PATIENCE", "1"))
"""For which a test may run. One that runs longer has found a fault only if its words are "hangs"."""
IMPORTS = {
    "tests": ("numpy", "torch", "pytest", "hypothesis", "triton"),
    "tests/megatron": ("megatron.core",),
    "tests/deepspeed": ("transformers", "deepspeed"),
    "tests/torch": ("transformers", "accelerate"),
}
"""By folder of tests, their imports beside burst_mcore: done once, and a process is forked for each fault."""
PLANTED = "\nthe fault is planted\n"


class Fault(NamedTuple):
    name: str
    file: str
    test: str
    """As pytest names it; "-k" and words may follow, where some of its parameters are enough."""
    words: list[str]
    old: str
    new: str

    def planted(self) -> str:
        """Return the text of the file with the fault; ValueError unless the old text is there, once."""
        source = (PACKAGE / self.file).read_text()
        if source.count(self.old) != 1:
            raise ValueError(f"{self.file} has {source.count(self.old)} times the text of {self.name!r}")
        return source.replace(self.old, self.new)


def ledger(folder: Path) -> list[Fault]:
    """Return the faults of all files of a folder."""
    faults = []
    for text in (text for file in sorted(folder.glob("*.txt")) for text in file.read_text().split("## ")[1:]):
        name, where, *lines = text.strip().splitlines()
        file, test, *words = where.removeprefix("in ").split("; ")
        old, new = ("".join(f"{line[1:]}\n" for line in lines if line[0] == sign) for sign in "-+")
        faults.append(Fault(name, file, test, words, old, new))
    return faults


class _AlwaysTheSame:
    """A plugin of pytest: examples are drawn as in every run, and one that fails is not made smaller."""

    def pytest_configure(self) -> None:
        from hypothesis import Phase, settings

        phases = Phase.explicit, Phase.generate
        settings.register_profile("faults", settings(), derandomize=True, database=None, phases=phases)
        settings.load_profile("faults")


def _run(fault: Fault, log: Path, plants: bool) -> None:
    """Run the test of a fault in this process, which was forked for it and ends here."""
    import pytest

    os.setsid()  # ranks that hang are ended with it
    to_log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(to_log, stream)
    if plants:
        _plant(str(PACKAGE / fault.file), fault.planted(), to_log)
    test, _, words = fault.test.partition(" -k ")
    options = ["-o", "addopts=", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not slow"]
    status = pytest.main([*options, "-k", words, test], plugins=[_AlwaysTheSame()])
    sys.stdout.flush()
    os._exit(status)


def _plant(path: str, source: str, to_log: int) -> None:
    """Let this process, and those that it forks, import `source` as the file at `path`, and say so."""
    get_code = SourceFileLoader.get_code

    def planted(self: SourceFileLoader, name: str) -> object:
        if self.path != path:
            return get_code(self, name)
        os.write(to_log, PLANTED.encode())
        return compile(source, path, "exec", dont_inherit=True)

    SourceFileLoader.get_code = planted  # type: ignore[method-assign,assignment]
    linecache.cache[path] = len(source), None, source.splitlines(keepends=True), path  # what Triton reads


def _judged(fault: Fault, code: int, said: str, plants: bool) -> tuple[bool, str]:
    """Return (whether a test ended as it must, how)."""
    reasons = re.findall(r"^(?:FAILED|ERROR) \S.*? - (.*)", said, re.MULTILINE)
    last = (reasons or said.strip().splitlines() or [""])[-1]
    if code == -signal.SIGKILL:
        return plants and "hangs" in fault.words, f"no end within {SECONDS:.0f} s"
    if not plants:
        return code == 0, f"fails without a fault: {last}" if code else "passes"
    if PLANTED not in said:
        return False, f"{fault.file} was not imported: {last}"
    found = code == 1 and (not fault.words or any(word in said for word in fault.words))
    return found, f"found: {last}" if found else f"another failure: {last}" if code else "SURVIVED"


def run(faults: list[Fault], logs: Path, plants: bool) -> int:
    """Run a test on each core, and write a row for each when it ends; return how many ended otherwise."""
    waiting, running, bad, total = faults[::-1], {}, 0, 0.0
    while waiting or running:
        while waiting and len(running) < (os.cpu_count() or 1):
            fault, log = waiting.pop(), logs / str(len(waiting))
            if not (child := os.fork()):
                _run(fault, log, plants)
            running[child] = fault, log, time.monotonic() + SECONDS
        for child, (fault, log, deadline) in list(running.items()):
            if time.monotonic() > deadline:
                os.killpg(child, signal.SIGKILL)
            ended, status, used = os.wait4(child, os.WNOHANG)
            if ended:
                del running[child]
                with contextlib.suppress(ProcessLookupError):  # ranks that it left behind
                    os.killpg(child, signal.SIGKILL)
                said = log.read_text(errors="replace")
                well, how = _judged(fault, os.waitstatus_to_exitcode(status), said, plants)
                bad, total = bad + (not well), total + (seconds := used.ru_utime + used.ru_stime)
                row = f"{fault.name} | {Path(fault.file).parent} | {fault.test} | {seconds:.1f} | {how}"
                sys.stdout.write(f"{'' if well else '!'}| {row} |\n")
                sys.stdout.flush()
        time.sleep(0.05)
    sys.stdout.write(f"{len(faults)} tests, {bad} did not end as they must; {total:.0f} CPU seconds\n")
    return bad


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("words", nargs="*", default=[""], help="of files or names of faults")
    parser.add_argument("--none", action="store_true", help="plant nothing: every test must pass")
    parser.add_argument("--ledger", type=Path, default=HERE, help="the folder of faults")
    given = parser.parse_args()
    faults = [x for x in ledger(given.ledger) if any(word in f"{x.file} {x.name}" for word in given.words)]
    for fault in faults:
        fault.planted()
    if given.none:
        faults = list({fault.test: fault for fault in faults}.values())
    sys.path.insert(0, str(PACKAGE.parent))
    os.environ.update(OMP_NUM_THREADS="1", TRITON_INTERPRET="1", COLUMNS="300", PYTHONWARNINGS="ignore")
    for folder, modules in IMPORTS.items():
        if any(fault.test.startswith(folder) for fault in faults):
            list(map(importlib.import_module, modules))
    gc.freeze()  # what nobody looks through stays shared between processes
    with tempfile.TemporaryDirectory() as logs:
        return min(run(faults, Path(logs), not given.none), 1)


if __name__ == "__main__":
    sys.exit(main())
