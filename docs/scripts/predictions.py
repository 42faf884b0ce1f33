"""Writes public rows beside predictions, and the sources of the model's numbers.

`summary` is docs/evidence/predictions.md, which `make tables` writes. The script itself prints `details`: the
sections of all rows and numbers, which `make docs` puts behind the summary.
"""

from __future__ import annotations

import statistics
import sys
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path

from step_errors import ROWS, Judged, judged, ranges

from burst_bench.published.against import Compared, Report, compare
from burst_bench.published.loops import (
    INTERNEVO,
    MAGI_DOUBLE_RING,
    MAGI_RING,
    RING_FLASH,
    TRANSFORMER_ENGINE,
    Loop,
    LoopPlace,
    follows,
    together,
)
from burst_bench.published.methods import FITTED, MethodPlan, figure_of, plan_of
from burst_mcore.attention.choose import AS_FAST
from burst_mcore.attention.schedule.actions import Kind, Send
from burst_plan.machines import CONSTANTS, MACHINES, Machine
from burst_plan.step import memory, time
from burst_plan.step.figures import KINDS
from burst_plan.step.parts import CHUNK, MODULES, PLAIN

CALIBRATION = "calibration.json"
"""The file of rows that presets were fitted to, beside the files of public rows."""
PAPER = "paper.json"
"""The file of the BurstEngine paper's rows, which docs/evidence/planner.md judges."""

_HEAD = """# Predicted and measured

This page tells how far to trust a prediction of attention, and how to compare the cost model with your own
measurements. The model chooses routes, and answers `burst-mcore explain`, `draw` and `doctor`. One command
compares the model with a file of measured rows:

```
burst-mcore plan --against benchmarks/public/magi.json --calibrate benchmarks/public/calibration.json
```

A file is a JSON list of rows, in the fields of the files in [benchmarks/public](../../benchmarks/public). Two
numbers of each machine are fitted to the rows in
[calibration.json](../../benchmarks/public/calibration.json), which do not count below. The form of the model
was developed with all of these rows in view.
"""
_MISSES = """
Large misses are of four kinds:

* A100-NVLink at 32K tokens is predicted up to 3.3 times too fast, in every split: see below.
* At 512 and 8K tokens the host's launches set the pace. Equal work was measured up to three times as fast.
* The L20's host seems to launch twice as fast as the A100's. One number stands for both.
* On PCIe with A100s a ring of the same bytes took up to 2.5 times as long with another layout.
"""
_DETAILS = """## All rows and numbers

`make docs` builds sections with all rows into this page, and so does this command, as Markdown:

```bash
PYTHONPATH=. .venv/bin/python docs/scripts/predictions.py
```

They hold the best error that any model can reach, the regret of each choice, the value and source of each
constant of the model, the loop of the measured project that each method is predicted from, the training
steps of [training.json](../../benchmarks/public/training.json), and every row. How far steps of training are
off is in [how accurate a plan is](planner.md).
"""
_EQUAL = (
    "Rows are of equal work if they differ only in a field that cannot matter: the ring where all ranks "
    "share heads."
)
WITHIN = 0.2
"""The error that the bar allows for nine rows of ten."""
DOUBTED = ("A100-NVLink", 32768, 128)
"""Rows whose printed head dim is in doubt: machine, tokens, and the head dim that fits."""
LOSS = 0.05
"""The regret that the bar allows for nine groups of ten."""
_REGRET = """A group is one problem: machine, GPUs, GPUs of a node, heads, K/V heads, head dim, batch, tokens,
mask, pass, dtype. The regret is the best measured figure over that of the split that the model chooses,
less 1.
"""
_CONSTANTS = """
## Where the numbers come from

Nine constants hold for all GPUs, six of them for attention. One of them, of other projects' loops, is fitted
to the rows in [calibration.json](../../benchmarks/public/calibration.json).
"""
_SOURCES = {
    "fill": "kernels slow down on few keys; public rows do not tell 300 from 100 or 450",
    "call": "seconds of the host in a step, at most: tests hold a CPU to it, and `burst_bench.check` a GPU",
    "loops": "fitted, seconds of a step: launches by the A100s' hosts, and what the model leaves out; "
    "rows of no other machine tell it, and of collectives of TP and EP it is an assumption",
    "links": "an assumption; public rows do not tell it from 1",
    "latency": "an assumption; from 2e-06 to 3e-05 the median error moves by less than a point",
    "slowdown": "8 thread blocks of NCCL on 132 multiprocessors",
    "products": "an assumption, of training steps alone: large products of matrices in 16 bits",
    "host_link": "an assumption: PCIe 4 with 16 lanes, less its overhead",
    "host_memory": "an assumption: 8 GPUs share 160 GB/s, for an optimizer that is offloaded",
}
_STEP_HEAD = """
### Of training steps

No data sheet gives these either. One published step tells the last; none of the others is fitted.
"""
COUNTED = 4 / 3
"""FLOPs that the MFU of DeepSpeed's chart counts, as multiples of those of the model under its mask.

The chart does not say what it counts. Megatron-DeepSpeed's log counts the forward that is computed again,
and pairs that the mask leaves out (`throughput_calculator` in its megatron/utils.py). One row tells (FPDT of
Llama3-8B at 2M tokens, which is not judged): attention would run at 87 % of an A100's peak if neither counts,
at 65 % if the first does, at 33 % if both do. Flash kernels reach 65 %."""
_STEP = {
    "ADAM": (
        memory.ADAM,
        "bytes of a parameter: a copy and two moments (arXiv 1910.02054, section 3)",
    ),
    "FUSED_LOGITS": (memory.FUSED_LOGITS, "bytes; the fused loss takes a sixteenth of a GPU, here of 80 GB"),
    "RESERVED": (memory.RESERVED, "an assumption: bytes of CUDA, NCCL and the allocator's gaps"),
    "FORWARD": (time.FORWARD, "counted: one product with each matrix"),
    "BACKWARD": (time.BACKWARD, "counted: gradients of the input and of the matrix"),
    "EMBEDDING": (time.EMBEDDING, "an assumption: passes of memory over the hidden states, both directions"),
    "HIDDEN": (time.HIDDEN, "an assumption: passes over a layer's hidden states in a forward"),
    "HEADS": (time.HEADS, "an assumption: passes over queries and keys in a forward"),
    "WIDTH": (time.WIDTH, "an assumption: passes over the MLP's width in a forward"),
    "COPIES": (time.COPIES, "an assumption: passes over the copies of tokens for experts in a forward"),
    "COLLECTIVES": (
        time.COLLECTIVES,
        "a gather and a scatter around attention, and around an MLP (arXiv 2205.05198, section 4.2)",
    ),
    "EXCHANGES": (time.EXCHANGES, "counted: tokens go to experts, and back"),
    "ADAM_ON_GPU": (time.ADAM_ON_GPU, "counted: bytes of a parameter, its weight in 16 bits included"),
    "ADAM_ON_HOST": (time.ADAM_ON_HOST, "counted: the same without the weight, which the link carries"),
    "AS_FAST": (AS_FAST, "an assumption: plans within this factor count as equally fast"),
    "PREFETCH": (time.PREFETCH, "DeepSpeed's default: parameters that ZeRO-3 gathers ahead, beside a module"),
    "PAGEABLE": (
        time.PAGEABLE,
        "of pinned memory's rate: pinning makes copies 4 to 6 times as fast (deepspeedai/DeepSpeed#5301)",
    ),
    "CHUNK": (CHUNK, "Megatron-DeepSpeed's default: tokens of a chunk of FPDT"),
    "COUNTED": (COUNTED, "told by one row: FLOPs in the MFU of DeepSpeed's chart, over those of the model"),
}
"""Numbers of the step model and of rows of training, by name: value, and its source."""
_MODULES = """
Bytes of a number that a part keeps for backward, and those that its backward has besides, by the modules of
layers. Logits are those of a loss that is not fused. For Megatron's local spec and for transformers they were
listed tensor by tensor on a CPU. Those of Megatron on TransformerEngine and of BMTrain follow from what fused
kernels must read; no GPU has confirmed them.

| modules | a norm | gated MLP | MLP without gate | logits | copies for experts |
|---|---|---|---|---|---|"""
_MACHINES = """
Two numbers of each machine are fitted to its own rows in the same file. On NVLink they are the shares of
the peak that kernels reach in both passes. On PCIe they are the share of the link and the crowding of an
all-to-all. All else is a maker's specification, with three exceptions. The backward share of the A100 has
no public row: it was set by hand, to come near the paper's figures. The exponentials of the B200 are twice
those of its special units, an assumption. The NIC of A100-quad is fitted to one published step of training.
The two numbers of PCIe are told apart badly: many pairs of them explain the rows about as well. The form of
the model was developed with all of these rows in view.

| machine | TFLOP/s | SMs | exp/s | memory GB/s | link GB/s | NIC GB/s | fitted |
|---|---|---|---|---|---|---|---|"""
_TRAINING = """
## Training steps

`burst-mcore plan` prints the range of errors of the same kind of plan with each predicted speed. The rows are
in [training.json](../../benchmarks/public/training.json), each with its source. Predictions are those of the
model as it is now; none of these rows is fitted. Some sources leave a setting open: then a run has a row for
each assumption. Speeds are predicted even where memory is predicted not to suffice.
"""
_LOOPS = """
## Whose loop a row runs

Each method is predicted from the loop of the project that was measured, which was read and not fitted. Steps
are those of gradients on a ring of G. Bytes of memory count for an element: of O merged in forward, of dQ and
of dK, dV in backward. An exchange of heads moves each byte 4 times through memory, and nothing hides it.

| source | gradients | steps | merge | dQ | dK, dV |
|---|---|---|---|---|---|"""
LOOPS = (RING_FLASH, TRANSFORMER_ENGINE, INTERNEVO, *MAGI_RING.values(), *MAGI_DOUBLE_RING.values())
"""Loops on the page."""


def summary(folder: Path) -> str:
    """Return the committed page: the errors of the files of rows in `folder`, by machine."""
    return "\n".join([_HEAD, *_in_short(_report(folder)), _DETAILS])


def details(folder: Path) -> str:
    """Return the sections of all rows in `folder` and all numbers of the model."""
    report = _report(folder)
    return "\n".join([*_choices(report), *_numbers(), *_loops(), *_training(judged(folder)), *_rows(report)])


def _report(folder: Path) -> Report:
    files = sorted(path for path in folder.glob("*.json") if path.name not in (CALIBRATION, PAPER, ROWS))
    return compare(files, [folder / CALIBRATION])


def _training(rows: Sequence[Judged]) -> Iterator[str]:
    """Yield the section of training steps: the range of errors of each kind of plan, and each row."""
    yield f"{_TRAINING}\n| kind of plan | public runs | predicted speed was off by |\n|---|---|---|"
    for errors in ranges(rows):
        yield f"| {errors.kind} | {errors.runs} | {errors.range} |"
    yield "\n| kind | run | plan | unit | measured | predicted | error |\n|---|---|---|---|---|---|---|"
    for one in sorted(rows, key=lambda one: KINDS.index(one.kind)):
        where = f"{one.run.model.name} on {one.run.plan.gpus} {one.run.hardware}, {one.run.seq}"
        unit, measured = one.row["metric"], float(one.row["value"])
        yield (
            f"| {one.kind} | {where} | {one.run.plan} | {unit} | {measured:.4g} | {one.value:.4g} | "
            f"{one.error:+.0%} |"
        )


def _in_short(report: Report) -> Iterator[str]:
    yield f"## In short\n\n{report.sentence}.\n"
    yield "| machine | rows | median error | 90 % within |\n|---|---|---|---|"
    machines: dict[str, list[Compared]] = defaultdict(list)
    for one in report.judged:
        assert one.row is not None
        machines[one.row.hardware].append(one)
    for name, members in machines.items():
        part = Report(members)
        yield f"| {name} | {len(members)} | {part.median:.1%} | {part.within(0.9):.1%} |"
    yield f"{_MISSES}\n{_doubt(report)}\n"


def _choices(report: Report) -> Iterator[str]:
    yield f"## Could any model do better?\n\n{_scatter(report)}\n\n## Choices\n\n{_REGRET}"
    yield "| group | chosen | measured best | regret |\n|---|---|---|---|"
    for group in report.regret:
        yield f"| {group['group']} | {group['chosen']} | {group['measured_best']} | {group['regret']:.1%} |"


def _doubt(report: Report) -> str:
    """Return what the model would predict of the rows `DOUBTED` with the head dim that fits them."""
    hardware, seq, head_dim = DOUBTED
    rows = [one for one in report.judged if one.row and (one.row.hardware, one.row.seq) == (hardware, seq)]
    again = [replace(one, predicted=_with_head_dim(one, head_dim)) for one in rows]
    before, after = (
        (sum(error <= WITHIN for error in part.errors), part.median) for part in (Report(rows), Report(again))
    )
    words = (
        f"The rows of {hardware} at 32K are printed with a head dim of 32, and counted so. "
        f"A head dim of {head_dim} fits them better: {after[0]} of {len(rows)} would be within {WITHIN:.0%} "
        f"({before[0]} now), with a median error of {after[1]:.0%} ({before[1]:.0%} now). "
        "The same table has 8 heads of 128 at 128K: a quarter of their time is 11.9 ms, and these rows took "
        "10.9. Whether the label is wrong is not known."
    )
    return textwrap.fill(words, 110)


def _with_head_dim(one: Compared, head_dim: int) -> float:
    assert one.row is not None
    figure = figure_of(replace(one.row, head_dim=head_dim), MACHINES[one.row.hardware].rates_by(FITTED))
    assert not isinstance(figure, str)
    return figure


def equal_work(judged: Iterable[Compared]) -> list[list[Compared]]:
    """Return rows in classes of equal work, each in ascending order of its figure."""
    classes: dict[object, list[Compared]] = defaultdict(list)
    for one in judged:
        row = one.row
        assert row is not None
        plan = plan_of(row)
        assert isinstance(plan, MethodPlan)
        if plan.heads == row.gpus:
            plan = replace(plan, layout="")
            loop = plan.loop and replace(plan.loop, source="", draw=follows)
            plan = replace(plan, double=False, loop=loop)
        classes[row.group, row.figure, plan].append(one)
    return [sorted(members, key=_measured) for members in classes.values()]


def _measured(one: Compared) -> float:
    assert one.measured is not None
    return one.measured


def missed_at_least(figures: Sequence[float]) -> int:
    """Return how many of some figures, in ascending order, one prediction misses by more than `WITHIN`."""
    reach = (1 + WITHIN) / (1 - WITHIN)
    return len(figures) - max(sum(low <= other <= low * reach for other in figures) for low in figures)


def _scatter(report: Report) -> str:
    """Return how far measurements of equal work are apart, and which bars that excludes for any model."""
    classes = [list(map(_measured, members)) for members in equal_work(report.judged)]
    several = sorted(figures[-1] / figures[0] - 1 for figures in classes if len(figures) > 1)
    count, floor = sum(map(len, classes)), sum(map(missed_at_least, classes))
    missed = sum(error > WITHIN for error in report.errors)
    spread: dict[tuple[object, ...], float] = defaultdict(float)
    for members in equal_work(one for one in report.compared if one.error is not None):
        group = members[0].row.group if members[0].row is not None else ()
        spread[group] = max(spread[group], _measured(members[-1]) / _measured(members[0]) - 1)
    by_name = {" ".join(map(str, group)): value for group, value in spread.items()}
    lost = [group for group in report.regret if group["regret"] > LOSS]
    blurred = sum(by_name[group["group"]] >= group["regret"] for group in lost)
    shared = sum(len(figures) for figures in classes if len(figures) > 1)
    middle, tenth = statistics.median(several), several[int(0.9 * len(several))]
    scattered = (
        f"{_EQUAL} {shared} of the {count} rows have others of equal work, in {len(several)} classes. "
        f"Within a class the largest figure exceeds the smallest by {middle:.0%} in the median, "
        f"by {tenth:.0%} or more in a tenth of the classes, and by {several[-1]:.0%} at most."
    )
    rows = "row" if floor == 1 else "rows"
    fault = f"so most of its misses are {'' if 2 * floor < missed else 'not '}its own fault"
    bounded = (
        f"Rows of equal work differ so much that every model must miss at least {floor} {rows} by more than "
        f"{WITHIN:.0%}. Ours misses {missed}, {fault}. The differences {_exclude(floor, count)} 90 % of the "
        f"rows within {WITHIN:.0%}. In {blurred} of the {len(lost)} groups with a regret above {LOSS:.0%} "
        f"equal work differs by at least the regret."
    )
    return f"{textwrap.fill(scattered, 110)}\n\n{textwrap.fill(bounded, 110)}"


def _exclude(floor: int, count: int) -> str:
    return "exclude" if floor > count / 10 else "do not exclude"


def _numbers() -> Iterator[str]:
    yield f"{_CONSTANTS}\n| constant | value | source |\n|---|---|---|"
    for field in fields(CONSTANTS):
        yield f"| {field.name} | {getattr(CONSTANTS, field.name):g} | {_SOURCES[field.name]} |"
    yield f"{_STEP_HEAD}\n| constant | value | source |\n|---|---|---|"
    for name, (value, source) in _STEP.items():
        yield f"| {name} | {value:g} | {source} |"
    yield _MODULES
    for name, made in MODULES.items():
        sizes = made.norm, made.gated, PLAIN, made.logits, made.copies
        shown = (f"{each.kept} + {each.backward}" for each in sizes)
        yield f"| {name} | {' | '.join(shown)} |"
    yield f"\n### Of machines\n{_MACHINES}"
    for machine in MACHINES.values():
        yield (
            f"| {machine.name} | {machine.tflops:g} | {machine.multiprocessors} | "
            f"{machine.exponentials:g}e12 | "
            f"{machine.memory_rate:g} | {machine.link:g} | {machine.nic:g} | {fitted(machine)} |"
        )


def _loops() -> Iterator[str]:
    yield _LOOPS
    for loop in LOOPS:
        dtype = "float32" if loop.float32 else "16 bits"
        passes = loop.passes
        rotates = f"{passes.rotates:g}" + f" + {loop.repeats:g} a query head" * (loop.repeats > 0)
        yield (
            f"| {loop.source} | {dtype} | {_steps_of(loop)} | {passes.out:g} | {passes.stays:g} | {rotates} |"
        )


def _steps_of(loop: Loop) -> str:
    """Return how many steps gradients make on a ring, or on a double ring of M windows of L."""
    size = 4
    flat = loop.draw(LoopPlace(0, 1, size), gradients=True)
    steps = sum(isinstance(action, Send) and action.channel.kind != Kind.DATA for action in flat)
    within = f"G{'' if steps == size else f' - {size - steps}'}"
    return within if loop.draw in (follows, together) else "L in each of M windows, M between them"


def fitted(machine: Machine) -> str:
    """Return the two fitted numbers in words."""
    return ", ".join(f"{name} {getattr(machine, name):g}" for name in machine.fitted)


def _rows(report: Report) -> Iterator[str]:
    yield "\n## All rows\n\nTFLOP/s a GPU, or passes a second. Rows marked c were used for calibration.\n"
    yield "| row | measured | predicted | error | |\n|---|---|---|---|---|"
    for one in _in_order(report.compared):
        error = "" if one.error is None else f"{one.error:+.1%}"
        predicted = "" if one.predicted is None else f"{one.predicted:.4g}"
        remark = one.why or "c" * one.calibrated
        yield f"| {one.words} | {one.measured:.4g} | {predicted} | {error} | {remark} |"
    yield ""


def _in_order(compared: Sequence[Compared]) -> list[Compared]:
    """Return rows by machine, in the order of their files."""
    order = list(MACHINES)
    return sorted(compared, key=lambda one: order.index(one.row.hardware) if one.row else 0)


if __name__ == "__main__":
    sys.stdout.write(details(Path(__file__).parents[2] / "benchmarks" / "public"))
