"""The options that several commands of `burst-mcore` have, and the ranks and rates that they name."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from burst_mcore.attention.autotune.ways import Ranks
    from burst_mcore.rates import Rates

Heads = Annotated[int, typer.Option(help="Number of query heads.")]
KVHeads = Annotated[int | None, typer.Option(help="Number of K/V heads; default: as many as query heads.")]
Seq = Annotated[str, typer.Option(help="Tokens of the whole sequence, such as 4096, 128K or 1M.")]
HeadDim = Annotated[int, typer.Option(help="Size of a head.")]
ValueDim = Annotated[int | None, typer.Option(help="Size of a head of V; default: that of Q and K.")]
LatentText = Annotated[
    str | None,
    typer.Option(
        "--latent",
        help="Multi-latent attention: what travels for K and V, a latent + a rope key such as 512+64.",
    ),
]
BatchOption = Annotated[int, typer.Option(help="Sequences in a batch.")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16 or float16.")]
ClusterOption = Annotated[
    str, typer.Option(help="Nodes x ranks of a node, such as 4x8; with a machine, such as a800:4x8.")
]
MaskText = Annotated[
    str,
    typer.Option("--mask", help="Mask, such as causal, full, window:4096 or 'causal & documents:random,64'."),
]
LayoutText = Annotated[
    str,
    typer.Option(
        "--layout",
        help="zigzag, contiguous, striped, stacked-zigzag:K, block-striped:B or zigzag-documents; auto "
        "balances the mask.",
    ),
]
RingOption = Annotated[
    str, typer.Option(help="Route between ranks: double, flat, direct, or auto for the cost model.")
]
MeshOption = Annotated[
    str, typer.Option(help="Rings side by side: none, or rows x columns as 2x4; explain also takes auto.")
]
Overlap = Annotated[bool, typer.Option(help="Communicate while ranks compute.")]
IntraGB = Annotated[float | None, typer.Option(help="Bandwidth from a rank to ranks of its node, in GB/s.")]
InterGB = Annotated[float | None, typer.Option(help="Bandwidth from a rank to other nodes, in GB/s.")]
Tflops = Annotated[float | None, typer.Option(help="Speed of the kernel in both passes, in TFLOP/s.")]
Latency = Annotated[float | None, typer.Option(help="Latency of a message, in microseconds.")]
Gpu = Annotated[
    str | None,
    typer.Option(
        help="A machine without a name here: memory=24GB,tflops=165,gb=1008 are its memory, dense peak in 16 "
        "bits and GB/s of memory; link=32 within a node, nic=12.5 between nodes, in GB/s one way."
    ),
]
RatesFile = Annotated[
    Path | None,
    typer.Option("--rates", help="File of rates, as calibrate writes it; in place of a machine's preset."),
]


def ranks_and_rates(
    cluster: str,
    rates_file: Path | None,
    intra_gb: float | None,
    inter_gb: float | None,
    tflops: float | None,
    latency_us: float | None,
    gpu: str | None = None,
) -> tuple[Ranks, Rates]:
    """Return the ranks and the rates that options name; single numbers replace those of the machine."""
    import torch

    from burst_mcore.machines import MACHINES, default_rates
    from burst_mcore.rates import Rates
    from burst_plan.explain.predict import cluster as parse

    where, machine = parse(cluster, gpu)
    if rates_file is not None and machine is not None:
        raise ValueError(
            f"--rates {rates_file} and a machine by --cluster {cluster} or --gpu: give one of them"
        )
    if rates_file is not None:
        rates = Rates.load(rates_file)
    elif machine is None and torch.cuda.is_available():
        rates = default_rates("cuda")
    else:
        rates = (machine or MACHINES["A800"]).rates
    values: dict[str, Any] = {}
    for name, number, unit in (
        ("intra", intra_gb, 1e9),
        ("inter", inter_gb, 1e9),
        ("compute", tflops, 1e12),
        ("latency", latency_us, 1e-6),
    ):
        values |= {} if number is None else {name: number * unit}
    if tflops is not None:  # all that the kernel takes
        values |= {"backward": None, "exponentials": math.inf, "fill": 0.0}
    return where, replace(rates, **values)
