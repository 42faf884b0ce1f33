"""Measures what the project claims of a GPU, on one GPU, in a few minutes.

    python benchmarks/gpu.py

from the root of a checkout writes benchmarks/results/<gpu>-<date>.json. Needs torch and triton alone. Every
figure is a ratio of two things timed in turn in this run, or says its unit.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import triton

from burst_mcore import Mask
from burst_mcore.attention.arguments import Shape
from burst_mcore.attention.elementwise import merge_, output_stand_in, row_delta
from burst_mcore.attention.kernels.kernel import Problem, RowGradients, Scores
from burst_mcore.attention.kernels.table import KERNELS
from burst_mcore.attention.plan import plan
from burst_mcore.attention.rows import take
from burst_mcore.attention.seen import Seen
from burst_mcore.attention.tiles import tiles_of
from burst_mcore.bench.virtual_ring import VirtualRank
from burst_mcore.layout import Layout
from burst_mcore.loss import fused_linear_cross_entropy

RESULTS = Path(__file__).parent / "results"
HEADS, DIM = 32, 128


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


def timed(*runs: Callable[[], object], repeats: int) -> list[list[float]]:
    """Milliseconds of each run, in turn, after one round that is not counted."""
    found: list[list[float]] = [[] for _ in runs]
    for repeat in range(repeats + 1):
        for run, times in zip(runs, found, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
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


def _tensor(tokens: int) -> torch.Tensor:
    return torch.randn(1, tokens, HEADS, DIM, device="cuda", dtype=torch.bfloat16)


def stock_kernels(dtype: torch.dtype) -> list[str]:
    """Names of the kernels of others that are here."""
    problem = Problem("cuda", dtype, HEADS, HEADS, DIM, DIM)
    names = [name for name in KERNELS if name not in ("aten-cpu", "reference", "triton")]
    return [name for name in names if KERNELS[name].supports(problem) is None]


def kernels(tokens: int, repeats: int) -> list[Figure]:
    """TFLOP/s of every kernel on a causal square, and ours beside the best of the others."""
    q, k, v, dout = (
        torch.randn(1, tokens, HEADS, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(4)
    )
    seen, how = Seen((tokens, tokens), high=0), Scores(DIM**-0.5)
    names = [*stock_kernels(torch.bfloat16), "triton"]
    flops = 4 * HEADS * DIM * tokens * (tokens + 1) / 2
    out, lse = KERNELS[names[0]].forward(q, k, v, seen, how)
    x = RowGradients(dout, q, k, v, out, lse, row_delta(dout, out))
    forward = timed(*(partial(KERNELS[n].forward, q, k, v, seen, how) for n in names), repeats=repeats)
    backward = timed(*(partial(KERNELS[n].backward, x, seen, how) for n in names), repeats=repeats)
    found = []
    for pass_, times, work, bar in (("forward", forward, 1, 0.70), ("backward", backward, 2.5, 0.60)):
        for name, each in zip(names, times, strict=True):
            rates = [work * flops / (ms * 1e9) for ms in each]
            found.append(figure(f"{name}, causal {tokens}, {pass_}", rates, "TFLOP/s"))
        best = min(range(len(names) - 1), key=lambda i: statistics.median(times[i]))
        found.append(
            figure(f"triton over {names[best]}, causal {pass_}", over(times[best], times[-1]), "x", bar)
        )
    return found


def best_of(alone: list[Figure]) -> str:
    """The stock kernel whose causal forward and backward together were fastest."""
    rates = {each.what: each.value for each in alone}

    def seconds(name: str) -> float:
        mine = [(what, rate) for what, rate in rates.items() if what.startswith(f"{name}, causal")]
        return sum((1.0 if what.endswith("forward") else 2.5) / rate for what, rate in mine)

    return min(stock_kernels(torch.bfloat16), key=seconds)


def sparse(tokens: int, repeats: int) -> list[Figure]:
    """Blocks of which three quarters are empty: ours in one call beside the best other, block by block."""
    blocks = tokens // 512
    matrix = torch.rand(blocks, blocks, generator=torch.Generator().manual_seed(0)) < 0.25
    what = plan(Layout("contiguous"), Mask.blocks(matrix, 512), tokens, 1)
    q, k, v, dout = (
        torch.randn(1, tokens, HEADS, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(4)
    )
    how, times = Scores(DIM**-0.5), {}

    def both_ways(name: str) -> Callable[[], None]:
        kernel = KERNELS[name]
        found = tiles_of(what, 0, 0, kernel.abilities)

        def run() -> None:
            for tile in found:
                rows = take(q, tile.q), take(k, tile.k), take(v, tile.k)
                out, lse = kernel.forward(*rows, tile.seen, how)
                kernel.backward(RowGradients(take(dout, tile.q), *rows, out, lse, lse), tile.seen, how)

        return run

    names = [*stock_kernels(torch.bfloat16), "triton"]
    for name, each in zip(names, timed(*map(both_ways, names), repeats=repeats), strict=True):
        times[name] = each
    best = min(names[:-1], key=lambda name: statistics.median(times[name]))
    ratio = over(times[best], times["triton"])
    return [figure(f"triton over {best}, 3/4 of the blocks empty, both ways", ratio, "x", 1.0)]


def ring(size: int, tokens: int, source: str, direction: str, kernel: str, repeats: int) -> list[Figure]:
    """A virtual rank beside its kernel alone on the same tiles, and beside itself without copies."""
    shape = Shape(1, tokens, HEADS, HEADS, DIM, DIM)
    rank, alone = (
        VirtualRank(shape, size, mask=Mask.causal(), source=s, direction=direction)
        for s in (source, "nowhere")
    )
    done = rank.forward()
    forward, bare, quiet = timed(rank.forward, rank.bare_forward, alone.forward, repeats=repeats)
    backward, bare_back, quiet_back = timed(
        lambda: rank.backward(done),
        lambda: rank.bare_backward(done),
        lambda: alone.backward(done),
        repeats=repeats,
    )
    whole, bare_whole, quiet_whole = (
        [a + b for a, b in zip(x, y, strict=True)]
        for x, y in ((forward, backward), (bare, bare_back), (quiet, quiet_back))
    )
    where = f"{kernel}, ring of {size}, {tokens} local tokens, from {source}, {direction}"
    flops = 4 * HEADS * DIM * rank.pairs
    judged = size == 8 and source == "device" and tokens >= 32768
    return [
        figure(f"{where}: forward of the kernel's speed", over(bare, forward), "x", 0.95 if judged else None),
        figure(
            f"{where}: both of the kernel's speed", over(bare_whole, whole), "x", 0.92 if judged else None
        ),
        figure(
            f"{where}: with copies over without",
            over(whole, quiet_whole),
            "x",
            1.03 if judged else None,
            True,
        ),
        figure(f"{where}: backward", [2.5 * flops / (ms * 1e9) for ms in backward], "TFLOP/s"),
        figure(f"{where}: backward of the kernel", [2.5 * flops / (ms * 1e9) for ms in bare_back], "TFLOP/s"),
    ]


def passes(tokens: int, repeats: int) -> list[Figure]:
    """The passes around the kernels: GB/s of the bytes that each must move."""
    dout, out_t = (torch.randn(1, tokens, HEADS, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out, lse = out_t.float(), torch.randn(1, HEADS, tokens, device="cuda")
    lse_t, delta = torch.randn_like(lse), row_delta(dout, out_t)
    rows = tokens * HEADS
    runs = {
        "D": (lambda: row_delta(dout, out_t), rows * (4 * DIM + 4)),
        "stand-in for O": (lambda: output_stand_in(dout, delta), rows * (4 * DIM + 4)),
        "merge": (lambda: merge_(out, lse, out_t, lse_t), rows * (10 * DIM + 12)),
    }
    times = timed(*(run for run, _ in runs.values()), repeats=repeats)
    return [
        figure(f"{name}, {tokens} tokens", [size / (ms * 1e6) for ms in each], "GB/s")
        for (name, (_, size)), each in zip(runs.items(), times, strict=True)
    ]


def heads_and_losses(tokens: int, repeats: int, hidden: int = 4096, vocabulary: int = 128256) -> list[Figure]:
    """Forward and backward of the fused head and loss over its three products alone, ours and others'."""
    h = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(vocabulary, hidden, device="cuda", dtype=torch.bfloat16).mul_(hidden**-0.5)
    w.requires_grad_()
    y = torch.randint(0, vocabulary, (tokens,), device="cuda")
    chunk = min(tokens, 4096)
    x = torch.empty(chunk, vocabulary, device="cuda", dtype=torch.bfloat16)
    u, dw = torch.empty(chunk, hidden, device="cuda", dtype=torch.bfloat16), torch.empty_like(w)

    def products() -> None:
        for at in range(0, tokens, chunk):
            part = h.detach()[at : at + chunk]
            torch.mm(part, w.detach().t(), out=x)
            torch.mm(x, w.detach(), out=u)
            torch.mm(x.t(), part, out=dw)

    def both_ways(loss: Callable[..., torch.Tensor]) -> Callable[[], None]:
        def run() -> None:
            h.grad = w.grad = None
            loss().backward()

        return run

    methods = {"burst": both_ways(lambda: fused_linear_cross_entropy(h, w, y))}
    try:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        methods["Liger"] = both_ways(lambda: LigerFusedLinearCrossEntropyLoss()(w, h, y))
    except ImportError as error:
        print(f"Liger is not measured: {error}")
    try:
        from cut_cross_entropy import linear_cross_entropy

        methods["CCE"] = both_ways(lambda: linear_cross_entropy(h, w, y))
    except ImportError as error:
        print(f"CCE is not measured: {error}")
    alone, *times = timed(products, *methods.values(), repeats=repeats)
    name = f"head and loss, {tokens} x {hidden} x {vocabulary}"
    found = [figure(f"{name}: three products alone", alone, "ms")]
    for method, each in zip(methods, times, strict=True):
        bar = 1.10 if method == "burst" else None
        found.append(figure(f"{name}: {method} over three products", over(each, alone), "x", bar, True))
        if method != "burst":
            found.append(figure(f"{name}: {method} over burst", over(each, times[0]), "x", 1.0))
    return found


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=32768, help="local tokens of the virtual ring of 8")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no GPU here: nothing was measured")
    alone = kernels(16384, args.repeats)
    best = best_of(alone)
    found = [*alone, *sparse(16384, args.repeats), *passes(args.tokens, args.repeats)]
    for tokens in (4096, 32768):
        found += heads_and_losses(tokens, args.repeats)
    for size, tokens in ((1, args.tokens), (2, args.tokens), (8, args.tokens), (64, args.tokens // 8)):
        for source in ("device", "host"):
            for direction in ("query", "kv") if size == 8 else ("query",):
                found += ring(size, tokens, source, direction, best, args.repeats)
    for each in found:
        bar = (
            "" if each.bar is None else f"   bar {'<=' if each.at_most else '>='} {each.bar}: {each.reached}"
        )
        print(f"{each.value:10.3f} {each.unit:8s} +-{each.spread / 2:4.0%}  {each.what}{bar}", flush=True)
    gpu = torch.cuda.get_device_name().replace(" ", "-").lower()
    out = args.out or RESULTS / f"{gpu}-{datetime.date.today()}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    what = {
        "gpu": torch.cuda.get_device_name(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        },
        "dtype": "bfloat16",
        "heads": HEADS,
        "head_dim": DIM,
        "repeats": args.repeats,
        "kernels": stock_kernels(torch.bfloat16),
        "figures": [{**asdict(each), "reached": each.reached} for each in found],
    }
    out.write_text(json.dumps(what, indent=1) + "\n")
    print(f"all figures: {out}")


if __name__ == "__main__":
    main()
