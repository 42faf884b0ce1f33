"""Trains the same model from the same seed on one process with Megatron's own attention, and on a ring of 4.

    python examples/compare.py [MEGATRON ARGUMENTS]      (make compare ARGS="...")

Fails unless losses and gradient norms of the first iterations agree.
"""

from __future__ import annotations

import sys

from alone import TakenError, alone_in
from job import Iteration, Job, JobFailedError
from train import BURST, DATA_ARGUMENTS, MODEL, PARALLEL, PROCESSES, RUNS, TRAINING, follow, prepare, value_of

ITERATIONS = 20
LOSS_TOLERANCE, NORM_TOLERANCE = 1e-4, 1e-3

RUN = {
    "cp1-megatron": (1, []),
    "cp4-burst-query": (PROCESSES, [*BURST, *PARALLEL, "--burst-backward", "query"]),
    "cp4-burst-kv": (PROCESSES, [*BURST, *PARALLEL, "--burst-backward", "kv"]),
}
"""Processes and arguments of each run; the first is what the others are compared with."""


def difference(ours: list[Iteration], theirs: list[Iteration]) -> tuple[float, float]:
    """Largest relative differences of losses and of gradient norms.

    Raises:
        ValueError: the runs are not of the same, full number of iterations.
    """
    lengths = len(ours), len(theirs)
    if lengths != (ITERATIONS, ITERATIONS):
        raise ValueError(f"expected {ITERATIONS} iterations of each run, got {lengths}")
    pairs = list(zip(ours, theirs, strict=True))
    loss = max(abs(a.loss - b.loss) / abs(b.loss) for a, b in pairs)
    norm = max(abs(a.grad_norm - b.grad_norm) / abs(b.grad_norm) for a, b in pairs)
    return loss, norm


def main(extra: list[str]) -> int:
    prepare()
    common = [
        *MODEL,
        *TRAINING,
        *DATA_ARGUMENTS,
        "--calculate-per-token-loss",
        *extra,
        *("--train-iters", str(ITERATIONS)),
    ]
    tokens = int(value_of("--seq-length", common)) * int(value_of("--global-batch-size", common))
    results = {}
    for name, (processes, arguments) in RUN.items():
        folder = RUNS / "compare" / name
        folder.mkdir(parents=True, exist_ok=True)
        print(name)
        try:
            with alone_in(folder):
                results[name] = follow(Job(folder, processes, [*common, *arguments]), ITERATIONS, tokens, 0)
        except (JobFailedError, TakenError, KeyboardInterrupt) as error:
            print(f"{name} stopped: {str(error) or 'interrupted'}", file=sys.stderr)
            return 1
    first, *others = results
    agree = True
    print(f"largest relative difference from {first} over {ITERATIONS} iterations:")
    for name in others:
        loss, norm = difference(results[name], results[first])
        fine = loss <= LOSS_TOLERANCE and norm <= NORM_TOLERANCE
        agree = agree and fine
        print(f"  {name}: loss {loss:.1e}, gradient norm {norm:.1e} -> {'equal' if fine else 'DIFFERENT'}")
    print(f"(equal: losses to {LOSS_TOLERANCE}, gradient norms to {NORM_TOLERANCE})")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
