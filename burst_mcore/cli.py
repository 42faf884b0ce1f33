"""The command `burst-mcore`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, NoReturn

try:
    import typer
except ImportError:
    sys.exit("burst-mcore needs its extra packages: pip install 'burst-mcore[bench]'")

from burst_mcore.rates import Rates

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="BurstAttention: what it costs, and how it runs."
)
bench = typer.Typer(no_args_is_help=True, help="Measure methods side by side on this machine.")
app.add_typer(bench, name="bench")

MEASURED_TOKENS = 16384
"""The longest sequence that `draw --measure` runs."""

Heads = Annotated[int, typer.Option(help="Query heads.")]
KVHeads = Annotated[int | None, typer.Option(help="K/V heads; default as many as heads.")]
Seq = Annotated[str, typer.Option(help="Tokens in the global sequence: 4096, 128K, 1M.")]
Cluster = Annotated[str, typer.Option(help="Nodes x ranks of a node.")]
Ring = Annotated[str, typer.Option(help="double, flat, or auto (explain).")]
Overlap = Annotated[bool, typer.Option(help="Communicate while computing.")]
IntraGB = Annotated[float, typer.Option(help="GB/s that a rank sends within its node.")]
InterGB = Annotated[float, typer.Option(help="GB/s that a rank sends to other nodes.")]
Tflops = Annotated[float, typer.Option(help="TFLOP/s of the attention kernel.")]
Latency = Annotated[float, typer.Option(help="Microseconds of a message besides its bytes.")]


@app.command()
def explain(
    heads: Heads = 32,
    kv_heads: KVHeads = None,
    seq: Seq = "1M",
    cluster: Cluster = "4x8",
    head_dim: int = 128,
    batch: int = 1,
    dtype: str = "bfloat16",
    causal: bool = True,
    ring: Ring = "double",
    overlap: Overlap = True,
    intra_gb: IntraGB = 200.0,
    inter_gb: InterGB = 25.0,
    tflops: Tflops = 156.0,
    latency_us: Latency = 10.0,
) -> None:
    """What "auto" chooses (head_parallel, backward, ring) on a cluster, and why. Predicted, not measured."""
    from burst_mcore.bench import predict
    from burst_mcore.bench.problem import Problem
    from burst_mcore.config import BurstConfig

    try:
        config = BurstConfig(ring=ring, overlap=overlap)
        problem = Problem(
            seq=predict.tokens(seq),
            heads=heads,
            kv_heads=heads if kv_heads is None else kv_heads,
            head_dim=head_dim,
            batch=batch,
            causal=causal,
            dtype=dtype,
        )
        rates = _rates(intra_gb, inter_gb, tflops, latency_us)
        where = predict.cluster(cluster)
        typer.echo(predict.explain(problem, where, rates, ring=config.ring, overlap=config.overlap))
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
    causal: bool = True,
    intra_gb: IntraGB = 200.0,
    inter_gb: InterGB = 25.0,
    tflops: Tflops = 156.0,
    latency_us: Latency = 10.0,
    measure: Annotated[bool, typer.Option(help="Also run it on this machine's CPU, over gloo.")] = False,
    out: Annotated[Path, typer.Option(help="The picture.")] = Path("timeline.png"),
    trace: Annotated[Path, typer.Option(help="The trace, for chrome://tracing or ui.perfetto.dev.")] = Path(
        "trace.json"
    ),
) -> None:
    """One pass over the ring: its schedule as a step x rank grid, and its timeline as picture and trace."""
    from burst_mcore.attention.schedule import PASSES
    from burst_mcore.attention.trace import chrome_trace
    from burst_mcore.bench import predict
    from burst_mcore.bench.picture import save_timelines
    from burst_mcore.bench.problem import Problem
    from burst_mcore.bench.run import record_pass
    from burst_mcore.config import BurstConfig

    try:
        if direction not in PASSES:
            raise ValueError(f"unknown direction {direction!r}; legal: {', '.join(PASSES)}")
        config = BurstConfig(ring=ring, overlap=overlap, head_parallel=head_parallel)
        if ring == "auto":
            raise ValueError("draw shows one ring: double or flat")
        if measure and predict.tokens(seq) > MEASURED_TOKENS:
            raise ValueError(f"--measure runs on this machine's CPU: --seq may be at most {MEASURED_TOKENS}")
        problem = Problem(
            seq=predict.tokens(seq),
            heads=heads,
            kv_heads=heads if kv_heads is None else kv_heads,
            head_dim=head_dim,
            causal=causal,
            dtype=dtype,
        )
        where, rates = predict.cluster(cluster), _rates(intra_gb, inter_gb, tflops, latency_us)
        drawing = predict.draw(
            problem, where, rates, name=direction, degree=head_parallel, ring=ring, overlap=overlap
        )
        runs = {"predicted": drawing.events}
        if measure:
            runs["measured"] = record_pass(problem, where, direction, config)
    except (ValueError, RuntimeError) as error:
        _fail("draw", error)
    typer.echo(drawing.schedule)
    title = f"{drawing.schedule.title}; {drawing.schedule.route} on {cluster} ranks"
    try:
        for path in (out, trace):
            path.parent.mkdir(parents=True, exist_ok=True)
        save_timelines(runs, title, out)
        trace.write_text(chrome_trace(runs))
    except (ValueError, OSError) as error:
        _fail("draw", error)
    typer.echo(f"\ntimeline: {out}\ntrace:    {trace}")


@bench.command()
def attention(
    ranks: Annotated[int, typer.Option(min=1, help="Processes of the ring.")] = 4,
    seq: Annotated[int, typer.Option(help="Tokens in the global sequence.")] = 16384,
    heads: Heads = 8,
    kv_heads: KVHeads = None,
    head_dim: int = 64,
    batch: int = 1,
    dtype: str = "float32",
    causal: bool = True,
    methods: Annotated[str, typer.Option(help="Names, separated by commas.")] = (
        "burst,all-gather,deepspeed-ulysses"
    ),
    repeats: Annotated[int, typer.Option(min=1, help="Counted rounds, after one that is not.")] = 3,
) -> None:
    """Forward and backward of one attention layer: CPU seconds, beside the bare kernel on one process."""
    from burst_mcore.bench.problem import Problem
    from burst_mcore.bench.report import json_line, table
    from burst_mcore.bench.run import measure

    try:
        problem = Problem(
            seq=seq,
            heads=heads,
            kv_heads=heads if kv_heads is None else kv_heads,
            head_dim=head_dim,
            batch=batch,
            causal=causal,
            dtype=dtype,
        )
        results = measure(problem, ranks, [name for name in methods.split(",") if name], repeats)
    except (ValueError, RuntimeError) as error:
        _fail("bench", error)
    typer.echo(table(results))
    typer.echo(json_line(problem, results))


@bench.command()
def topology(
    repeats: Annotated[int, typer.Option(min=1, help="Counted rounds, after one that is not.")] = 3,
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


def _rates(intra_gb: float, inter_gb: float, tflops: float, latency_us: float) -> Rates:
    return Rates(intra=intra_gb * 1e9, inter=inter_gb * 1e9, compute=tflops * 1e12, latency=latency_us * 1e-6)


def _fail(command: str, error: Exception) -> NoReturn:
    typer.echo(f"burst-mcore {command}: {error}", err=True)
    raise typer.Exit(1) from None


if __name__ == "__main__":
    app()
