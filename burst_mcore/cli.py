"""The command `burst-mcore`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, NoReturn

try:
    import typer
except ImportError:
    sys.exit("burst-mcore needs the packages of its extra 'bench': pip install 'burst-mcore[bench]'")

from burst_mcore.rates import Rates

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Predict, draw and measure BurstAttention on a cluster, and check configurations of DeepSpeed.",
)
bench = typer.Typer(no_args_is_help=True, help="Measure methods side by side on this machine.")
app.add_typer(bench, name="bench")

MEASURED_TOKENS = 16384
"""The longest sequence that `draw --measure` runs."""

Heads = Annotated[int, typer.Option(help="Number of query heads.")]
KVHeads = Annotated[int | None, typer.Option(help="Number of K/V heads; default: as many as query heads.")]
Seq = Annotated[str, typer.Option(help="Tokens of the whole sequence, such as 4096, 128K or 1M.")]
HeadDim = Annotated[int, typer.Option(help="Size of a head.")]
Batch = Annotated[int, typer.Option(help="Sequences in a batch.")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16 or float16.")]
Cluster = Annotated[str, typer.Option(help="Nodes x ranks of a node, such as 4x8.")]
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
Ring = Annotated[
    str, typer.Option(help="Route between ranks: double, flat, direct, or auto for the cost model.")
]
Overlap = Annotated[bool, typer.Option(help="Communicate while ranks compute.")]
IntraGB = Annotated[float, typer.Option(help="Bandwidth from a rank to ranks of its node, in GB/s.")]
InterGB = Annotated[float, typer.Option(help="Bandwidth from a rank to other nodes, in GB/s.")]
Tflops = Annotated[float, typer.Option(help="Speed of the attention kernel, in TFLOP/s.")]
Latency = Annotated[float, typer.Option(help="Latency of a message, in microseconds.")]


@app.command()
def explain(
    heads: Heads = 32,
    kv_heads: KVHeads = None,
    seq: Seq = "1M",
    cluster: Cluster = "4x8",
    head_dim: HeadDim = 128,
    batch: Batch = 1,
    dtype: Dtype = "bfloat16",
    mask: MaskText = "causal",
    layout: LayoutText = "zigzag",
    ring: Ring = "auto",
    overlap: Overlap = True,
    intra_gb: IntraGB = 200.0,
    inter_gb: InterGB = 25.0,
    tflops: Tflops = 156.0,
    latency_us: Latency = 10.0,
) -> None:
    """Predict what "auto" chooses on a cluster for head_parallel, backward and ring, and say why."""
    import torch

    from burst_mcore.config import BurstConfig
    from burst_mcore.explain import predict
    from burst_mcore.explain.problem import Problem
    from burst_mcore.mask.words import tokens

    try:
        config = BurstConfig(ring=ring, overlap=overlap)
        problem = Problem(
            seq=tokens(seq),
            heads=heads,
            kv_heads=heads if kv_heads is None else kv_heads,
            head_dim=head_dim,
            batch=batch,
            mask=mask,
            dtype=dtype,
        )
        rates = _rates(intra_gb, inter_gb, tflops, latency_us)
        where = predict.cluster(cluster)
        torch.set_num_threads(1)  # many small operations: threads would wait for each other
        typer.echo(predict.explain(problem, where, rates, ring=ring, overlap=config.overlap, layout=layout))
    except ValueError as error:
        _fail("explain", error)


@app.command()
def draw(
    cluster: Cluster = "2x4",
    direction: Annotated[str, typer.Option(help="forward, query or kv.")] = "query",
    ring: Ring = "double",
    overlap: Overlap = True,
    head_parallel: Annotated[int, typer.Option(help="Ranks that share the heads.")] = 1,
    heads: Heads = 8,
    kv_heads: KVHeads = None,
    seq: Seq = "128K",
    head_dim: int = 128,
    dtype: str = "bfloat16",
    mask: MaskText = "causal",
    layout: LayoutText = "zigzag",
    intra_gb: IntraGB = 200.0,
    inter_gb: InterGB = 25.0,
    tflops: Tflops = 156.0,
    latency_us: Latency = 10.0,
    measure: Annotated[bool, typer.Option(help="Also run it on this machine's CPU, over gloo.")] = False,
    out: Annotated[Path, typer.Option(help="The picture.")] = Path("timeline.png"),
    trace: Annotated[Path, typer.Option(help="The trace, for chrome://tracing or ui.perfetto.dev.")] = Path(
        "trace.json"
    ),
    mask_out: Annotated[
        Path | None, typer.Option(help="The picture of the mask; default mask.png, beside the other picture.")
    ] = None,
    kernel: Annotated[str, typer.Option(help="Kernel to show tiles for; auto is the CPU's.")] = "auto",
) -> None:
    """One pass: its schedule as a step x rank grid, its timeline as picture and trace, its mask as picture.

    The mask's picture shows the mask, the tiles that each rank computes, and the work of each rank.
    """
    from burst_mcore.attention.kernels.table import choose
    from burst_mcore.attention.schedule.route import PASSES
    from burst_mcore.attention.schedule.trace import chrome_trace
    from burst_mcore.bench.run import record_pass
    from burst_mcore.config import BurstConfig
    from burst_mcore.explain import predict
    from burst_mcore.explain.mask_picture import save_mask, tiles_summary
    from burst_mcore.explain.picture import save_timelines
    from burst_mcore.explain.problem import Problem
    from burst_mcore.mask.words import tokens

    try:
        for path in (out, trace, mask_out):
            if path is not None and path.is_dir():
                raise ValueError(f"{path} is a folder: give the name of a file")
        if direction not in PASSES:
            raise ValueError(f"unknown direction {direction!r}; legal: {', '.join(PASSES)}")
        config = BurstConfig(ring=ring, overlap=overlap, head_parallel=head_parallel)
        if measure and tokens(seq) > MEASURED_TOKENS:
            raise ValueError(f"--measure runs on this machine's CPU: --seq may be at most {MEASURED_TOKENS}")
        problem = Problem(
            seq=tokens(seq),
            heads=heads,
            kv_heads=heads if kv_heads is None else kv_heads,
            head_dim=head_dim,
            mask=mask,
            dtype=dtype,
        )
        where, rates = predict.cluster(cluster), _rates(intra_gb, inter_gb, tflops, latency_us)
        drawing = predict.draw(
            problem,
            where,
            rates,
            name=direction,
            degree=head_parallel,
            ring=ring,
            overlap=overlap,
            layout=layout,
        )
        chosen = choose(kernel, problem.on_kernel)
        runs = {"predicted": drawing.timeline.events}
        if measure:
            config = replace(config, layout=drawing.plan.layout, kernel=kernel)
            runs["measured"] = record_pass(problem, where, direction, config, rates)
    except (ValueError, RuntimeError) as error:
        _fail("draw", error)
    mask_out = mask_out or out.with_name("mask.png")
    shown, what = drawing.schedule, f"mask {mask} over {seq} tokens"
    typer.echo(f"{shown}\n\n{what}; {shown.route}: {drawing.why}")
    typer.echo(f"{predict.summary(drawing, where)}\n{tiles_summary(drawing.plan, direction, chosen)}")
    typer.echo(predict.exposed(drawing))
    try:
        for path in (out, trace, mask_out):
            path.parent.mkdir(parents=True, exist_ok=True)
        save_timelines(runs, f"{shown.title}; {shown.route} on {cluster} ranks; {what}", out)
        title = f"{what}, layout {drawing.plan.layout}; {shown.title}, on {cluster} ranks"
        save_mask(drawing.plan, direction, chosen, title, mask_out)
        trace.write_text(chrome_trace(runs))
    except (ValueError, OSError) as error:
        _fail("draw", error)
    typer.echo(f"\ntimeline: {out}\nmask:     {mask_out}\ntrace:    {trace}")


@bench.command()
def attention(
    ranks: Annotated[int, typer.Option(min=1, help="Processes of the ring.")] = 4,
    seq: Annotated[int, typer.Option(help="Tokens in the global sequence.")] = 16384,
    heads: Heads = 8,
    kv_heads: KVHeads = None,
    head_dim: int = 64,
    batch: int = 1,
    dtype: str = "float32",
    mask: MaskText = "causal",
    methods: Annotated[str, typer.Option(help="Names, separated by commas.")] = (
        "burst,all-gather,deepspeed-ulysses"
    ),
    repeats: Annotated[int, typer.Option(min=1, help="Timed repeats, after one warm-up.")] = 3,
) -> None:
    """Forward and backward of one attention layer: CPU seconds, beside the bare kernel on one process."""
    from burst_mcore.bench.report import json_line, table
    from burst_mcore.bench.run import measure
    from burst_mcore.explain.problem import Problem

    try:
        problem = Problem(
            seq=seq,
            heads=heads,
            kv_heads=heads if kv_heads is None else kv_heads,
            head_dim=head_dim,
            batch=batch,
            mask=mask,
            dtype=dtype,
        )
        results = measure(problem, ranks, [name for name in methods.split(",") if name], repeats)
    except (ValueError, RuntimeError) as error:
        _fail("bench", error)
    typer.echo(table(results))
    typer.echo(json_line(problem, results))


@bench.command()
def topology(
    repeats: Annotated[int, typer.Option(min=1, help="Timed repeats, after one warm-up.")] = 3,
    out: Annotated[Path, typer.Option(help="All figures, as JSON.")] = Path("topology.json"),
) -> None:
    """Double ring, overlap and the cost model's choices, in wall time on an emulated cluster (needs root)."""
    from burst_mcore.bench import cluster
    from burst_mcore.bench import topology as bench_topology

    lacking = cluster.missing()
    if lacking is not None:
        _fail("bench topology", RuntimeError(f"the emulated cluster needs {lacking}"))
    try:
        verdicts = bench_topology.all_verdicts(repeats, typer.echo)
    except RuntimeError as error:
        _fail("bench topology", error)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(bench_topology.as_json(verdicts))
    typer.echo(f"\n{bench_topology.report(verdicts)}\n\nall figures: {out}")
    if not all(verdict.reached for verdict in verdicts):
        raise typer.Exit(1)


@bench.command()
def planning(
    ranks: Annotated[
        list[int] | None, typer.Option(min=8, help="Multiples of 8; default 8, 64, 256, 1024, 4096.")
    ] = None,
    planned: Annotated[str, typer.Option(help="What, separated by semicolons; default all.")] = "",
    repeats: Annotated[int, typer.Option(min=1, help="Processes, of which the median counts.")] = 3,
    out: Annotated[Path, typer.Option(help="All figures, as JSON.")] = Path("planning.json"),
) -> None:
    """What planning costs before the first message: CPU seconds and memory of one rank."""
    from burst_mcore.bench import planning as bench_planning
    from burst_mcore.bench.verdict import bars

    names = [name.strip() for name in planned.split(";") if name.strip()] or list(bench_planning.PLANNED)
    sizes = ranks or list(bench_planning.SIZES)
    if unknown := [name for name in names if name not in bench_planning.PLANNED]:
        legal = "; ".join(bench_planning.PLANNED)
        _fail("bench planning", ValueError(f"unknown {unknown}; legal: {legal}"))
    if odd := [size for size in sizes if size % bench_planning.NODE]:
        _fail("bench planning", ValueError(f"ranks must be multiples of {bench_planning.NODE}, got {odd}"))
    rows = []
    for size in sizes:
        for name in names:
            rows.append(bench_planning.measure(name, size, repeats))
            typer.echo(f"{name}, {size} ranks: {rows[-1].seconds:.3g} s, {rows[-1].megabytes:.0f} MB")
    judged = bench_planning.verdicts(rows)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(bench_planning.as_json(rows, judged))
    typer.echo(f"\n{bench_planning.report(rows)}\n\n{bars(judged) if judged else 'nothing to judge'}")
    typer.echo(f"\nall figures: {out}")
    if not all(verdict.reached for verdict in judged):
        raise typer.Exit(1)


@bench.command()
def masks(
    seq: Annotated[
        int, typer.Option(min=16384, help="Tokens; 64 documents are measured on twice as many.")
    ] = 32768,
    heads: Annotated[int, typer.Option(min=1, help="Query heads, and K/V heads.")] = 2,
    ranks: Annotated[
        int, typer.Option(min=2, help="Processes of the ring; more than cores measure how cores are shared.")
    ] = 2,
    repeats: Annotated[
        int,
        typer.Option(min=1, help="Timed repeats, after one warm-up; short cases run three times as many."),
    ] = 3,
    out: Annotated[Path, typer.Option(help="All figures, as JSON.")] = Path("masks.json"),
) -> None:
    """What masks save: CPU seconds beside bare tiles and masked dense attention, and bytes."""
    from burst_mcore.bench import sparsity

    try:
        found = []
        for case in sparsity.cases(seq, heads):
            found.append((case, sparsity.measure(case, ranks, repeats)))
            typer.echo(f"{case.name}, {case.layout}: {found[-1][1].burst:.2f} CPU s")
    except (ValueError, RuntimeError) as error:
        _fail("bench masks", error)
    rows, judged = [row for _, row in found], list(sparsity.verdicts(found))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(sparsity.as_json(rows, judged, ranks))
    typer.echo(f"\n{sparsity.report(rows, judged)}\n\nall figures: {out}")
    if not all(verdict.reached for verdict in judged):
        raise typer.Exit(1)


@bench.command()
def loss(
    shape: Annotated[
        list[str] | None, typer.Option(help="Tokens x hidden x vocabulary; more than one may be given.")
    ] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="float32, bfloat16 or float16.")] = None,
    methods: Annotated[str, typer.Option(help="Names, separated by commas; default all.")] = "",
    masked: Annotated[
        float | None, typer.Option(help="Share of the tokens that have no loss, at random; default 1 in 16.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed repeats, after one warm-up.")] = 3,
    processes: Annotated[int, typer.Option(min=1, help="Processes per method.")] = 1,
    threads: Annotated[int, typer.Option(min=0, help="On CPU; 0: as many as there are cores.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: cuda where there is one.")] = "auto",
    out: Annotated[Path, typer.Option(help="All figures, as JSON.")] = Path("loss.json"),
) -> None:
    """LM heads with their loss: time beside their three matrix products alone, peak memory, accuracy."""
    import os

    import torch

    from burst_mcore.bench import head, head_report
    from burst_mcore.bench.head_methods import METHODS, OURS

    threads = threads or os.cpu_count() or 1
    try:
        if device not in ("auto", "cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
            raise ValueError(f"no device {device!r} here")
        where = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        problems = [
            head.HeadProblem.of(a_shape, a_dtype, head.MASKED if masked is None else masked)
            for a_shape in shape or ["4096x1024x32000"]
            for a_dtype in dtype or ["float32", "bfloat16"]
        ]
        names, rows = [name for name in methods.split(",") if name] or list(METHODS), []
        for problem in problems:
            for row in head.measure(problem, names, repeats, processes, threads, where):
                rows.append(row)
                typer.echo(head_report.line(row))
    except (ValueError, RuntimeError) as error:
        _fail("bench loss", error)
    judged, left_open = head_report.verdicts(rows)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(head_report.as_json(rows, judged, left_open, threads, repeats, processes))
    typer.echo(f"\n{head_report.report(rows, judged, left_open)}\n\nall figures: {out}")
    ours_ran = all(row.of_products is not None for row in rows if row.method == OURS)
    if not ours_ran or not all(verdict.reached for verdict in judged):
        raise typer.Exit(1)


@bench.command()
def recompute(
    ranks: Annotated[int, typer.Option(min=1, help="Processes of the ring.")] = 2,
    seq: Annotated[int, typer.Option(help="Tokens in the global sequence.")] = 16384,
    hidden: Annotated[int, typer.Option(help="Hidden size.")] = 512,
    heads: Heads = 8,
    layers: Annotated[int, typer.Option(help="Layers, each checkpointed.")] = 4,
    layout: Annotated[str, typer.Option(help="striped, stacked-zigzag:K, zigzag, ...")] = "striped",
    dtype: str = "float32",
    repeats: Annotated[int, typer.Option(min=1, help="Timed repeats, after one warm-up.")] = 3,
    out: Annotated[Path, typer.Option(help="All figures, as JSON; the curve lies beside it, as PNG.")] = Path(
        "recompute.json"
    ),
) -> None:
    """Recompute policies beside Megatron's, torch's and none: time, peak memory, FLOPs of a step."""
    from burst_mcore.bench import recompute as bench_recompute
    from burst_mcore.bench import recompute_report
    from burst_mcore.bench.recompute_methods import Stack

    try:
        stack = Stack(seq=seq, hidden=hidden, heads=heads, layers=layers, layout=layout, dtype=dtype)
        rows = bench_recompute.measure(stack, ranks, repeats)
        judged = recompute_report.verdicts(rows)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(recompute_report.as_json(stack, ranks, repeats, rows, judged))
        curve = out.with_suffix(".png")
        recompute_report.save_curve(rows, f"{stack.words}, {ranks} ranks", curve)
    except (ValueError, RuntimeError, OSError) as error:
        _fail("bench recompute", error)
    typer.echo(f"{stack.words}, {ranks} ranks\n\n{recompute_report.report(rows, judged)}")
    typer.echo(f"\nall figures: {out}\ncurve:       {curve}")
    if not all(verdict.reached for verdict in judged):
        raise typer.Exit(1)


@bench.command()
def deepspeed(
    ranks: Annotated[int, typer.Option(min=2, help="Processes, all in one sequence group.")] = 4,
    seq: Seq = "4096",
    heads: Heads = 8,
    kv_heads: KVHeads = 4,
    head_dim: int = 32,
    layers: int = 2,
    stage: Annotated[int, typer.Option(min=0, max=3, help="ZeRO stage.")] = 3,
    methods: Annotated[str, typer.Option(help="Names, separated by semicolons; default all.")] = "",
    repeats: Annotated[int, typer.Option(min=1, help="Counted steps, after one that is not.")] = 25,
    cannot: Annotated[bool, typer.Option(help="Also the cases in which heads do not divide.")] = True,
    out: Annotated[Path, typer.Option(help="All figures, as JSON.")] = Path("deepspeed.json"),
) -> None:
    """A training step beside DeepSpeed's Ulysses: time, bytes, peak memory, on this machine's CPU."""
    from burst_mcore.bench import deepspeed_steps as compare
    from burst_mcore.bench import provenance
    from burst_mcore.bench.verdict import bars
    from burst_mcore.mask.words import tokens

    names = [name.strip() for name in methods.split(";") if name.strip()] or list(compare.METHODS)
    try:
        if unknown := [name for name in names if name not in compare.METHODS]:
            raise ValueError(f"unknown methods {unknown}; legal: {'; '.join(compare.METHODS)}")
        job = compare.Job(
            ranks=ranks, seq=tokens(seq), heads=heads, kv_heads=kv_heads or heads, head_dim=head_dim,
            layers=layers, stage=stage,
        )  # fmt: skip
        found, judged = {}, []
        for each in (job, *(compare.CANNOT if cannot else ())):
            rows = compare.measure(each, names, repeats)
            judged += compare.verdicts(each, rows)
            found[str(each)] = compare.figures(rows)
            typer.echo(compare.table(each, rows) + "\n")
    except (ValueError, RuntimeError) as error:
        _fail("bench deepspeed", error)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(provenance.as_json("a training step beside DeepSpeed's Ulysses, on CPU", cases=found))
    typer.echo(f"{bars(judged) if judged else 'nothing to judge'}\n\nall figures: {out}")
    if not all(verdict.reached for verdict in judged):
        raise typer.Exit(1)


@app.command()
def doctor(
    config: Annotated[
        Path | None, typer.Argument(help="DeepSpeed's JSON file, with a section burst_attention.")
    ] = None,
    world: Annotated[
        int | None, typer.Option(help="Number of ranks; default: the ranks that share one sequence.")
    ] = None,
    per_node: Annotated[
        int | None, typer.Option(help="Ranks of a node; default: all ranks, up to 8.")
    ] = None,
    seq: Seq = "128K",
    heads: Heads = 32,
    kv_heads: KVHeads = 8,
    head_dim: HeadDim = 128,
    layers: Annotated[int, typer.Option(help="Layers of the model.")] = 32,
    vocabulary: Annotated[int, typer.Option(help="Tokens of the vocabulary.")] = 128256,
    model: Annotated[
        Path | None,
        typer.Option(help="Folder with a model's config.json; replaces --heads to --vocabulary."),
    ] = None,
    device: Annotated[
        str, typer.Option(help="GPU to predict for: a100, h100, h200 or b200; here: this machine's device.")
    ] = "here",
    reference: Annotated[
        bool, typer.Option(help="Print the reference page of the section burst_attention, and stop.")
    ] = False,
) -> None:
    """Predict what a DeepSpeed configuration will do: groups, kernel, memory, bytes and times."""
    from burst_mcore.deepspeed.config.section import config_dict
    from burst_mcore.deepspeed.config.section import reference as page
    from burst_mcore.deepspeed.engine import doctor as examiner
    from burst_mcore.deepspeed.engine.memory import Shape, shape_of
    from burst_mcore.mask.words import tokens

    if reference:
        typer.echo(page(), nl=False)
        return
    if config is None:
        _fail(
            "doctor",
            ValueError("no configuration given; pass DeepSpeed's JSON file: burst-mcore doctor ds.json"),
        )
    try:
        shape = Shape(
            seq=tokens(seq), layers=layers, heads=heads, kv_heads=kv_heads or heads, head_dim=head_dim,
            vocabulary=vocabulary, hidden=heads * head_dim, intermediate=heads * head_dim * 7 // 2,
        ) if model is None else shape_of(model, tokens(seq))  # fmt: skip
        world = world or config_dict(config).get("sequence_parallel_size", 1)
        per_node = per_node or min(world, 8)
        lines = examiner.examine(config, world=world, per_node=per_node, shape=shape, device=device)
        for line in lines:
            typer.echo(line)
    except ValueError as error:
        _fail("doctor", error)


def _rates(intra_gb: float, inter_gb: float, tflops: float, latency_us: float) -> Rates:
    return Rates(intra=intra_gb * 1e9, inter=inter_gb * 1e9, compute=tflops * 1e12, latency=latency_us * 1e-6)


def _fail(command: str, error: Exception) -> NoReturn:
    typer.echo(f"burst-mcore {command}: {error}", err=True)
    raise typer.Exit(1) from None


if __name__ == "__main__":
    app()
