"""The command `burst-mcore`."""

from __future__ import annotations

import sys
from typing import Annotated

try:
    import typer
except ImportError:
    sys.exit("burst-mcore needs its extra packages: pip install 'burst-mcore[bench]'")

app = typer.Typer(no_args_is_help=True, add_completion=False, help="BurstAttention: benchmarks.")
bench = typer.Typer(no_args_is_help=True, help="Measure methods side by side on this machine.")
app.add_typer(bench, name="bench")


@bench.command()
def attention(
    ranks: Annotated[int, typer.Option(min=1, help="Processes of the ring.")] = 4,
    seq: Annotated[int, typer.Option(help="Tokens in the global sequence.")] = 16384,
    heads: Annotated[int, typer.Option(help="Query heads.")] = 8,
    kv_heads: Annotated[int | None, typer.Option(help="K/V heads; default as many as heads.")] = None,
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
        typer.echo(f"burst-mcore bench: {error}", err=True)
        raise typer.Exit(1) from None
    typer.echo(table(results))
    typer.echo(json_line(problem, results))


if __name__ == "__main__":
    app()
