"""Measures the CPU time of agreement in the thread that calls attention.

`python tests/calls/calling_path.py` prints what docs/features/failures.md says of the agreement. Several
rings on one machine tell what more processes cost from what more ranks of a ring do.
"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from dense import problem
from ranks import processes

import burst_mcore
from burst_mcore import Mask, Topology, burst_attention
from burst_mcore.agreement import Agreement

PACKAGE = str(Path(burst_mcore.__file__).parent)
CALLS = 50
RINGS = ((2, 2), (4, 4), (8, 8), (8, 2))
"""Processes, and how many of them are a ring."""
REPEATS = 3
BAR = 1e-4
"""Seconds, at most."""


def _attend(topology, calls=CALLS):
    q, k, v, _ = (x.requires_grad_() for x in problem(0, 8, dtype=torch.float32))
    for _ in range(calls):
        burst_attention(q, k, v, topology=topology, mask=Mask.causal()).sum().backward()


def calling_path(rank, size, ring):
    """Thread CPU seconds of one agreement: of a forward that waits, and of a backward that goes ahead.

    The least of many, since the machine's other work only adds. `ring`: how many ranks are a ring.
    """
    times, meet = {False: [], True: []}, Agreement.meet

    def timed(self, *args, ahead=False, **others):
        start = time.thread_time()
        agreed = meet(self, *args, ahead=ahead, **others)
        times[ahead].append(time.thread_time() - start)
        return agreed

    Agreement.meet = timed
    group, _ = dist.new_subgroups(ring)
    _attend(Topology.from_group(group))
    Agreement.meet = meet
    assert min(map(len, times.values())) >= CALLS - 1, times  # the first backward waits
    return min(times[False]), min(times[True])


def lines_run(rank, size):
    """How many lines of this package one agreement runs in the calling thread: waiting, and ahead.

    A loop over ranks would run more lines in a larger ring.
    """
    lines, meet = {}, Agreement.meet

    def counted(self, *args, ahead=False, **others):
        lines[ahead] = 0

        def traced(frame, event, arg):
            if PACKAGE not in frame.f_code.co_filename:
                return None
            lines[ahead] += event == "line"
            return traced

        sys.settrace(traced)
        try:
            return meet(self, *args, ahead=ahead, **others)
        finally:
            sys.settrace(None)

    Agreement.meet = counted
    _attend(Topology.from_group(dist.group.WORLD), calls=5)  # the first two are unlike those that follow
    Agreement.meet = meet
    return lines[False], lines[True]


def main():
    """Print the table: milliseconds of the slowest rank; exit with 1 if any is beyond the bar."""
    titles = ("processes", "ranks of a ring", "forward, waits (ms)", "backward, goes ahead (ms)")
    sys.stdout.write(f"| {' | '.join(titles)} |\n{'|---' * len(titles)}|\n")
    worst = 0.0
    for size, ring in RINGS:
        ranks = [processes(size, calling_path, ring) for _ in range(REPEATS)]
        found = [[max(x) for x in zip(*repeat, strict=True)] for repeat in ranks]
        worst = max(worst, *map(max, found))
        columns = (", ".join(f"{1e3 * x:.3f}" for x in column) for column in zip(*found, strict=True))
        sys.stdout.write(f"| {size} | {ring} | {' | '.join(columns)} |\n")
    sys.exit(worst > BAR)


if __name__ == "__main__":
    main()
