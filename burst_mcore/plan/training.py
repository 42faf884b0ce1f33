"""Published figures of whole training steps, each predicted by the step model for the way that was run.

What a source leaves open is assumed once for all rows of a method; the assumptions stand beside the methods.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from burst_mcore.attention.autotune.ways import Ranks
from burst_mcore.attention.schedule.actions import Pass
from burst_mcore.machines import MACHINES, Machine
from burst_mcore.plan.methods import METHODS as ATTENTION
from burst_mcore.plan.methods import Way as AttentionWay
from burst_mcore.plan.methods import seconds_of
from burst_mcore.plan.rows import Row
from burst_mcore.rates import Rates
from burst_mcore.step.attention import Attention
from burst_mcore.step.figures import Place, Step
from burst_mcore.step.memory import total
from burst_mcore.step.model import PRESETS, Model
from burst_mcore.step.way import Way, why_not

OUT_OF_MEMORY = "out of memory"


@dataclass(frozen=True, kw_only=True)
class Training:
    """A training run that was measured."""

    model: Model
    way: Way
    seq: int
    per_node: int
    hardware: str
    method: str
    """Of attention, a name in `burst_mcore.plan.methods.METHODS`, or "flat burst"."""
    mask: str = "causal"
    """causal or full."""
    memory: float | None = None
    """Bytes of a GPU, where they are not the machine's own."""


def predicted(run: Training, machines: Mapping[str, Machine] = MACHINES) -> Step | str:
    """Return the step of a run, or the reason why it does not go."""
    machine = machines[run.hardware]
    ranks = Ranks(run.way.gpus, min(run.way.gpus, run.per_node))
    reason = why_not(run.way, run.model, run.seq, ranks)
    if reason is not None:
        return reason
    row = _row(run, ranks)
    way = _attention_way(run, row)
    if isinstance(way, str):
        return way
    forward = _seconds(replace(row, passes="fwd"), way, machine.rates)
    backward = _seconds(replace(row, passes="bwd"), way, machine.rates)
    place = Place(
        ranks=ranks,
        rates=machine.rates,
        peak=machine.tflops * 1e12,
        memory=run.memory or machine.memory,
        name=run.hardware,
    )
    nodes = row.ranks.size // row.ranks.intra if way.double else 1
    runs = Attention(
        forward=forward,
        backward=backward,
        kernel=forward + backward,  # what of the sum is exposed is not told apart here
        head_parallel=way.heads,
        direction=way.direction.value,
        nodes=nodes,
    )
    return Step(run.model, run.way, run.seq, place, runs)


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
        tflops=1.0,
    )


def _attention_way(run: Training, row: Row) -> AttentionWay | str:
    if run.method == "flat burst":
        return AttentionWay(direction=Pass.QUERY)
    return ATTENTION[run.method](row)


def value_of(metric: str, step: Step) -> float | None:
    """Return a figure of a step in the unit of its source; None for a metric that no step has."""
    match metric:
        case "tgs" | "tokens per second per GPU":
            return step.tokens_per_second
        case "tokens per second, all GPUs":
            return step.tokens_per_second * step.way.gpus
        case "mem_gb":
            return total(step.memory) / 1e9
        case "MFU":
            return 100 * step.mfu
    return None


def figure(run: Training, metric: str, machines: Mapping[str, Machine]) -> tuple[float | None, str | None]:
    """Return (figure, None), or (None, the reason why there is none)."""
    step = predicted(run, machines)
    if isinstance(step, str):
        return None, step
    if not step.fits:
        return None, f"{OUT_OF_MEMORY}: {total(step.memory) / 1e9:.0f} of {step.place.usable / 1e9:.0f} GB"
    value = value_of(metric, step)
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
    "Llama3.1-8B": "llama3-8b",
    "Llama3-8B": "llama3-8b",
    "Llama3-70B": "llama3-70b",
    "Llama3.1-405B": "llama3-405b",
    "GPT 2.7B": "gpt-2.7b",
    "GPT 6.7B": "gpt-6.7b",
    "GPT 13B": "gpt-13b",
    "GPT 30B": "gpt-30b",
}
_HARDWARE: tuple[tuple[str, str, int, float | None], ...] = (
    ("H100 96GB", "H100", 8, 96e9),
    ("H100", "H100", 8, None),
    ("A100 80GB", "A100-NVLink", 8, None),
    ("A100", "A100-quad", 4, None),
)
"""Words of a source, the machine, GPUs of a node, and bytes of a GPU where they are not the machine's. The
A100s of DeepSpeed's rows are taken to have 80 GB, an assumption: their source names 40."""
FITTED = {"model": "Llama3-70B", "method": "DeepSpeed Ulysses", "seq": 32768}
"""The row to which the network of A100-quad is fitted; it is not judged."""
PIPELINE_BATCH = 2
"""Micro-batches for each stage of a pipeline whose source does not give them: an assumption."""


def fitted(entries: Mapping[str, Any]) -> bool:
    """Return whether a row of training is the one of `FITTED`."""
    return {**entries, "model": entries["model"]["name"]}.items() >= FITTED.items()


def of_row(entries: Mapping[str, Any]) -> Training | str:
    """Return the run of a row of training, or the reason why it is not modelled.

    Raises:
        ValueError: a row without the fields of training.
    """
    try:
        sizes, gpus, seq, method = (entries[name] for name in ("model", "gpus", "seq", "method"))
        name, dtype = sizes["name"], sizes.get("dtype", "")
        known = [one for one in _HARDWARE if one[0] in entries["hardware"]]
    except (KeyError, TypeError) as error:
        raise ValueError(f"a row of training lacks a field: {type(error).__name__} {error}") from None
    if "8" in dtype:
        return "products in 8 bits are not modelled"
    if name not in MODELS:
        return f"unknown model {name}"
    if not known:
        return f"unknown hardware {entries['hardware']}"
    way = _way_of(method, gpus)
    if isinstance(way, str):
        return way
    _, machine, per_node, memory = known[0]
    return Training(
        model=PRESETS[MODELS[name]], way=way[1], seq=seq, per_node=per_node, hardware=machine,
        method=way[0], memory=memory,
    )  # fmt: skip


def _way_of(method: str, gpus: int) -> tuple[str, Way] | str:
    """Return (attention, way) of the words of a source."""
    whole = Way(framework="deepspeed", zero=3, recompute="full", fused_loss=False)
    degrees = {name.lower(): int(n) for name, n in re.findall(r"(FSDP|TP|PP|CP)(\d+)", method)}
    if method.startswith("torch context_parallel"):
        pp = degrees.get("pp", 1)
        micro = PIPELINE_BATCH * pp if pp > 1 else 1
        return "all-gather", replace(
            whole, tp=degrees.get("tp", 1), pp=pp, cp=degrees["cp"], dp=degrees["fsdp"], micro=micro
        )
    if method == "Megatron-SP":  # matrices and sequence over all ranks; activation checkpointing
        return "ulysses", replace(whole, framework="megatron", zero=1, tp=gpus)
    if method == "DeepSpeed Ulysses":
        return "ulysses", replace(whole, framework="megatron", cp=gpus)  # models of Megatron-DeepSpeed
    if method.startswith("ring attention, ZeRO-3 offload"):
        return "ring", replace(whole, cp=gpus, offload_optimizer=True)
    if method.startswith("data parallel, ZeRO-3 offload"):
        return "ring", replace(whole, dp=gpus, offload_optimizer=True)
    if "FPDT" in method or "ALST" in method:
        return "its chunks of attention, or inputs of layers, wait in host memory by a schedule of its own"
    return f"unknown method {method}"
