"""Measures what the project claims of a GPU, on one GPU, in a few minutes.

    python benchmarks/gpu.py

from the root of a checkout writes benchmarks/results/<gpu>-<date>.json, anew after each group of figures. A
group that fails is an error in it and costs no other; the exit status is 1 then. Needs torch and triton
alone. Every figure is a ratio of two things timed in turn in this run, or says its unit.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import triton

from burst_mcore import Mask
from burst_mcore.attention.geometry.pattern import Seen
from burst_mcore.attention.geometry.plan import plan
from burst_mcore.attention.geometry.rows import take
from burst_mcore.attention.geometry.tiles import tiles_of
from burst_mcore.attention.kernels.kernel import Problem, RowGradients, Scores
from burst_mcore.attention.kernels.table import KERNELS
from burst_mcore.attention.numerics.rowwise import merge_, output_stand_in, row_delta
from burst_mcore.attention.shard import Shard
from burst_mcore.bench.virtual_ring import VirtualRank
from burst_mcore.layout import Layout
from burst_mcore.loss import fused_linear_cross_entropy
from burst_mcore.version import __version__

RESULTS = Path(__file__).parent / "results"
DEVICE = "cuda"
HEADS, DIM = 32, 128
HIDDEN, VOCABULARY = 4096, 128256
LOCAL_TOKENS = 32768
"""Of a ring of 8, with which its bars are meant."""
LIBRARIES = ("flash_attn", "flash_attn_interface", "transformer_engine", "liger_kernel", "cut_cross_entropy")
"""Modules whose versions are told, where they are installed."""
TFLOPS = 575
"""That a ring's backward should reach where its kernel alone does, on an H200."""
HEAD_START = 10**8
"""Clock cycles, about 50 ms, that a GPU sleeps so that the host gets ahead of it."""
Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Of hidden states [tokens, d], the head's weight [v, d] and labels [tokens]."""


@dataclass(frozen=True)
class Figure:
    """One measured figure, its spread over repeats, and the bar that it should reach on an H200."""

    what: str
    value: float
    spread: float
    """(largest - smallest) / median of the repeats."""
    unit: str
    bar: float | None = None
    at_most: bool = False

    @property
    def reached(self) -> bool | None:
        if self.bar is None:
            return None
        return self.value <= self.bar if self.at_most else self.value >= self.bar


def timed(*runs: Callable[[], object], repeats: int, ahead: bool = False) -> list[list[float]]:
    """Milliseconds of each run, in turn, after one round that is not counted.

    What the device waits for the host counts; with `ahead` it sleeps first, so that it need not wait.
    """
    found: list[list[float]] = [[] for _ in runs]
    for repeat in range(repeats + 1):
        for run, times in zip(runs, found, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            if ahead:
                torch.cuda._sleep(HEAD_START)
            start.record()
            run()
            end.record()
            end.synchronize()
            if repeat:
                times.append(start.elapsed_time(end))
    return found


def figure(
    what: str, values: list[float], unit: str, bar: float | None = None, at_most: bool = False
) -> Figure:
    """The median of `values`."""
    median = statistics.median(values)
    return Figure(what, median, (max(values) - min(values)) / median, unit, bar, at_most)


def over(ours: list[float], theirs: list[float]) -> list[float]:
    """Ratios, repeat by repeat."""
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def added(ours: list[float], more: list[float]) -> list[float]:
    """Sums, repeat by repeat."""
    return [a + b for a, b in zip(ours, more, strict=True)]


def drawn(tokens: int) -> tuple[torch.Tensor, ...]:
    """Random q, k, v and dout [1, tokens, heads, head dim]."""
    shape = 1, tokens, HEADS, DIM
    return tuple(torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(4))


def stock_kernels() -> dict[str, str | None]:
    """Names of the kernels of others, each with None, or the reason why it cannot serve here."""
    problem = Problem(DEVICE, torch.bfloat16, HEADS, HEADS, DIM, DIM)
    names = [name for name in KERNELS if name not in ("reference", "triton")]
    return {name: KERNELS[name].supports(problem) for name in names}


def tried(name: str) -> list[Figure]:
    """No figure; an error, if a kernel that should serve does not."""
    q, k, v, dout = drawn(256)
    kernel, seen, how = KERNELS[name], Seen((256, 256), high=0), Scores(DIM**-0.5)
    out, lse = kernel.forward(q, k, v, seen, how)
    x = RowGradients(dout, q, k, v, out, lse, row_delta(dout, out))
    if not all(bool(y.isfinite().all()) for y in (out, lse, *kernel.backward(x, seen, how))):
        raise ArithmeticError(f"{name} gave what is not finite")
    return []


def kernels(names: Sequence[str], tokens: int, repeats: int) -> dict[tuple[str, str], list[float]]:
    """TFLOP/s of kernels, timed in turn on a causal square, by name and pass."""
    q, k, v, dout = drawn(tokens)
    seen, how = Seen((tokens, tokens), high=0), Scores(DIM**-0.5)
    flops = 4 * HEADS * DIM * tokens * (tokens + 1) / 2
    out, lse = KERNELS[names[0]].forward(q, k, v, seen, how)
    x = RowGradients(dout, q, k, v, out, lse, row_delta(dout, out))
    all_ = [KERNELS[name] for name in names]
    forward = timed(*(partial(one.forward, q, k, v, seen, how) for one in all_), repeats=repeats, ahead=True)
    backward = timed(*(partial(one.backward, x, seen, how) for one in all_), repeats=repeats, ahead=True)
    return {
        (name, pass_): [work * flops / (ms * 1e9) for ms in each]
        for pass_, times, work in (("forward", forward, 1), ("backward", backward, 2.5))
        for name, each in zip(names, times, strict=True)
    }


def best_of(figures: Sequence[Figure], *passes: str) -> str:
    """The kernel of `stock` whose passes together were fastest."""
    seconds: dict[str, float] = {}
    for each in figures:
        name, _, pass_ = each.what.split(", ")
        if pass_ in passes:
            seconds[name] = seconds.get(name, 0.0) + (1.0 if pass_ == "forward" else 2.5) / each.value
    if not seconds:
        raise LookupError("no kernel of others was measured here")
    return min(seconds, key=lambda name: seconds[name])


def stock(names: Sequence[str], tokens: int, repeats: int) -> list[Figure]:
    """TFLOP/s of the kernels of others."""
    if not names:
        raise LookupError("no kernel of others is here")
    return [
        figure(f"{name}, causal {tokens}, {pass_}", rates, "TFLOP/s")
        for (name, pass_), rates in kernels(names, tokens, repeats).items()
    ]


def ours(alone: Sequence[Figure], tokens: int, repeats: int) -> list[Figure]:
    """Our Triton kernel beside the best of the others in each pass."""
    found = []
    for pass_, bar in (("forward", 0.70), ("backward", 0.60)):
        best = best_of(alone, pass_)
        rates = kernels([best, "triton"], tokens, repeats)
        mine, theirs = rates["triton", pass_], rates[best, pass_]
        found.append(figure(f"triton, causal {tokens}, {pass_}", mine, "TFLOP/s"))
        found.append(figure(f"triton over {best}, causal {pass_}", over(mine, theirs), "x", bar))
    return found


def sparse(names: Sequence[str], tokens: int, repeats: int) -> list[Figure]:
    """Blocks of which three quarters are empty: ours in one call beside the best other, block by block."""
    if not names:
        raise LookupError("no kernel of others is here")
    matrix = torch.rand(32, 32, generator=torch.Generator().manual_seed(0)) < 0.25
    what = plan(Layout("contiguous"), Mask.blocks(matrix, tokens // 32), tokens, 1)
    q, k, v, dout = drawn(tokens)
    how, all_names = Scores(DIM**-0.5), [*names, "triton"]

    def both_ways(name: str) -> Callable[[], None]:
        kernel = KERNELS[name]
        found = tiles_of(what, 0, 0, kernel.abilities)

        def run() -> None:
            for tile in found:
                rows = take(q, tile.q), take(k, tile.k), take(v, tile.k)
                out, lse = kernel.forward(*rows, tile.seen, how)
                kernel.backward(RowGradients(take(dout, tile.q), *rows, out, lse, lse), tile.seen, how)

        return run

    times = dict(zip(all_names, timed(*map(both_ways, all_names), repeats=repeats), strict=True))
    best = min(names, key=lambda name: statistics.median(times[name]))
    ratio = over(times[best], times["triton"])
    return [figure(f"triton over {best}, 3/4 of the blocks empty, both ways", ratio, "x", 1.0)]


def ring(
    size: int, tokens: int, source: str, direction: str, best: Callable[[], str], repeats: int
) -> list[Figure]:
    """A virtual rank beside its kernel alone on the same tiles, and beside itself without copies.

    And, of the time without copies, how much is not the kernel's: that of the same passes when their kernel
    does nothing. The host is ahead of the device there, as it is where kernels take their time.
    """
    shape = Shard(
        batch=1,
        tokens=tokens,
        heads=HEADS,
        kv_heads=HEADS,
        head_dim=DIM,
        value_dim=DIM,
        dtype=torch.bfloat16,
    )
    given = {"mask": Mask.causal(), "direction": direction, "kernel": best(), "device": DEVICE}
    rank, quiet = (VirtualRank(shape, size, source=s, **given) for s in (source, "nowhere"))
    idle = VirtualRank(shape, size, source="nowhere", works=False, **given)
    done = rank.forward()
    queries = rank.queries(done)
    forward, bare, quiet_forward = timed(rank.forward, rank.bare_forward, quiet.forward, repeats=repeats)
    backward, bare_back, quiet_back = timed(
        partial(rank.backward, done),
        partial(rank.bare_backward, queries, done.out),
        partial(quiet.backward, done),
        repeats=repeats,
    )
    around = added(*timed(idle.forward, partial(idle.backward, done), repeats=repeats, ahead=True))
    whole, bare_whole, quiet_whole = (
        added(forward, backward),
        added(bare, bare_back),
        added(quiet_forward, quiet_back),
    )
    flops = 4 * HEADS * DIM * rank.pairs
    rates, bare_rates = ([2.5 * flops / (ms * 1e9) for ms in each] for each in (backward, bare_back))
    judged = size == 8 and source == "device" and tokens >= LOCAL_TOKENS
    reached = statistics.median(bare_rates) >= TFLOPS
    where = f"{rank.call.kernel.name}, ring of {size}, {tokens} local tokens, from {source}, {direction}"

    def of(what: str, values: list[float], unit: str, bar: float, at_most: bool = False) -> Figure:
        return figure(f"{where}: {what}", values, unit, bar if judged else None, at_most)

    return [
        of("forward of the kernel's speed", over(bare, forward), "x", 0.95),
        of("both of the kernel's speed", over(bare_whole, whole), "x", 0.92),
        of("with copies over without", over(whole, quiet_whole), "x", 1.03, at_most=True),
        of("share of the time around the kernels", over(around, quiet_whole), "x", 0.02, at_most=True),
        figure(f"{where}: backward", rates, "TFLOP/s", TFLOPS if judged and reached else None),
        figure(f"{where}: backward of the kernel", bare_rates, "TFLOP/s"),
    ]


def rings(tokens: int) -> Iterator[tuple[int, int, str, str]]:
    """(size, local tokens, source, direction); fewer tokens where there are many ranks, to end in time."""
    for size, fewer in ((1, 1), (2, 1), (4, 1), (8, 1), (16, 2), (32, 2), (64, 4)):
        yield size, tokens // fewer, "device", "query"
    for source, direction in (("device", "kv"), ("host", "query"), ("host", "kv")):
        yield 8, tokens, source, direction
    yield 64, tokens // 4, "host", "query"


def passes(tokens: int, repeats: int) -> list[Figure]:
    """The passes around the kernels: GB/s of the bytes that each must move."""
    dout, out_t, *_ = drawn(tokens)
    out, lse = out_t.float(), torch.randn(1, HEADS, tokens, device=DEVICE)
    lse_t, delta = torch.randn_like(lse), row_delta(dout, out_t)
    rows = tokens * HEADS
    runs = {
        "D": (lambda: row_delta(dout, out_t), rows * (4 * DIM + 4)),
        "stand-in for O": (lambda: output_stand_in(dout, delta), rows * (4 * DIM + 4)),
        "merge": (lambda: merge_(out, lse, out_t, lse_t), rows * (10 * DIM + 12)),
    }
    times = timed(*(run for run, _ in runs.values()), repeats=repeats, ahead=True)
    return [
        figure(f"{name}, {tokens} tokens", [size / (ms * 1e6) for ms in each], "GB/s")
        for (name, (_, size)), each in zip(runs.items(), times, strict=True)
    ]


def liger() -> Loss:
    """Liger's head and loss."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss()
    return lambda h, w, y: loss(w, h, y)


def cce() -> Loss:
    """Cut Cross-Entropy."""
    from cut_cross_entropy import linear_cross_entropy

    return linear_cross_entropy


OTHERS: dict[str, tuple[str, Callable[[], Loss]]] = {
    "Liger": ("liger_kernel", liger),
    "CCE": ("cut_cross_entropy", cce),
}
"""Heads with their loss of others: the module, and what gets the loss of it."""


def head_and_loss(tokens: int, repeats: int, other: str | None = None) -> list[Figure]:
    """Forward and backward of the fused head and loss over its three products alone; or of another's."""
    h = torch.randn(tokens, HIDDEN, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(VOCABULARY, HIDDEN, device=DEVICE, dtype=torch.bfloat16).mul_(HIDDEN**-0.5)
    w.requires_grad_()
    y = torch.randint(0, VOCABULARY, (tokens,), device=DEVICE)
    chunk = min(tokens, 4096)
    x = torch.empty(chunk, VOCABULARY, device=DEVICE, dtype=torch.bfloat16)
    u, dw = torch.empty(chunk, HIDDEN, device=DEVICE, dtype=torch.bfloat16), torch.empty_like(w)

    def products() -> None:
        for at in range(0, tokens, chunk):
            part = h.detach()[at : at + chunk]
            torch.mm(part, w.detach().t(), out=x)
            torch.mm(x, w.detach(), out=u)
            torch.mm(x.t(), part, out=dw)

    def both_ways(loss: Loss) -> None:
        h.grad = w.grad = None
        loss(h, w, y).backward()

    name = f"head and loss, {tokens} x {HIDDEN} x {VOCABULARY}"
    burst = partial(both_ways, fused_linear_cross_entropy)
    if other is None:
        alone, mine = timed(products, burst, repeats=repeats)
        return [
            figure(f"{name}: three products alone", alone, "ms"),
            figure(f"{name}: burst over three products", over(mine, alone), "x", 1.10, at_most=True),
        ]
    theirs = partial(both_ways, OTHERS[other][1]())
    alone, mine, others = timed(products, burst, theirs, repeats=repeats)
    return [
        figure(f"{name}: {other} over three products", over(others, alone), "x"),
        figure(f"{name}: {other} over burst", over(others, mine), "x", 1.0),
    ]


class Report:
    """What was measured so far, in a file that is written anew after each group of figures."""

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        self.path, self.about = path, about
        self.figures: list[Figure] = []
        self.errors: list[dict[str, str]] = []
        self.seconds: dict[str, float] = {}

    def group(self, name: str, measure: Callable[[], list[Figure]]) -> list[Figure]:
        """Its figures; none if it failed, which is written down."""
        start, found = time.perf_counter(), []
        try:
            torch.cuda.empty_cache()
            found = measure()
        except Exception as error:
            traceback.print_exc()
            first = (str(error).strip() or "no words").splitlines()[0]
            self.errors.append({"group": name, "error": f"{type(error).__name__}: {first}"})
        self.seconds[name] = round(time.perf_counter() - start, 1)
        print(f"{name}: {self.seconds[name]} s", flush=True)
        for each in found:
            sign = "<=" if each.at_most else ">="
            bar = "" if each.bar is None else f"   bar {sign} {each.bar}: {each.reached}"
            print(f"{each.value:10.3f} {each.unit:8s} +-{each.spread / 2:4.0%}  {each.what}{bar}", flush=True)
        self.figures += found
        self.write()
        return found

    def failed(self, name: str) -> bool:
        """Whether this group did."""
        return any(error["group"] == name for error in self.errors)

    def write(self) -> None:
        """The file."""
        figures = [{**asdict(each), "reached": each.reached} for each in self.figures]
        what = {**self.about, "seconds": self.seconds, "errors": self.errors, "figures": figures}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(what, indent=1) + "\n")


def measure(report: Report, names: Sequence[str], tokens: int, repeats: int) -> None:
    """All groups, with those of the stock kernels `names` that run."""
    for name in (*names, "triton"):
        report.group(f"{name} runs", partial(tried, name))
    names = [name for name in names if not report.failed(f"{name} runs")]
    alone = report.group("stock kernels alone", partial(stock, names, tokens // 2, repeats))
    report.group("triton alone", partial(ours, alone, tokens // 2, repeats))
    report.group("triton, blocks", partial(sparse, names, tokens // 2, repeats))
    report.group("passes around the kernels", partial(passes, tokens, repeats))
    losses = [None, *(name for name, (module, _) in OTHERS.items() if find_spec(module))]
    for each, other in product((tokens // 8, tokens), losses):
        name = f"head and loss, {each} tokens{f', {other}' if other else ''}"
        report.group(name, partial(head_and_loss, each, repeats, other))
    best = partial(best_of, alone, "forward", "backward")
    for size, local, source, direction in rings(tokens):
        name = f"ring of {size}, from {source}, {direction}"
        report.group(name, partial(ring, size, local, source, direction, best, repeats))


def versions() -> dict[str, str | int | None]:
    """Of what could change a figure."""
    of_module = metadata.packages_distributions()
    libraries = {package for module in LIBRARIES for package in of_module.get(module, ())}
    return {
        "burst_mcore": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "driver": driver(),
        **{package: metadata.version(package) for package in sorted(libraries)},
    }


def driver() -> str | None:
    """The version of the GPU's driver, where nvidia-smi is there to say it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return said.split()[0] if said.split() else None


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--tokens", type=int, default=LOCAL_TOKENS, help="local tokens of the virtual ring of 8"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no GPU here: nothing was measured")
    start, gpu, found = time.perf_counter(), torch.cuda.get_device_name(), stock_kernels()
    names = [name for name, reason in found.items() if reason is None]
    about = {
        "gpu": gpu,
        "versions": versions(),
        "dtype": "bfloat16",
        "heads": HEADS,
        "head_dim": DIM,
        "repeats": args.repeats,
        "kernels": names,
        "kernels that are not here": {name: reason for name, reason in found.items() if reason},
    }
    out = args.out or RESULTS / f"{gpu.replace(' ', '-').lower()}-{datetime.date.today()}.json"
    report = Report(out, about)
    measure(report, names, args.tokens, args.repeats)
    print(f"all figures, in {time.perf_counter() - start:.0f} s: {out}")
    for error in report.errors:
        print(f"failed: {error['group']}: {error['error']}")
    sys.exit(1 if report.errors else 0)


if __name__ == "__main__":
    main()
