"""The main job: train a GPT on bytes of real text over 4 processes, its attention a burst ring.

    python examples/train.py [MEGATRON ARGUMENTS]      (make train ARGS="...")

Megatron's own trainer does the work; this script prepares the data, starts the ranks, shows a progress bar,
and leaves metrics.jsonl, loss.png and a checkpoint in runs/train. A second run resumes from the checkpoint.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from alone import TakenError, alone_in
from job import HERE, Iteration, Job, JobFailedError
from tqdm import tqdm

RUNS = HERE.parent / "runs"
DATA = RUNS / "data" / "stdlib"
PROCESSES = 4
BIGRAM = 2.43
"""Nats a byte of a bigram model of the standard library's sources: what needs no attention."""
GOAL = 2.3

MODEL = [
    *("--num-layers", "4"),
    *("--hidden-size", "64", "--ffn-hidden-size", "176"),
    *("--num-attention-heads", "4"),
    *("--group-query-attention", "--num-query-groups", "2"),
    *("--position-embedding-type", "rope", "--rotary-base", "100"),
    *("--normalization", "RMSNorm"),
    # Normalised queries and keys with a softmax scale of 1: attention over 4096 bytes learns sooner.
    *("--qk-layernorm", "--use-mup", "--mup-attn-scale-power", "0"),
    "--swiglu",
    "--disable-bias-linear",
    "--untie-embeddings-and-output-weights",
    *("--init-method-std", "0.08"),
    *("--attention-dropout", "0", "--hidden-dropout", "0"),
    *("--seq-length", "4096", "--max-position-embeddings", "4096"),
]
TRAINING = [
    *("--micro-batch-size", "1", "--global-batch-size", "1"),
    *("--train-iters", "280"),
    *("--lr", "8e-3", "--min-lr", "4e-4", "--lr-decay-style", "linear", "--lr-warmup-iters", "10"),
    *("--lr-decay-iters", "280"),  # not --train-iters, which a resumed run may raise
    *("--decoupled-lr", "1.5e-2"),  # of embeddings and output layer
    *("--adam-beta2", "0.95", "--clip-grad", "1.0", "--weight-decay", "0"),
    "--use-distributed-optimizer",
    "--override-opt-param-scheduler",  # a resumed run may ask for more iterations than the saved one
    *("--seed", "1234"),
]
DATA_ARGUMENTS = [
    *("--data-path", str(DATA), "--data-cache-path", str(RUNS / "data" / "cache")),
    *("--split", "100,0,0", "--eval-iters", "0", "--eval-interval", "1000000"),
    *("--num-workers", "0", "--no-create-attention-mask-in-dataloader"),
]
BURST = ["--context-parallel-attention-backend", "burst"]
PARALLEL = ["--context-parallel-size", str(PROCESSES)]


def value_of(flag: str, arguments: Sequence[str]) -> str:
    """What the last `flag` among the arguments is set to."""
    split = [part for argument in arguments for part in argument.split("=", 1)]  # --flag=value is legal too
    at = max(index for index, part in enumerate(split) if part == flag)
    return split[at + 1]


def prepare() -> None:
    """Write the data set unless it is there."""
    if not DATA.with_suffix(".idx").exists():
        subprocess.run(
            [sys.executable, "-W", "ignore", str(HERE / "prepare_bytes.py"), str(DATA)], check=True
        )


def follow(job: Job, total: int, tokens: int, done: int) -> list[Iteration]:
    """Run the job under a progress bar; `tokens` an iteration.

    The remaining time is that of the mean iteration. The first one counts with the start of the ranks.
    """
    iterations = []
    with tqdm(total=total, initial=done, unit="it", desc="starting", dynamic_ncols=True, smoothing=0) as bar:
        for iteration in job.run():
            iterations.append(iteration)
            if iteration.seconds is None:
                bar.initial, bar.start_t = iteration.iteration, time.time()
            bar.n = iteration.iteration
            bar.set_description("training", refresh=False)
            rate = f"{tokens / iteration.seconds:,.0f} tokens/s, " if iteration.seconds else ""
            bar.set_postfix_str(f"{rate}loss {iteration.loss:.3f}")
    return iterations


def checkpointed(folder: Path) -> int:
    """The iteration of the last checkpoint in `folder`, 0 if there is none."""
    tracker = folder / "latest_checkpointed_iteration.txt"
    return int(tracker.read_text()) if tracker.exists() else 0


def plot(metrics: Path, picture: Path) -> None:
    """Draw the loss of every iteration in `metrics`, if there is any."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it warns of a home that it cannot write to
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    if not metrics.exists():
        return
    lines = {row["iteration"]: row["loss"] for row in map(json.loads, metrics.read_text().splitlines())}
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(list(lines), list(lines.values()), linewidth=1, label="training loss")
    axes.axhline(BIGRAM, color="gray", linestyle="--", linewidth=1, label=f"bigram model ({BIGRAM})")
    axes.set(
        xlabel="iteration", ylabel="nats a byte", title="GPT on the Python standard library, burst attention"
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture, dpi=120)


def main(extra: list[str]) -> int:
    folder = RUNS / "train"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with alone_in(folder):
            return train(folder, extra)
    except TakenError as error:
        print(error, file=sys.stderr)
        return 1


def train(folder: Path, extra: list[str]) -> int:
    """Train in a folder; return the exit status."""
    prepare()
    checkpoint = str(folder / "checkpoint")
    arguments = [
        *MODEL,
        *TRAINING,
        *DATA_ARGUMENTS,
        *BURST,
        *PARALLEL,
        *("--save", checkpoint, "--load", checkpoint, "--save-interval", "60"),
        *extra,
    ]
    saved, total = Path(value_of("--save", arguments)), int(value_of("--train-iters", arguments))
    tokens = int(value_of("--seq-length", arguments)) * int(value_of("--global-batch-size", arguments))
    done = checkpointed(saved)
    if done:
        print(f"resuming from the checkpoint of iteration {done} in {saved}")
    if done >= total:
        print(f"all {total} iterations are done: ask for more (--train-iters), or remove {folder}")
        return 0
    started = time.monotonic()
    try:
        iterations = follow(Job(folder, PROCESSES, arguments), total, tokens, done)
    except (JobFailedError, KeyboardInterrupt) as error:
        last = checkpointed(saved)
        again = (
            f"iteration {last} is saved in {saved}, run again to resume" if last else "nothing is saved yet"
        )
        print(f"training stopped: {str(error) or 'interrupted'}; {again}", file=sys.stderr)
        return 1
    finally:
        plot(folder / "metrics.jsonl", folder / "loss.png")
    print(summary(iterations, tokens, time.monotonic() - started))
    print(f"metrics: {folder / 'metrics.jsonl'}\nloss curve: {folder / 'loss.png'}\ncheckpoint: {saved}")
    if not extra and mean_loss(iterations) >= GOAL:
        print(f"the loss should have fallen below {GOAL}", file=sys.stderr)
        return 1
    return 0


def mean_loss(iterations: Sequence[Iteration]) -> float:
    """Mean loss of the last 10 iterations, nats a byte."""
    return mean(iteration.loss for iteration in iterations[-10:])


def summary(iterations: Sequence[Iteration], tokens: int, seconds: float) -> str:
    """What came of a run, in two lines; `tokens` an iteration."""
    last = len(iterations[-10:])
    times = [iteration.seconds for iteration in iterations if iteration.seconds]
    pace = f", {tokens / mean(times):,.0f} tokens/s" if times else ""
    return (
        f"loss of the last {last} iterations: {mean_loss(iterations):.3f} nats a byte "
        f"(a bigram model has {BIGRAM})\n"
        f"{len(iterations)} iterations of {tokens} tokens in {seconds:.0f} s{pace}"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
