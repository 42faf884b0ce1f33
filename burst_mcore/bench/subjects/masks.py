"""What masks save: attention beside its tiles called bare, beside masked dense attention, and bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from burst_mcore.attention.autotune.choose import Ranks, best, candidates
from burst_mcore.attention.geometry.pattern import Pattern
from burst_mcore.attention.geometry.plan import Plan, plan_for
from burst_mcore.attention.geometry.rows import count, gather
from burst_mcore.attention.geometry.tiles import tiles_of
from burst_mcore.attention.kernels.kernel import BackwardInputs, Kernel, Scores
from burst_mcore.attention.kernels.table import choose
from burst_mcore.attention.numerics.rowwise import row_delta
from burst_mcore.attention.schedule.actions import Pass, Send
from burst_mcore.attention.schedule.route import Route, program
from burst_mcore.attention.shard import Shard
from burst_mcore.bench.core import Bar, Derived, Stage, Subject, Table, Trial, World, over
from burst_mcore.bench.methods.attention import RingCase
from burst_mcore.bench.subjects.attention import on_first, ring_trial
from burst_mcore.explain.problem import DTYPES
from burst_mcore.layout import shard
from burst_mcore.layout.balance import imbalance, keys_per_query
from burst_mcore.machines import CPU

SHORT = 3
"""Times as many rounds of cases without masked dense attention, which takes the most time."""
ROOM = 32
"""Memory that a process takes before anything is measured, in tensors of the whole sequence."""
DENSE_ROWS = 512
"""Query rows of a call of masked dense attention: its mask is as large as this times the sequence."""
DENSE_TOKENS = 8192
"""The unmasked kernel, whose time per pair is the unit, runs on at most so many tokens."""


@dataclass(frozen=True, kw_only=True)
class MaskCase(RingCase):
    """A mask that is measured, and the bars that it must reach."""

    ranks: int = 2
    seq: int = 32768
    heads: int = 2
    dense: float | None = None
    """Masked dense attention must take so many times as long, at least; None: it is not measured."""
    ideal: float | None = None
    """What that would be if time went with pairs."""
    per_pair: float | None = None
    """Time per allowed pair over that of the dense kernel, at most."""


def _cases(device: str) -> Mapping[str, MaskCase]:
    """Return the cases of the paper's table, and packed and sparse masks."""
    n = MaskCase().seq
    window, dilated = f"window:{n // 8}", f"causal & dilated:{n // 8},4"
    documents = "causal & documents:" + ",".join(["8192"] * (n // 8192 - 1))  # the last is what is left
    return {
        "causal, zigzag": MaskCase(dense=1.8, ideal=2.0),
        "window of 1/8, zigzag": MaskCase(mask=window, dense=6.0, ideal=8.5),
        "window of 1/8, contiguous": MaskCase(mask=window, layout="contiguous", dense=6.0, ideal=8.5),
        "documents of 8K, auto": MaskCase(mask=documents, layout="auto", per_pair=1.15, rounds=SHORT),
        "documents of 8K, zigzag": MaskCase(mask=documents, rounds=SHORT),
        "64 documents, auto": MaskCase(
            seq=2 * n, mask="causal & documents:random,64", layout="auto", rounds=SHORT
        ),
        "blocks of 512, 1/4, auto": MaskCase(mask="blocks:512,0.25", layout="auto", rounds=SHORT),
        "dilated by 4, zigzag": MaskCase(mask=dilated, rounds=SHORT),
    }


def _stage(case: MaskCase, world: World) -> Stage:
    kernel, size = choose("auto", case.on_kernel), world.size
    tiles = _bare_tiles(case, kernel)
    units = {
        "tiles, sharing": Trial({"": partial(tiles, world.rank)}),
        "tiles": on_first(world, lambda: [tiles(rank) for rank in range(size)]),
        "dense kernel": on_first(world, _unmasked(case, kernel)),
    }
    if case.dense is not None:
        units["masked dense"] = on_first(world, _masked_dense(case, kernel))
    room = ROOM * case.tensors()[0].nbytes
    return Stage(lambda method: ring_trial(case, world, method), units, room=room)


def _bare_tiles(case: MaskCase, kernel: Kernel) -> Callable[[int], None]:
    """Return a rank's tiles, forward and backward, with no ring and no merging around them."""
    layout, size = case.dealt, case.ranks
    parts = [
        [shard(x, 1, rank=rank, size=size, layout=layout) for x in case.tensors()] for rank in range(size)
    ]
    planned, scores = plan_for(layout, case.seen, case.seq, size), Scores(case.head_dim**-0.5)

    def run(rank: int) -> None:
        q, _, _, dout = parts[rank]
        for source in range(size):
            _, k, v, _ = parts[source]
            for tile in tiles_of(planned, rank, source, kernel.abilities):
                rows = gather(q, tile.q), gather(k, tile.k), gather(v, tile.k)
                out, lse = kernel.forward(*rows, tile.pattern, scores)
                inputs = BackwardInputs(gather(dout, tile.q), *rows, out, lse, lse)
                kernel.backward(inputs, tile.pattern, scores)

    return run


def _unmasked(case: MaskCase, kernel: Kernel) -> Callable[[], None]:
    q, k, v, dout = (x[:, :DENSE_TOKENS] for x in case.tensors())
    pattern, scores = Pattern((q.shape[1], k.shape[1])), Scores(case.head_dim**-0.5)

    def run() -> None:
        out, lse = kernel.forward(q, k, v, pattern, scores)
        kernel.backward(BackwardInputs(dout, q, k, v, out, lse, lse), pattern, scores)

    return run


def _masked_dense(case: MaskCase, kernel: Kernel) -> Callable[[], None]:
    """Attend all queries to all keys with the mask on the scores: the paper's "Attention Masking"."""
    q, k, v, dout = case.tensors()
    scores, rows = Scores(case.head_dim**-0.5), torch.arange(case.seq)
    strips = [slice(first, first + DENSE_ROWS) for first in range(0, case.seq, DENSE_ROWS)]
    masks = [Pattern.from_table(case.seen.allows(rows[strip], rows)) for strip in strips]

    def run() -> None:
        for strip, pattern in zip(strips, masks, strict=True):
            out, lse = kernel.forward(q[:, strip], k, v, pattern, scores)
            delta = row_delta(dout[:, strip], out)
            kernel.backward(
                BackwardInputs(dout[:, strip], q[:, strip], k, v, out, lse, delta), pattern, scores
            )

    return run


def _derive(case: MaskCase, table: Table) -> Derived:
    """Ratios beside the units; and by the plan, how even the work is and what is sent."""
    mask, n = case.seen, case.seq
    per_pair = min(n, DENSE_TOKENS) ** 2 / int(keys_per_query(mask, n).sum())
    for method in (m for m, meter in table if meter == "error"):
        mine = method, "cpu"
        yield method, "cpu / tiles", over(table, mine, ("tiles", "cpu"))
        yield method, "cpu / tiles, sharing", over(table, mine, ("tiles, sharing", "cpu"))
        yield method, "masked dense / this", over(table, ("masked dense", "cpu"), mine)
        ratios = over(table, mine, ("dense kernel", "cpu"))
        yield method, "cpu a pair / dense", [ratio * per_pair for ratio in ratios]
    planned = plan_for(case.dealt, mask, n, case.ranks)
    width = 2 * case.heads * case.head_dim * DTYPES[case.dtype].itemsize
    yield "plan", "busiest / mean", [imbalance(case.dealt, mask, n, case.ranks)]
    yield "plan", "sent", [_rows_sent(planned, _route(case, planned)) * width]
    yield "plan", "all-gather", [(case.ranks - 1) * case.ranks * planned.rows * width]
    yield "plan", "least", [planned.reading(of_queries=False).elsewhere * width]


def _route(case: MaskCase, planned: Plan) -> Route:
    """Return the way that "auto" takes."""
    shape = Shard(
        batch=1,
        tokens=planned.rows,
        heads=case.heads,
        kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        value_dim=case.head_dim,
        dtype=torch.float32,
    )
    return best(
        candidates(
            shape, case.dealt, case.seen, case.seq, Ranks(case.ranks, case.ranks), CPU,
            overlap=True, rings=("double", "flat", "direct"), degrees=(1,), directions=(Pass.QUERY, Pass.KV),
        )
    ).route  # fmt: skip


def _rows_sent(planned: Plan, route: Route) -> int:
    """Rows that all ranks send in a forward."""
    programs = [program(rank, route, Pass.FORWARD, planned) for rank in range(route.size)]
    sends = [action for steps in programs for action in steps if isinstance(action, Send)]
    return sum(planned.rows if action.rows is None else count(action.rows) for action in sends)


def _bars(name: str, case: MaskCase | None, device: str) -> Sequence[Bar]:
    if case is None:
        return ()
    found = [Bar("CPU over its tiles' called bare", "burst", "cpu / tiles", 1.10)]
    if case.dense is not None:
        found.append(Bar("masked dense over it", "burst", "masked dense / this", case.dense, at_most=False))
    if case.per_pair is not None:
        found.append(Bar("per pair over dense kernel", "burst", "cpu a pair / dense", case.per_pair))
    if case.layout == "auto":
        found.append(Bar("busiest rank over mean", "plan", "busiest / mean", 1.05))
    return found


SUBJECT = Subject(
    name="masks",
    about="CPU seconds of attention under masks, forward and backward, over gloo; bytes of the forward.",
    case=MaskCase,
    cases=_cases,
    stage=_stage,
    kind="attention",
    default=("burst",),
    derive=_derive,
    bars=_bars,
)
