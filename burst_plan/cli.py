"""The command `burst-mcore`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, cast

try:
    import typer
except ImportError:
    sys.stderr.write("burst-mcore needs packages: pip install '.[cli]' in a clone, or 'FILE.whl[cli]'\n")
    sys.exit(2)
from typer.core import TyperGroup

from burst_plan.options import (
    BatchOption,
    ClusterOption,
    Dtype,
    Gpu,
    HeadDim,
    Heads,
    KVHeads,
    LatentText,
    LayoutText,
    MaskText,
    Overlap,
    RatesFile,
    RingOption,
    Seq,
    ValueDim,
    ranks_and_rates,
)

EXTRAS = {"typer": "cli", "tabulate": "cli", "megatron": "megatron"}
"""The extra of a package that may be missing; the others are DeepSpeed's."""


REFUSED = (ValueError, OverflowError, MemoryError, OSError)
"""Errors of the user's input: illegal options, sizes beyond numbers or memory, files."""


class OneLine(TyperGroup):
    """The command. An error of usage, or of illegal options, sizes or files, is one line, with status 2."""

    def invoke(self, ctx: Any) -> Any:
        """Run a subcommand as typer does, except for the errors in REFUSED."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise
        except REFUSED as error:
            words = " ".join(str(error).split()) or type(error).__name__
            typer.echo(f"burst-mcore {ctx.invoked_subcommand}: {words}", err=True)
            raise typer.Exit(2) from None

    def main(self, *args: Any, **options: Any) -> Any:
        """Run it as typer does, except for errors of usage."""
        try:
            status = super().main(*args, **(options | {"standalone_mode": False}))
        except Exception as error:
            say = getattr(error, "format_message", None)  # typer has a copy of click, or takes click's
            if say is None:
                raise
            text: str = say()
            if type(error).__name__ != "NoArgsIsHelpError":
                context = getattr(error, "ctx", None)
                words = [] if context is None else context.command_path.split()[1:]
                path = " ".join(["burst-mcore", *words])
                text = f"{path}: {' '.join(text.split()).rstrip('.')}; see {path} --help"
            typer.echo(text, err=True)
            sys.exit(2)
        sys.exit(status if isinstance(status, int) else 0)


app = typer.Typer(
    cls=OneLine,
    no_args_is_help=True,
    add_completion=False,
    help="Plan a training run; predict, draw, measure BurstAttention; check configurations; patch Megatron.",
)

COMMANDS = "burst_mcore.commands"
"""Entry points of functions that other packages add to the command."""
MEASURED_TOKENS = 16384
"""The longest sequence that `draw --measure` runs."""


@app.command()
def explain(
    heads: Heads = 32,
    kv_heads: KVHeads = None,
    seq: Seq = "1M",
    cluster: ClusterOption = "4x8",
    head_dim: HeadDim = 128,
    value_dim: ValueDim = None,
    latent: LatentText = None,
    batch: BatchOption = 1,
    dtype: Dtype = "bfloat16",
    mask: MaskText = "causal",
    layout: LayoutText = "zigzag",
    ring: RingOption = "auto",
    overlap: Overlap = True,
    gpu: Gpu = None,
    rates_file: RatesFile = None,
) -> None:
    """Predict the routes of a call on a cluster: the route that runs by default, that of "auto", and why."""
    import torch

    from burst_mcore.config import BurstConfig
    from burst_plan.explain import predict
    from burst_plan.explain.problem import LayerProblem, latent_of
    from burst_plan.words import tokens

    config = BurstConfig(ring=ring, overlap=overlap)
    problem = LayerProblem(
        seq=tokens(seq), heads=heads, kv_heads=heads if kv_heads is None else kv_heads,
        head_dim=head_dim, batch=batch, mask=mask, dtype=dtype, value_dim=value_dim,
        latent=None if latent is None else latent_of(latent),
    )  # fmt: skip
    ranks, rates = ranks_and_rates(cluster, rates_file, gpu)
    torch.set_num_threads(1)  # many small operations: threads would wait for each other
    typer.echo(predict.explain(problem, ranks, rates, config, layout))


@app.command()
def draw(
    cluster: ClusterOption = "2x4",
    direction: Annotated[
        str, typer.Option(help="forward, or the side that rotates in backward: query or kv.")
    ] = "query",
    ring: RingOption = "double",
    overlap: Overlap = True,
    head_parallel: Annotated[int, typer.Option(help="Ranks that share the heads.")] = 1,
    heads: Heads = 8,
    kv_heads: KVHeads = None,
    seq: Seq = "128K",
    head_dim: HeadDim = 128,
    dtype: Dtype = "bfloat16",
    mask: MaskText = "causal",
    layout: LayoutText = "zigzag",
    gpu: Gpu = None,
    rates_file: RatesFile = None,
    measure: Annotated[bool, typer.Option(help="Also run it on this machine's CPU, over gloo.")] = False,
    out: Annotated[
        Path, typer.Option(help="The timeline as a trace, for ui.perfetto.dev or chrome://tracing.")
    ] = Path("trace.json"),
) -> None:
    """Draw one pass: its schedule as a step x rank grid, its timeline as a trace."""
    from burst_mcore.attention.kernels.table import choose
    from burst_mcore.attention.schedule.actions import Pass
    from burst_mcore.config import BurstConfig
    from burst_plan.explain import predict
    from burst_plan.explain.chrome_trace import chrome_trace
    from burst_plan.explain.pairs import tiles_summary
    from burst_plan.explain.problem import LayerProblem
    from burst_plan.files import check_writable
    from burst_plan.tables import cut
    from burst_plan.words import tokens

    if direction not in tuple(Pass):
        raise ValueError(f"unknown direction {direction!r}; legal: {', '.join(Pass)}")
    pass_ = Pass(direction)
    config = BurstConfig(ring=ring, overlap=overlap, head_parallel=head_parallel)
    if measure and tokens(seq) > MEASURED_TOKENS:
        raise ValueError(f"--measure runs on this machine's CPU: --seq may be at most {MEASURED_TOKENS}")
    problem = LayerProblem(
        seq=tokens(seq), heads=heads, kv_heads=heads if kv_heads is None else kv_heads,
        head_dim=head_dim, mask=mask, dtype=dtype,
    )  # fmt: skip
    ranks, rates = ranks_and_rates(cluster, rates_file, gpu)
    out.parent.mkdir(parents=True, exist_ok=True)
    check_writable(out)
    drawing = predict.draw(problem, ranks, rates, config, pass_, layout)
    kernel = choose("auto", problem.on_kernel)
    runs = {"predicted": drawing.timeline.events}
    if measure:
        config = replace(config, layout=drawing.plan.layout)
        try:
            runs["measured"] = registered("measure")(problem, ranks, pass_, config, rates)
        except RuntimeError as error:  # of a rank
            raise ValueError(str(error)) from None
    schedule, what = drawing.schedule, f"mask {mask} over {seq} tokens"
    typer.echo(f"{cut(str(schedule))}\n\n{what}; {schedule.route}: {drawing.why}")
    typer.echo(f"{predict.summary(drawing)}\n{tiles_summary(drawing.plan, pass_, kernel)}")
    typer.echo(predict.exposed(drawing))
    out.write_text(chrome_trace(runs))
    typer.echo(f"\ntrace: {out}")


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
)
def bench(context: typer.Context) -> None:
    """Measure methods side by side on this machine: burst-mcore bench SUBJECT; --help lists subjects."""
    raise typer.Exit(registered("bench")(context.args))


@app.command()
def calibrate(
    ranks: Annotated[
        int | None, typer.Option(help="Processes that are measured together on this CPU; default 2.")
    ] = None,
    repeats: Annotated[int, typer.Option(help="Times that each figure is measured; the least counts.")] = 5,
    device: Annotated[str, typer.Option(help="cpu, or cuda: then torchrun starts the ranks.")] = "cpu",
    out: Annotated[Path, typer.Option(help="File of the rates.")] = Path("rates.json"),
) -> None:
    """Measure kernel, memory and messages of ranks as a file of rates; torchrun may start the ranks."""
    from burst_plan.files import check_writable
    from burst_plan.provenance import made_by
    from burst_plan.words import in_words

    if os.environ.get("RANK", "0") == "0":  # of torchrun's ranks, the one that writes
        check_writable(out)
    result = registered("calibrate")(ranks, repeats, device)
    if result.rank == 0:
        result.rates.save(out, **made_by(device), **({"assumed": ["inter"]} if result.one_node else {}))
        typer.echo(f"measured with {result.words}: {in_words(result.rates)}")
        if result.one_node:
            share = result.rates.inter / result.rates.intra
            typer.echo(f"not measured: links between machines, assumed at {share:.3g} of the rate within")
        typer.echo(f"file: {out}")


@app.command()
def plan(
    model: Annotated[
        str | None,
        typer.Option(
            help="A model: 7b, llama3-8b, Qwen3-32B; a folder with config.json; or Megatron's arguments."
        ),
    ] = None,
    seq: Annotated[str | None, typer.Option(help="Tokens of a sequence, such as 128K or 1M.")] = None,
    cluster: ClusterOption = "a800:4x8",
    batch: Annotated[
        int | None, typer.Option(help="Sequences of a step, of all ranks; default 1.", show_default=False)
    ] = None,
    mask: Annotated[
        str | None,
        typer.Option(help="Mask of all layers, such as full or window:4096; default: the model's."),
    ] = None,
    gpu: Gpu = None,
    rates_file: RatesFile = None,
    top: Annotated[int, typer.Option(help="Ways to print.")] = 12,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write all that is predicted as JSON.")
    ] = None,
    against: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Measured rows, as JSON; may be repeated.")
    ] = None,
    calibrate: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Measured rows that first correct a machine.")
    ] = None,
) -> None:
    """Predict every plan to train a model and recommend one, or compare measured figures (--against)."""
    import json

    import torch

    from burst_mcore.rates import Rates
    from burst_plan.files import check_writable
    from burst_plan.step.planned import planned, text

    torch.set_num_threads(1)
    if (model is None) == (not against):
        raise ValueError("give --model MODEL with --seq, or --against FILE: the measured rows to predict")
    if model is None:
        if json_file or gpu:
            raise ValueError("--json and --gpu go with --model, not with --against")
        rates = None if rates_file is None else Rates.load(rates_file)
        report = registered("against")(against or (), calibrate or (), rates)
        typer.echo(report.text())
        typer.echo(json.dumps(report.as_json()))
        return
    if calibrate:
        raise ValueError("--calibrate goes with --against, not with --model")
    if top < 1:
        raise ValueError(f"--top must be at least 1, got {top}")
    check_writable(json_file)
    answer = planned(model, seq, cluster, batch, rates_file, mask, gpu)
    words = text(answer, top)
    if json_file is not None:
        json_file.write_text(json.dumps(answer.as_json()) + "\n", encoding="utf-8")
    typer.echo(words)


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
    seq: Annotated[
        str | None, typer.Option(help="Tokens of the whole sequence, such as 4096, 128K or 1M; default 128K.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Folder with a model's config.json, a preset such as 7b (default: llama3-8b), or arguments "
            "of Megatron, which are examined if there is no JSON file."
        ),
    ] = None,
    device: Annotated[
        str, typer.Option(help="Machine to predict for, such as h100 or l20; here: this machine's device.")
    ] = "here",
    gpu: Gpu = None,
    rates_file: RatesFile = None,
) -> None:
    """Predict what a configuration of DeepSpeed or Megatron does, whether it fits, what would be faster."""
    from burst_mcore.rates import Rates
    from burst_plan.doctor.checkup import HERE, checkup
    from burst_plan.doctor.configured import Options
    from burst_plan.machines import machine
    from burst_plan.words import gpu as described

    if gpu is not None and device != HERE:
        raise ValueError(f"--gpu and --device {device}: give one of them")
    kind = None if device == HERE else machine(device)
    if gpu:
        kind = described(gpu, min(world or 2, per_node or 8), -(-(world or 1) // (per_node or 8)))
    rates = None if rates_file is None else Rates.load(rates_file)
    options = Options(seq=seq, world=world, per_node=per_node, machine=kind, rates=rates)
    typer.echo("\n".join(checkup(config, model, options)))


@app.command()
def patch(
    check: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Name a tree's version, and whether it is patched.")
    ] = None,
    apply: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Patch a tree; a second time changes nothing.")
    ] = None,
    revert: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Remove all lines that a patch added.")
    ] = None,
    show: Annotated[
        Path | None, typer.Option("--print", metavar="DIR", help="Print a patch (git apply --unidiff-zero).")
    ] = None,
    options: Annotated[
        bool, typer.Option(help="Add all other flags, too: layouts, recompute policies, the fused loss.")
    ] = False,
    words: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
) -> None:
    """Add --context-parallel-attention-backend to a tree of Megatron's source. DIR holds megatron/core."""
    from burst_plan.patch import trees

    name = trees.OPTIONS if options else trees.BACKEND
    actions = {"check": check, "apply": apply, "revert": revert, "numbered": show}
    tasks = [(act, folder) for act, folder in actions.items() if folder is not None]
    if words:
        raise ValueError(
            f"DIR must follow its option at once: --apply {words[0]} --options, not --options {words[0]}"
        )
    if len(tasks) != 1:
        raise ValueError(f"give one of --check, --apply, --revert, --print, got {len(tasks)}")
    ((act, folder),) = tasks
    typer.echo(getattr(trees.SourceTree(folder), act)(name), nl=False)


def registered(name: str) -> Callable[..., Any]:
    """Return the function that another package registers for a subcommand or an option.

    Raises:
        ValueError: no installed package registers the function.
    """
    for point in entry_points(group=COMMANDS, name=name):
        return cast(Callable[..., Any], point.load())
    raise ValueError(
        f"no installed package registers {name!r}: install burst_mcore from a wheel or a checkout, whose "
        "burst_bench does"
    )


def main() -> None:
    """Run the command; a missing package is reported in one line, with status 2."""
    try:
        app()
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        if package.startswith("burst_"):
            raise
        extra = EXTRAS.get(package, "deepspeed")
        hint = f"pip install '.[{extra}]' in a clone, or 'FILE.whl[{extra}]'"
        typer.echo(f"burst-mcore: this needs the package {package}, which is not installed: {hint}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
