"""The page docs/predictions.md: public rows beside predictions, and the sources of the model's numbers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path

from burst_mcore.machines import CONSTANTS, MACHINES, Machine
from burst_mcore.plan.against import Compared, Report, compare

CALIBRATION = "calibration.json"
"""The file of rows that presets were fitted to, beside the files of public rows."""

_HEAD = """# What the model predicts, and what was measured

Look here before you trust a prediction. The cost model chooses routes, and answers `burst-mcore explain`,
`draw` and `doctor`. This page holds it to public measurements of attention. Make the page again with
`make tables`, or hold the model to rows of your own:

```
burst-mcore plan --against benchmarks/public/magi.json --calibrate benchmarks/public/calibration.json
```

A file is a JSON list of rows, in the fields of the files in [benchmarks/public](../benchmarks/public).
"""
_MISSES = """
The rows of A100-NVLink at 512, 8K and 32K tokens are the large misses. There measurements of equal work
differ by up to three times: with all ranks sharing heads, the three rings are one and the same program. Rows
of the same machine at 128K tokens are predicted well. The A100s on PCIe scatter alike.
"""
_REGRET = """A group is one problem: machine, GPUs, heads, K/V heads, head dim, batch, tokens, mask, pass.
The regret is the best measured figure over that of the split that the model chooses, less 1.
"""
_CONSTANTS = """
## Where the numbers come from

Seven constants hold for all GPUs. One of them is fitted, to the rows in
[calibration.json](../benchmarks/public/calibration.json).
"""
_SOURCES = {
    "fill": "kernels slow down on few keys; public rows do not tell 300 from 100 or 450",
    "call": "fitted; without any one machine the median error of the others moves by less than 3 points",
    "links": "an assumption; public rows do not tell it from 1",
    "slowdown": "8 thread blocks of NCCL on 132 multiprocessors",
    "products": "an assumption, of training steps alone: large products of matrices in 16 bits",
    "host_link": "PCIe 4 with 16 lanes, for what is offloaded",
    "host_memory": "8 GPUs share 200 GB/s of their host, for an optimizer that is offloaded",
}
_MACHINES = """
Two numbers of each machine are fitted to its own rows in the same file. On NVLink they are the shares of the
peak that kernels reach in both passes. On PCIe they are the share of the link and the crowding of an
all-to-all. All else is a maker's specification, with three exceptions. The backward share of the A100 has no
public row: it was set by hand beside the paper's figures. The exponentials of the B200 are twice those of its
special units, an assumption. The NIC of A100-quad is fitted to one published step of training. The form of the model was developed with all of these rows in view.

| machine | TFLOP/s | exp/s | memory GB/s | link GB/s | NIC GB/s | fitted |
|---|---|---|---|---|---|---|"""


def page(folder: Path) -> str:
    """Return the page for the files of rows in `folder`."""
    files = sorted(path for path in folder.glob("*.json") if path.name != CALIBRATION)
    report = compare(files, [folder / CALIBRATION])
    return "\n".join([_HEAD, *_summary(report), *_numbers(), *_rows(report)])


def _summary(report: Report) -> Iterator[str]:
    yield f"## In short\n\n{report.sentence}.\n"
    yield "| machine | rows | median error | 90 % within |\n|---|---|---|---|"
    machines: dict[str, list[Compared]] = defaultdict(list)
    for one in report.judged:
        assert one.row is not None
        machines[one.row.hardware].append(one)
    for name, members in machines.items():
        part = Report(members)
        yield f"| {name} | {len(members)} | {part.median:.1%} | {part.within(0.9):.1%} |"
    yield f"{_MISSES}\n## Choices\n\n{_REGRET}"
    yield "| group | chosen | measured best | regret |\n|---|---|---|---|"
    for group in report.regret:
        yield f"| {group['group']} | {group['chosen']} | {group['measured_best']} | {group['regret']:.1%} |"


def _numbers() -> Iterator[str]:
    yield f"{_CONSTANTS}\n| constant | value | source |\n|---|---|---|"
    for field in fields(CONSTANTS):
        yield f"| {field.name} | {getattr(CONSTANTS, field.name):g} | {_SOURCES[field.name]} |"
    yield _MACHINES
    for machine in MACHINES.values():
        yield (
            f"| {machine.name} | {machine.tflops:g} | {machine.exponentials:g}e12 | "
            f"{machine.memory_rate:g} | {machine.link:g} | {machine.nic:g} | {fitted(machine)} |"
        )


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
