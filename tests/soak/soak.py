"""Runs four gloo ranks for hours: calls, trainings, faults, each step drawn from a seed.

    python tests/soak/soak.py --hours 12 [--seed 0]        (make soak HOURS=12)
    python tests/soak/soak.py --seed 0 --step 17           one step again (make soak SEED=0 STEP=17)

A rank that dies, is interrupted or fails must be noticed by all others within BOUND; a new process takes the
place of a dead one, and the others go on. Each step leaves a line of JSON in runs/soak/SEED.jsonl: its words,
what it found, and after every tenth order what a rank holds on to, its caches empty. Memory, threads and
descriptors must stay flat. The command fails if a step did, or if a rank holds more and more.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TextIO

os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a store that dies with its rank warns at length

import forked
import limits
from soak_figures import Held, growths, slopes
from soak_ranks import work
from soak_steps import ANEW, Fault

SIZE = 4
EPOCH = 500
"""Steps of the first epoch; each later one is twice as long as the one before.

An epoch spares one rank all deaths, so that it grows old; its last fault may spare none.
"""
BOUND = 15 * float(os.environ.get("TEST_PATIENCE", "1"))
"""Seconds within which every rank must notice a fault of another."""
LATE = limits.AT_ONCE
"""Seconds after which a rank that does not answer hangs."""
WEIGHTS = {
    "attention": 44,
    "latent": 10,
    "training": 2,
}
FAULTS = 3
"""The weight of faults among these."""


def drawn(seed: int, number: int) -> tuple[str, Fault | None]:
    """Return the kind of a step, and its fault."""
    draw = random.Random(f"{seed}/{number}")
    name = draw.choices([*WEIGHTS, "fault"], [*WEIGHTS.values(), FAULTS])[0]
    if name != "fault":
        return name, None
    epoch = (number // EPOCH + 1).bit_length() - 1
    last = EPOCH * (2 ** (epoch + 1) - 1) - 1
    spared = None if number == last else random.Random(f"{seed}/{epoch}").randrange(SIZE)
    return name, Fault.drawn(draw, SIZE, spared)


@dataclass
class Member:
    """A process that is a rank."""

    process: Any
    pipe: Connection


@dataclass
class Soak:
    """A run: its ranks, and what was found."""

    seed: int
    folder: Path
    log: TextIO
    context: Any
    """Of processes."""
    members: list[Member | None] = field(default_factory=lambda: [None] * SIZE)
    failures: list[str] = field(default_factory=list)
    """Steps that failed, with their errors."""
    noticed: list[float] = field(default_factory=list)
    """Seconds from each fault to each other rank's error."""
    held: list[tuple[int, Held]] = field(default_factory=list)
    """What each process held after every tenth of its orders, by step."""
    latest: list[Held] = field(default_factory=list)
    joins: int = 0
    steps: int = 0

    def step(self, number: int) -> None:
        """Make a step, and write its line."""
        start, seed = time.monotonic(), f"{self.seed}.{number}"
        name, fault = drawn(self.seed, number)
        self.latest = []
        line: dict[str, Any] = {"step": number, "kind": name}
        try:
            if fault is not None:
                self._fault(seed, fault, line)
            else:
                line["words"] = self._all("step", seed, name)[0]["words"]
                if name in ANEW:
                    self.join()
        except AssertionError as failure:
            line["error"] = str(failure)
            self.failures.append(f"step {number}, {name}: {failure}")
            self.end()
            self.join()
        line |= {"seconds": round(time.monotonic() - start, 3), "held": self.latest}
        self.held += [(number, each) for each in self.latest]
        self.log.write(json.dumps(line) + "\n")
        self.log.flush()
        self.steps += 1

    def join(self) -> None:
        """Let all ranks make their process groups anew, new processes in the place of those that ended."""
        for rank, member in enumerate(self.members):
            if member is None:
                self.members[rank] = self._member(rank)
        self.joins += 1
        if random.Random(f"{self.seed}/{self.joins}").random() < 0.5:  # a store that goes with rank 0
            address = f"tcp://127.0.0.1:{forked.free_port()}"
        else:
            address = f"file://{self.folder}/store{self.joins}"
        self._all("join", address)

    def end(self) -> None:
        """Kill all ranks."""
        for rank, member in enumerate(self.members):
            if member is not None:
                member.process.kill()
                self._forget(rank)

    def _forget(self, rank: int) -> None:
        """Let a process go that has ended, or ends."""
        self.members[rank].process.join()
        self.members[rank].pipe.close()
        self.members[rank] = None

    def _member(self, rank: int) -> Member:
        ours, theirs = multiprocessing.Pipe()
        others = [member.pipe for member in self.members if member is not None]
        process = self.context.Process(
            target=_rank, args=(rank, ours, others, theirs, self.folder), daemon=True
        )
        process.start()
        theirs.close()
        return Member(process, ours)

    def _all(self, *order: Any) -> list[dict[str, Any]]:
        """Give an order to all ranks, and return their answers; any error fails."""
        answers = self._answers(order)
        for rank, answer in enumerate(answers):
            assert answer is not None, f"rank {rank} died"
        errors = [
            f"rank {rank}: {answer['error']}" for rank, answer in enumerate(answers) if "error" in answer
        ]
        assert not errors, "\n".join(errors)
        return answers

    def _answers(self, order: Any, strikes: list[float] | None = None) -> list[dict[str, Any] | None]:
        """Each rank's answer, None of one that died; when a rank says that it strikes goes to `strikes`."""
        for member in self.members:
            member.pipe.send(order)
        deadline, answers = time.monotonic() + LATE, {}
        while len(answers) < SIZE:
            waits = {m.pipe: rank for rank, m in enumerate(self.members) if rank not in answers}
            ready = multiprocessing.connection.wait([*waits], max(0, deadline - time.monotonic()))
            if not ready:
                raise AssertionError(f"ranks {[*waits.values()]} hang:\n{self._stacks(waits.values())}")
            for pipe in ready:
                rank = waits[pipe]
                try:
                    answer = pipe.recv()
                except (EOFError, ConnectionError):
                    answer = None
                if answer is not None and "strikes" in answer:
                    strikes.append(answer["strikes"])
                else:
                    answers[rank] = answer
        self.latest += [answer["held"] for answer in answers.values() if answer and "held" in answer]
        return [answers[rank] for rank in range(SIZE)]

    def _stacks(self, ranks: Any) -> str:
        """Return where the threads of ranks are."""
        for rank in ranks:
            os.kill(self.members[rank].process.pid, signal.SIGUSR1)
        time.sleep(1)
        return "\n".join(f"rank {rank}:\n{(self.folder / f'stacks{rank}').read_text()}" for rank in ranks)

    def _fault(self, seed: str, fault: Fault, line: dict[str, Any]) -> None:
        line["fault"] = vars(fault)
        strikes: list[float] = []
        answers = self._answers(("fault", seed, fault), strikes)
        for rank, answer in enumerate(answers):
            if answer is None:
                self._forget(rank)
        alive = {rank: answer for rank, answer in enumerate(answers) if answer is not None}
        line["words"] = {rank: answer.get("words", answer) for rank, answer in alive.items()}
        unplanned = [rank for rank in range(SIZE) if rank not in alive and rank not in fault.ranks]
        assert not unplanned, f"ranks {unplanned} died with {fault}"
        errors = [answer["error"] for answer in alive.values() if "error" in answer]
        assert not errors, errors[0]
        seconds = {rank: alive[rank]["noticed"] - min(strikes) for rank in alive}
        line["noticed"] = {rank: round(s, 3) for rank, s in seconds.items()}
        self.noticed += seconds.values()
        assert max(seconds.values(), default=0) < BOUND, f"noticed after {seconds} s: {fault}"
        self.join()


def _rank(rank: int, ours: Connection, others: list[Connection], theirs: Connection, folder: Path) -> None:
    for pipe in (ours, *others):  # else the ends of other pipes would stay open here
        pipe.close()
    work(rank, SIZE, theirs, folder / f"stacks{rank}")


def run(seed: int, log: TextIO, numbers: Iterator[int], seconds: float = float("inf")) -> Soak:
    """Make steps of these numbers, until they or the time are over."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(seed, Path(folder), log, multiprocessing.get_context("fork"))
        try:
            soak.join()
            for number in numbers:
                if time.monotonic() - start > seconds:
                    break
                soak.step(number)
        except KeyboardInterrupt:
            pass
        finally:
            soak.end()
    return soak


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hours", type=float, default=12.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--step", type=int, help="this step alone")
    parser.add_argument("--log", type=Path)
    arguments = parser.parse_args()
    alone = arguments.step is not None
    name = f"{arguments.seed}.{arguments.step}" if alone else f"{arguments.seed}"
    path = arguments.log or Path(f"runs/soak/{name}.jsonl")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as log:
        numbers = iter([arguments.step]) if alone else iter(range(10**9))
        soak = run(arguments.seed, log, numbers, arguments.hours * 3600)
    sys.stdout.write(report(soak) + "\n")
    return bool(soak.failures or growths(soak.held))


def report(soak: Soak) -> str:
    """Return what a run found, in lines."""
    lines = [f"{soak.steps} steps, {soak.joins} times new process groups, {len(soak.failures)} failures"]
    if soak.noticed:
        late = sorted(soak.noticed)
        lines.append(
            f"{len(late)} ranks noticed a fault of another: {late[len(late) // 2]:.2f} s in the middle, "
            f"{late[-1]:.2f} s at most"
        )
    for failure in soak.failures:
        lines.append(failure)
    old = slopes(soak.held)
    if not old:
        lines.append(
            "no process grew old enough to be judged: only longer runs say whether memory stays flat"
        )
    for pid, of_process in old.items():
        figures = ", ".join(f"{name} {growth:.1f}" for name, growth in of_process.items())
        lines.append(f"growth of process {pid} in 1000 steps: {figures}")
    return "\n".join([*lines, *growths(soak.held)])


if __name__ == "__main__":
    sys.exit(main())
