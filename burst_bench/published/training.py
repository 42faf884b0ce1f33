"""Published figures of whole training steps, each predicted by the step model for the way that was run.

What a source leaves open is assumed once for all rows of a method; the assumptions stand beside the methods.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from burst_bench.published.methods import WAYS, seconds_of
from burst_bench.published.methods import MethodWay as AttentionWay
from burst_bench.published.rows import Row
from burst_mcore.attention.autotune.ways import Ranks
from burst_mcore.attention.schedule.actions import Pass
from burst_mcore.machines import MACHINES, Machine
from burst_mcore.rates import Rates
from burst_plan.step.attention import AttentionTime
from burst_plan.step.figures import Cluster, PredictedStep
from burst_plan.step.figures import step as step_of
from burst_plan.step.memory import longest, total
from burst_plan.step.model import PRESETS, Model
from burst_plan.step.way import Way, why_not

OUT_OF_MEMORY = "out of memory"


@dataclass(frozen=True, kw_only=True)
class Training:
    """A training run that was measured."""

    model: Model
    way: Way
    seq: int
    per_node: int
    hardware: str
    method: str = ""
    """Of attention, a name in WAYS of `published.methods`, or "flat burst"; "": as `plan` chooses."""
    variant: str = ""
    """Of the method, as in `burst_bench.published.rows.Row`."""
    mask: str = "causal"
    """causal or full."""
    counted: float = 1.0
    """FLOPs that a source's MFU counts, as multiples of those of the model under its mask."""


def predicted(run: Training, machines: Mapping[str, Machine] = MACHINES) -> PredictedStep | str:
    """Return the step of a run, or the reason why it does not go."""
    machine = machines[run.hardware]
    ranks = Ranks(run.way.gpus, min(run.way.gpus, run.per_node))
    reason = why_not(run.way, run.model, run.seq, ranks)
    if reason is not None:
        return reason
    place = Cluster(
        ranks=ranks,
        rates=machine.rates,
        peak=machine.tflops * 1e12,
        memory=machine.memory,
        name=run.hardware,
    )
    if not run.method:
        return step_of(run.model, run.way, run.seq, place, run.mask)
    row = _row(run, ranks)
    way = _attention_way(run, row)
    if isinstance(way, str):
        return way
    forward = _seconds(replace(row, passes="fwd"), way, machine.rates)
    backward = _seconds(replace(row, passes="bwd"), way, machine.rates)
    nodes = row.ranks.size // row.ranks.intra if way.double else 1
    runs = AttentionTime(
        forward=forward,
        backward=backward,
        kernel=forward + backward,  # what of the sum is exposed is not told apart here
        head_parallel=way.heads,
        direction=way.direction.value,
        nodes=nodes,
    )
    return PredictedStep(run.model, run.way, run.seq, place, runs)


@lru_cache(maxsize=256)
def _seconds(row: Row, way: AttentionWay, rates: Rates) -> float:
    return seconds_of(row, way, rates)


def _row(run: Training, ranks: Ranks) -> Row:
    """Return attention of one layer as a row."""
    model, ring = run.model, run.way.ring(ranks)
    return Row(
        hardware=run.hardware,
        gpus=ring.size,
        gpus_per_node=ring.intra,
        heads=model.heads // run.way.tp,
        kv_heads=max(1, model.kv_heads // run.way.tp),
        head_dim=model.head_dim,
        batch=1,
        seq=run.seq,
        mask="full" if run.mask == "full" else "causal",
        passes="fwd",
        method=run.method,
        variant=run.variant,
        tflops=1.0,
    )


def _attention_way(run: Training, row: Row) -> AttentionWay | str:
    if run.method == "flat burst":
        return AttentionWay(direction=Pass.QUERY)
    return WAYS[run.method](row)


def value_of(metric: str, step: PredictedStep, counted: float = 1.0) -> float | None:
    """Return a figure of a step in the unit of its source; None for a metric that no step has.

    counted: as in `Training`.
    """
    match metric:
        case "tgs" | "tokens per second per GPU":
            return step.tokens_per_second
        case "tokens per second, all GPUs":
            return step.tokens_per_second * step.way.gpus
        case "mem_gb":
            return total(step.memory) / 1e9
        case "model TFLOP/s per GPU":
            return step.mfu * step.place.peak / 1e12
        case "MFU":
            return 100 * step.mfu * counted
    return None


def figure(run: Training, metric: str, machines: Mapping[str, Machine]) -> tuple[float | None, str | None]:
    """Return (figure, None), or (None, the reason why there is none)."""
    step = predicted(run, machines)
    if isinstance(step, str):
        return None, step
    if metric == "longest sequence":
        return longest(lambda seq: replace(step, seq=seq).fits, unit=1024 * step.way.gpus), None
    if not step.fits:
        return None, f"{OUT_OF_MEMORY}: {total(step.memory) / 1e9:.0f} of {step.place.usable / 1e9:.0f} GB"
    value = value_of(metric, step, run.counted)
    return value, None if value is not None else f"no step has a {metric}"


# The BurstEngine paper. FSDP everywhere but in Megatron-CP; what it says of each method is below.
_PAPER: dict[str, tuple[str, dict[str, Any]]] = {
    # "Megatron does not provide FSDP implementation and optimizer offloading"
    "megatron-cp": ("ring", {"zero": 0, "framework": "megatron", "recompute": "full", "fused_loss": False}),
    # "DeepSpeed-Ulysses has FSDP and optimizer offloading"
    "deepspeed-ulysses": ("ulysses", {"recompute": "full", "fused_loss": False, "offload_optimizer": True}),
    # "All evaluations are conducted with gradient checkpointing": full, an assumption for these two
    "double-ring": ("double-ring", {"recompute": "full", "fused_loss": False}),
    "usp": ("usp", {"recompute": "full", "fused_loss": False}),
    "burst selective++": ("burst", {"framework": "bmtrain", "recompute": "attention"}),
    "burst segment 0.5": ("burst", {"framework": "bmtrain", "recompute": "segment", "keep": 0.5}),
    "burst-usp selective++": ("loongtrain", {"framework": "bmtrain", "recompute": "attention"}),
}


def of_paper(model: Model, seq: int, gpus: int, hardware: Mapping[str, Any], method: str) -> Training:
    """Return a run of the paper's end-to-end experiments. Raises KeyError for a method it does not have."""
    attention, settings = _PAPER[method.split(" (")[0]]
    way = Way(**{"framework": "deepspeed", "zero": 3, "cp": gpus, **settings})
    return Training(
        model=model, way=way, seq=seq, method=attention, hardware=_paper_machine(hardware),
        per_node=hardware["gpus_per_node"],
    )  # fmt: skip


def of_ablation(base: Training, entry: Mapping[str, Any]) -> Training:
    """Return a run of the ablation: one ring or two, which side travels, the loss, and the recompute."""
    method = {
        (False, False): "ring",
        (True, False): "flat burst",
        (False, True): "double-ring",
        (True, True): "burst",
    }[entry["backward"], entry["topology"]]
    word = {"selective++": "attention"}.get(entry["recompute"], entry["recompute"])
    keep = 0.5 if word == "segment" else 1.0
    way = replace(base.way, fused_loss=entry["fused_loss"], recompute=word, keep=keep)
    return replace(base, way=way, method=method)


def _paper_machine(hardware: Mapping[str, Any]) -> str:
    name = next((name for name in MACHINES if hardware["gpu"].startswith(name)), None)
    if name is None:
        raise ValueError(f"unknown GPU {hardware['gpu']!r}: one of {', '.join(MACHINES)}")
    return name


MODELS = {
    "Llama2-7B": "llama2-7b",
    "Llama-8B": "llama3-8b",
    "Llama3-8B": "llama3-8b",
    "Llama3-70B": "llama3-70b",
    "GPT 2.7B": "gpt-2.7b",
    "GPT 6.7B": "gpt-6.7b",
    "GPT 13B": "gpt-13b",
    "GPT 30B": "gpt-30b",
}
_HARDWARE = {"H100": ("H100", 8), "A100 80GB": ("A100-NVLink", 8), "A100": ("A100-quad", 4)}
"""Words of a source: the machine, and GPUs of a node.

The A100s of DeepSpeed's chart are taken to have 80 GB, an assumption: their source names 40."""
FITTED: tuple[dict[str, Any], ...] = (
    {"model": "Llama3-70B", "method": "DeepSpeed Ulysses", "seq": 32768},
    {"model": "Llama3-8B", "method": "FPDT (Ulysses-Offload)", "seq": 2097152},
)
"""Rows that are not judged: the network of A100-quad is fitted to one, the other tells `COUNTED`."""
CHART = "DeepSpeed blogs/ulysses-offload"
"""How the rows of DeepSpeed's chart name their source."""
COUNTED = 4 / 3
"""FLOPs that the MFU of that chart counts, as multiples of those of the model under its mask.

The chart does not say what it counts. Megatron-DeepSpeed's log counts the forward that is computed again,
and pairs that the mask leaves out (`throughput_calculator` in its megatron/utils.py). The row of `FITTED`
tells: attention would run at 87 % of an A100's peak if neither counts, at 65 % if the first does, at 33 % if
both do. Flash kernels reach 65 %."""

_INPUTS = {"offload_inputs": True}  # `--checkpoint-in-cpu` of its tutorial; of Megatron-SP an assumption
_TILED = {**_INPUTS, "tiled": True, "fused_loss": True}
_OPTIMIZER = {"offload_optimizer": True}
_RUNS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "Megatron-SP": ("ulysses", "", "tp", {"framework": "megatron", "zero": 1, **_INPUTS}),
    "DeepSpeed Ulysses": ("ulysses", "", "cp", {"framework": "megatron-deepspeed", **_INPUTS}),
    "FPDT": ("ulysses", "", "cp", {"framework": "megatron-deepspeed", "chunked": True, **_TILED}),
    # Of EasyContext: its ring is that of zhuzilin/ring-flash-attention.
    "ring attention, ZeRO-3 offload": ("ring", "zigzag", "cp", _OPTIMIZER),
    "data parallel, ZeRO-3 offload": ("ring", "zigzag", "dp", _OPTIMIZER),
    # With Liger's kernels, as its tutorial has it.
    "ALST": ("ulysses", "", "cp", {"framework": "liger-deepspeed", **_TILED, **_OPTIMIZER}),
}
"""By the first words of a method: attention, its variant, the degree that takes all GPUs, other settings."""


def fitted(entries: Mapping[str, Any]) -> bool:
    """Return whether a row of training is one of `FITTED`."""
    named = {**entries, "model": entries["model"].get("name")}
    return any(named.items() >= row.items() for row in FITTED)


def of_row(entries: Mapping[str, Any]) -> Training | str:
    """Return the run of a row of training, or the reason why it is not modelled.

    A row says its way in the fields of `Way`, or a method in words that `_RUNS` knows.

    Raises:
        ValueError: a row without the fields of training, or with sizes or a way that are not legal.
    """
    if "way" in entries:
        return _as_it_says(entries)
    try:
        sizes, gpus, seq, method = (entries[name] for name in ("model", "gpus", "seq", "method"))
        name, dtype = sizes["name"], sizes.get("dtype", "")
        known = [place for words, place in _HARDWARE.items() if words in entries["hardware"]]
    except (KeyError, TypeError) as error:
        raise ValueError(f"a row of training lacks a field: {type(error).__name__} {error}") from None
    if "8" in dtype:
        return "products in 8 bits are not modelled"
    if name not in MODELS:
        return f"unknown model {name}"
    if not known:
        return f"unknown hardware {entries['hardware']}"
    runs = [run for words, run in _RUNS.items() if method.startswith(words)]
    if not runs:
        return f"unknown method {method}"
    machine, per_node = known[0]
    attention, variant, degree, settings = runs[0]
    whole = {"framework": "deepspeed", "zero": 3, "recompute": "full", "fused_loss": False, degree: gpus}
    return Training(
        model=PRESETS[MODELS[name]], way=Way(**{**whole, **settings}), seq=seq, per_node=per_node,
        hardware=machine, method=attention, variant=variant,
        counted=COUNTED if CHART in str(entries.get("source")) else 1.0,
    )  # fmt: skip


def _as_it_says(entries: Mapping[str, Any]) -> Training | str:
    """Return the run of a row that says all of its way and of its model."""
    try:
        model, way = Model(**entries["model"]), Way(**entries["way"])
        seq, per_node, hardware = (entries[name] for name in ("seq", "gpus_per_node", "hardware"))
    except (KeyError, TypeError) as error:
        raise ValueError(f"a row of training lacks a field: {type(error).__name__} {error}") from None
    if hardware not in MACHINES:
        return f"unknown hardware {hardware}"
    return Training(model=model, way=way, seq=seq, per_node=per_node, hardware=hardware)
