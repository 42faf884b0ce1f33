"""Options that several commands of `burst-mcore` share, and the ranks and rates that they name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from burst_mcore.attention.geometry.shard import Ranks
    from burst_mcore.rates import Rates

Heads = Annotated[int, typer.Option(help="Number of query heads.")]
KVHeads = Annotated[int | None, typer.Option(help="Number of K/V heads; default: as many as query heads.")]
Seq = Annotated[str, typer.Option(help="Tokens of the whole sequence, such as 4096, 128K or 1M.")]
HeadDim = Annotated[int, typer.Option(help="Size of a head.")]
ValueDim = Annotated[int | None, typer.Option(help="Size of a head of V; default: that of Q and K.")]
LatentText = Annotated[
    str | None, typer.Option(help="Multi-latent attention: latent + rope key that rotate, such as 512+64.")
]
BatchOption = Annotated[int, typer.Option(help="Sequences in a batch.")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16 or float16.")]
ClusterOption = Annotated[
    str, typer.Option(help="Nodes x ranks of a node, such as 4x8; with a machine, such as a800:4x8.")
]
MaskText = Annotated[
    str, typer.Option(help="Mask, such as causal, full, window:4096 or 'causal & documents:random,64'.")
]
LayoutText = Annotated[
    str,
    typer.Option(
        help="zigzag, contiguous, striped, stacked-zigzag:K, block-striped:B or zigzag-documents; auto "
        "balances the mask."
    ),
]
RingOption = Annotated[
    str, typer.Option(help="Route between ranks: double, flat, direct, or auto for the cost model.")
]
Overlap = Annotated[bool, typer.Option(help="Communicate while ranks compute.")]
Gpu = Annotated[
    str | None,
    typer.Option(
        help="A GPU that has no preset: memory=24GB,tflops=165,gb=1008 are its memory, dense peak in 16 "
        "bits and GB/s of memory; link=32 within a node, nic=12.5 between nodes, in GB/s one way."
    ),
]
RatesFile = Annotated[
    Path | None,
    typer.Option("--rates", help="File of rates, as calibrate writes it; in place of a machine's preset."),
]


def ranks_and_rates(cluster: str, rates_file: Path | None, gpu: str | None) -> tuple[Ranks, Rates]:
    """Return the ranks and the rates that options name."""
    import torch

    from burst_mcore.rates import Rates, default_rates
    from burst_plan.explain.predict import cluster as parse
    from burst_plan.machines import MACHINES

    where, machine = parse(cluster, gpu)
    if rates_file is not None and machine is not None:
        raise ValueError(
            f"--rates {rates_file} and a machine by --cluster {cluster} or --gpu: give one of them"
        )
    if rates_file is not None:
        return where, Rates.load(rates_file)
    if machine is None and torch.cuda.is_available():
        return where, default_rates("cuda")
    return where, (machine or MACHINES["A800"]).rates
