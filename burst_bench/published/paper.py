"""The figures in a file of a paper's results: speeds and memory of training, and rows of attention."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from burst_bench.published.rows import Row
from burst_bench.published.training import Training, of_ablation, of_paper
from burst_mcore.machines import MACHINES
from burst_plan.step.model import Model
from burst_plan.words import tokens

RENAMED = {"megatron-cp": "ring"}
"""Names of methods in a paper that have another name here."""
VARIANTS = {"usp": "zigzag"}
"""Variants of methods in a paper: LoongTrain's ring between nodes is that of ring-flash-attention."""


@dataclass(frozen=True)
class PaperFigure:
    """One figure: its name, "tgs", "mem_gb" or "tflops", its value, and the row of attention if it is one."""

    name: str
    metric: str
    measured: float | None
    """None: out of memory, or not run."""
    row: Row | None = None
    """The row of a "tflops"; its own figure is 1 where nothing was measured."""
    run: Training | str | None = None
    """The training run, or the reason why there is none."""


def figures(results: Mapping[str, Any]) -> Iterator[PaperFigure]:
    """Yield every figure. Raises ValueError for contents of another form."""
    try:
        yield from _end_to_end(results)
        for section in ("ablation_14b_1M_32", "inter_node_14b", "intra_node_14b"):
            yield from _rows_of_training(section, results)
        for name, value in results.get("sparse_tgs_256K", {}).items():
            yield PaperFigure(f"sparse_tgs_256K/{name}", "tgs", value, run=_sparse(name, results))
        for section, table in results.items():
            match = re.fullmatch(r"attention_tflops_(\d+)gpu_(\w+)_heads", section)
            if match:
                yield from _attention(section, int(match[1]), results["models"][match[2]], results, table)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"a paper's results lack a field: {type(error).__name__} {error}") from None


def _model(name: str, results: Mapping[str, Any]) -> Model:
    sizes = dict(results["models"][name])
    dim = sizes["hidden"] // sizes["heads"]
    return Model(name=name, head_dim=dim, value_dim=dim, **sizes)


def _end_to_end(results: Mapping[str, Any]) -> Iterator[PaperFigure]:
    for entry in results.get("end_to_end", ()):
        for name, values in entry.items():
            if name == "method":
                continue
            tgs, memory = values or (None, None)
            model, seq, gpus = name.split("_")
            run: Training | str
            try:
                run = of_paper(
                    _model(model, results), tokens(seq), int(gpus), results["hardware"], entry["method"]
                )
            except KeyError as unknown:
                run = f"unknown method, model or field {unknown}"
            name = f"end_to_end/{entry['method']}/{name}"
            yield PaperFigure(name, "tgs", tgs, run=run)
            if memory is not None or values is None:
                yield PaperFigure(name, "mem_gb", memory, run=run)


def _rows_of_training(section: str, results: Mapping[str, Any]) -> Iterator[PaperFigure]:
    for entry in results.get(section, ()):
        words = [f"{key}={value}" for key, value in entry.items() if key not in ("tgs", "mem_gb", "mfu")]
        run = _run_of(section, entry, results)
        for metric in ("tgs", "mem_gb"):
            yield PaperFigure(f"{section}/{','.join(words)}", metric, entry[metric], run=run)


def _run_of(section: str, entry: Mapping[str, Any], results: Mapping[str, Any]) -> Training:
    """Return the run of a row: of the ablation, of several nodes, or of one node (optimizer on the host)."""
    hardware = results["hardware"]
    per_node = hardware["gpus_per_node"]
    if section.startswith("ablation"):
        base = of_paper(_model("14b", results), 2**20, 32, hardware, "burst selective++")
        return of_ablation(base, entry)
    seq = tokens(entry["seq"].replace("0.5M", "512K"))
    gpus = entry["nodes"] * per_node if "nodes" in entry else per_node
    base = of_paper(_model("14b", results), seq, gpus, hardware, "burst selective++")
    if "cp" not in entry:
        return base
    cp = entry["cp"]
    return replace(base, way=replace(base.way, cp=cp, dp=per_node // cp, offload_optimizer=True))


def _sparse(name: str, results: Mapping[str, Any]) -> Training | str:
    """Return the run of a mask: the row of a whole node, as its causal figure is that row's."""
    run = _run_of("intra", {"seq": "256K", "cp": results["hardware"]["gpus_per_node"]}, results)
    match name:
        case "causal balanced":
            return run
        case "masked dense":
            return replace(run, mask="full")
    return "the balance of its blocks is not given"


def _attention(
    section: str, gpus: int, model: Mapping[str, int], results: Mapping[str, Any], table: Mapping[str, Any]
) -> Iterator[PaperFigure]:
    hardware = results["hardware"]
    machine = next((name for name in MACHINES if hardware["gpu"].startswith(name)), hardware["gpu"])
    for method, values in table.items():
        if method == "seq":
            continue
        for seq, measured in zip(table["seq"], values, strict=True):
            row = Row(
                hardware=machine,
                gpus=gpus,
                gpus_per_node=hardware["gpus_per_node"],
                heads=model["heads"],
                kv_heads=model["kv_heads"],
                head_dim=model["hidden"] // model["heads"],
                batch=1,
                seq=seq,
                mask="causal",
                passes="fwd+bwd",
                method=RENAMED.get(method, method),
                variant=VARIANTS.get(method, ""),
                tflops=1.0 if measured is None else measured,
            )
            yield PaperFigure(f"{section}/{method}/{seq}", "tflops", measured, row)
