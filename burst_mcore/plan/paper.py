"""The figures in a file of a paper's results: speeds and memory of training, and rows of attention."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from burst_mcore.machines import MACHINES
from burst_mcore.plan.rows import Row

METHODS = {"megatron-cp": "ring"}
"""Names of methods in a paper that have another name here."""


@dataclass(frozen=True)
class Figure:
    """One figure: its name, "tgs", "mem_gb" or "tflops", its value, and the row of attention if it is one."""

    name: str
    metric: str
    measured: float | None
    """None: out of memory, or not run."""
    row: Row | None = None
    """The row of a "tflops"; its own figure is 1 where nothing was measured."""


def figures(results: Mapping[str, Any]) -> Iterator[Figure]:
    """Yield every figure. Raises ValueError for contents of another form."""
    try:
        yield from _end_to_end(results.get("end_to_end", ()))
        for section in ("ablation_14b_1M_32", "inter_node_14b", "intra_node_14b"):
            yield from _rows_of_training(section, results.get(section, ()))
        for name, value in results.get("sparse_tgs_256K", {}).items():
            yield Figure(f"sparse_tgs_256K/{name}", "tgs", value)
        for section, table in results.items():
            match = re.fullmatch(r"attention_tflops_(\d+)gpu_(\w+)_heads", section)
            if match:
                yield from _attention(section, int(match[1]), results["models"][match[2]], results, table)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"a paper's results lack a field: {type(error).__name__} {error}") from None


def _end_to_end(methods: Any) -> Iterator[Figure]:
    for entry in methods:
        for run, values in entry.items():
            if run == "method":
                continue
            tgs, memory = values or (None, None)
            name = f"end_to_end/{entry['method']}/{run}"
            yield Figure(name, "tgs", tgs)
            yield Figure(name, "mem_gb", memory)


def _rows_of_training(section: str, entries: Any) -> Iterator[Figure]:
    for entry in entries:
        words = [f"{key}={value}" for key, value in entry.items() if key not in ("tgs", "mem_gb", "mfu")]
        for metric in ("tgs", "mem_gb"):
            yield Figure(f"{section}/{','.join(words)}", metric, entry[metric])


def _attention(
    section: str, gpus: int, model: Mapping[str, int], results: Mapping[str, Any], table: Mapping[str, Any]
) -> Iterator[Figure]:
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
                method=METHODS.get(method, method),
                tflops=1.0 if measured is None else measured,
            )
            yield Figure(f"{section}/{method}/{seq}", "tflops", measured, row)
