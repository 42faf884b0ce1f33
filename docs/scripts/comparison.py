"""README's plot: predicted time of attention by methods of context parallelism, on H100s."""

from __future__ import annotations

from dataclasses import replace

from drawing import GREY, Drawing, colour

from burst_bench.published.methods import FITTED, MethodPlan, plan_of, seconds_of
from burst_bench.published.rows import Row
from burst_mcore.attention.candidates import legal_degrees
from burst_mcore.attention.schedule.actions import Pass
from burst_plan.machines import MACHINES

RATES = MACHINES["H100"].rates_by(FITTED)
ROW = Row(
    hardware="H100", gpus=8, gpus_per_node=8, heads=64, kv_heads=8, head_dim=128, batch=1, seq=2**17,
    mask="causal", passes="fwd+bwd", method="burst", tflops=1.0,
)  # fmt: skip
LENGTHS = {2**17: "128K", 2**19: "512K", 2**20: "1M"}
METHODS = ("Megatron p2p", "Megatron a2a+p2p (USP)", "Ulysses", "burst", "burst, the best head_parallel")
UNIT, BAR = 70, 20
"""Pixels of the kernel's own time, and of a bar's width."""


def slowdowns(gpus: int, seq: int) -> list[float]:
    """Return the seconds of forward and backward, as multiples of a kernel's that nothing interrupts."""
    row = replace(ROW, gpus=gpus, seq=seq)
    named = [replace(row, method=name) for name in ("ring", "usp", "ulysses", "burst")]
    plans = [plan_of(replace(each, head_parallel=8 if each.method == "usp" else None)) for each in named]
    assert all(isinstance(plan, MethodPlan) for plan in plans), plans
    seconds = [seconds_of(row, plan, RATES) for plan in plans if isinstance(plan, MethodPlan)]
    kernel = seconds_of(replace(row, gpus=1), MethodPlan(), RATES) / gpus
    return [each / kernel for each in [*seconds, min(_by_heads(row))]]


def _by_heads(row: Row) -> list[float]:
    """Return the seconds of burst with each legal number of ranks of a node that share heads."""
    degrees = [d for d in legal_degrees(row.ranks, row.heads, row.kv_heads) if d <= row.ranks.intra]
    plans = [
        MethodPlan(heads=heads, double=True, direction=direction, exchanges=4 * (heads > 1))
        for heads in degrees
        for direction in (Pass.KV, Pass.QUERY)
    ]
    return [seconds_of(row, plan, RATES) for plan in plans]


def comparison() -> Drawing:
    """Time of attention on 8 and 64 H100s, over that of the kernel alone."""
    drawing = Drawing("Predicted time of causal attention on H100s, as multiples of the kernel's own time")
    title = (
        "time of causal attention, forward and backward, over the kernel's own; 64 heads, 8 K/V heads of 128"
    )
    drawing.text(10, 16, title, fill=GREY)
    for number, name in enumerate(METHODS):
        x, y = 10 + 240 * (number % 3), 28 + 20 * (number // 3)
        drawing.box(x, y, 14, 12, colour(number))
        drawing.text(x + 20, y + 11, name)
    floor, x = 90 + 2.6 * UNIT, 10.0
    for gpus in (8, 64):
        for seq, length in LENGTHS.items():
            for number, slowdown in enumerate(slowdowns(gpus, seq)):
                drawing.box(
                    x + BAR * number, floor - UNIT * slowdown, BAR - 3, UNIT * slowdown, colour(number)
                )
                middle = x + BAR * number + (BAR - 3) / 2
                drawing.text(middle, floor - UNIT * slowdown - 4, f"{slowdown:.2f}", size=8, anchor="middle")
            drawing.text(x + 2.5 * BAR, floor + 16, f"{length}, {gpus} GPUs", anchor="middle")
            x += 6 * BAR
    return drawing
