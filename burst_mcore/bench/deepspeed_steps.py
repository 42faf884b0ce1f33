"""A training step of DeepSpeed with one attention or another: time, bytes, memory."""

from __future__ import annotations

import logging
import os
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import nn

from burst_mcore.bench.head_memory import peak_bytes
from burst_mcore.bench.run import in_processes
from burst_mcore.bench.verdict import Verdict
from burst_mcore.deepspeed.engine.initialize import initialize, shard_loader
from burst_mcore.deepspeed.engine.prepare import sequence_of
from burst_mcore.deepspeed.ranks.cpu import prepare_cpu

VOCABULARY = 2048


@dataclass(frozen=True, kw_only=True)
class Job:
    """A small Llama, and how it is trained: one sequence over all ranks, float32."""

    ranks: int = 4
    seq: int = 4096
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 32
    layers: int = 2
    stage: int = 3

    def __str__(self) -> str:
        return (
            f"{self.ranks} ranks, {self.seq} tokens, {self.layers} layers, {self.heads} heads, "
            f"{self.kv_heads} K/V heads of {self.head_dim}, ZeRO-{self.stage}"
        )


@dataclass(frozen=True)
class Row:
    """Of a method; medians over repeats, of the slowest rank. `cannot` says why it did not run."""

    method: str
    seconds: float | None = None
    written_bytes: int | None = None
    """By a rank, to sockets and files, in a step: what is sent over gloo, ZeRO's part included."""
    peak_bytes: int | None = None
    """Of a step, beyond what is held between steps."""
    over_ulysses: float | None = None
    """Seconds over those of the faster of the two Ulysses, round by round; the median."""
    loss: float | None = None
    cannot: str = ""


METHODS: dict[str, dict[str, Any]] = {
    "ulysses (UlyssesSPAttentionHF)": {"attention": "hf"},
    "ulysses (DistributedAttention)": {"attention": "distributed"},
    "burst ring": {"head_parallel": 1},
    "burst hybrid": {"head_parallel": 2},
    "burst auto": {"head_parallel": "auto"},
    "burst auto, fused loss": {"head_parallel": "auto", "fused_loss": True},
}
CANNOT = (
    Job(ranks=2, heads=3, kv_heads=3, seq=1024),
    Job(ranks=4, heads=4, kv_heads=1, seq=1024),
    Job(ranks=8, heads=6, kv_heads=3, seq=1024),
)
"""Where heads do not divide."""


def measure(job: Job, names: Sequence[str], repeats: int) -> list[Row]:
    """Rows of the methods, in turn in the same processes.

    Raises:
        RuntimeError: a method's first loss is not that of the model in one process, or a rank failed.
    """
    rows: list[Row] = in_processes(job.ranks, _measure, job, tuple(names), repeats)[0]
    return rows


def verdicts(job: Job, rows: Sequence[Row]) -> list[Verdict]:
    """Auto beside the faster of the two Ulysses; none where neither ran."""
    by_name = {row.method: row for row in rows}
    ours = by_name.get("burst auto")
    if ours is None or ours.over_ulysses is None:
        return []
    return [Verdict(f"{job}: auto's step over Ulysses'", ours.over_ulysses, 1.05, at_most=True)]


def table(job: Job, rows: Sequence[Row]) -> str:
    """For people."""
    lines = [
        [row.method, "cannot"]
        if row.seconds is None
        else [
            row.method,
            f"{row.seconds:.3f}",
            "" if row.over_ulysses is None else f"{row.over_ulysses:.2f}",
            _mega(row.written_bytes),
            _mega(row.peak_bytes),
            f"{row.loss:.5f}",
        ]
        for row in rows
    ]
    found = tabulate(
        lines, headers=["method", "s a step", "/ Ulysses", "MB written by a rank", "peak MB", "first loss"]
    )
    reasons = [f"{row.method} cannot: {row.cannot}" for row in rows if row.seconds is None]
    return "\n".join([str(job), found, *reasons])


def figures(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """For programs."""
    return [asdict(row) for row in rows]


def _mega(x: int | None) -> str:
    return "?" if x is None else f"{x / 1e6:.1f}"


def _measure(rank: int, size: int, job: Job, names: tuple[str, ...], repeats: int) -> list[Row]:
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")  # of its calls
    prepare_cpu()
    deepspeed.init_distributed("gloo", verbose=False)
    sample = {
        "input_ids": torch.randint(3, VOCABULARY, (1, job.seq), generator=torch.Generator().manual_seed(1))
    }
    want = _alone(job, sample)
    steps: dict[str, Callable[[], float]] = {}
    rows: dict[str, Row] = {}
    for name in names:
        try:
            steps[name] = _stepper(job, METHODS[name], sample)
            first = steps[name]()
        except (AssertionError, RuntimeError, ValueError) as error:
            steps.pop(name, None)
            rows[name] = Row(name, cannot=str(error).strip().splitlines()[0][:160] or type(error).__name__)
            continue
        if not abs(first / want - 1) <= 1e-4 and "attention" in METHODS[name]:
            del steps[name]
            rows[name] = Row(name, cannot=f"its loss is {first:.5f}, that of one process {want:.5f}")
            continue
        if not abs(first / want - 1) <= 1e-4:
            raise RuntimeError(f"{name} is wrong: its loss is {first}, that of one process {want}")
        rows[name] = Row(name, loss=first)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    written: dict[str, list[int]] = {name: [] for name in steps}
    for _ in range(repeats):
        for name, step in steps.items():
            dist.barrier()
            before, start = _written(), time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - start)
            written[name].append(_written() - before)
    seconds = {name: _slowest(values) for name, values in seconds.items()}
    theirs = [values for name, values in seconds.items() if name.startswith("ulysses")]
    rival = min(theirs, key=statistics.median, default=None)
    for name, step in steps.items():
        dist.barrier()
        most, highest = _slowest([statistics.median(written[name]), peak_bytes(step, "cpu") or 0])
        over = None
        if rival is not None:
            over = statistics.median(a / b for a, b in zip(seconds[name], rival, strict=True))
        rows[name] = Row(
            name, statistics.median(seconds[name]), round(most), round(highest) or None, over, rows[name].loss
        )
    return [rows[name] for name in names]


def _slowest(values: Sequence[float]) -> list[float]:
    """Of all ranks, one by one."""
    found = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return [float(x) for x in found]


def _model(job: Job) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    width = job.heads * job.head_dim
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=job.layers,
        num_attention_heads=job.heads, num_key_value_heads=job.kv_heads, head_dim=job.head_dim,
        max_position_embeddings=job.seq, attn_implementation="sdpa",
    )  # fmt: skip
    return LlamaForCausalLM(config)


def _alone(job: Job, sample: dict[str, Any]) -> float:
    with torch.no_grad():
        return float(_model(job)(**sample, labels=sample["input_ids"]).loss)


def _stepper(job: Job, method: dict[str, Any], sample: dict[str, Any]) -> Callable[[], float]:
    """A step of an engine; the parameters stay, its learning rate is 0. Collective."""
    theirs = method.get("attention")
    section = {
        "layout": "contiguous" if theirs else "zigzag",
        "head_parallel": method.get("head_parallel", 1),
        "fused_loss": method.get("fused_loss", False),
    }
    small = {
        "reduce_bucket_size": 10**6,
        "allgather_bucket_size": 10**6,
        "stage3_prefetch_bucket_size": 10**6,
    }
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "sequence_parallel_size": job.ranks,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.0, "weight_decay": 0.0}},
        "zero_optimization": {"stage": job.stage, **small},
        "steps_per_print": 10**9,
        "burst_attention": section,
    }
    os.environ.setdefault("LOCAL_RANK", "0")
    model = _model(job)
    attention = _theirs(theirs, job) if theirs else None  # refuses before an engine is built
    engine, *_ = initialize(model, config)
    if attention is not None:
        from transformers import AttentionInterface

        AttentionInterface.register(f"burst_mcore_bench_{theirs}", attention)
        model.set_attn_implementation(f"burst_mcore_bench_{theirs}")
        sequence_of(engine.module).trust_attention()
    (batch,) = shard_loader(iter([sample]), engine)

    def step() -> float:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return step


def _theirs(kind: str, job: Job) -> Callable[..., Any]:
    """DeepSpeed's own attention as transformers' interface takes it, over torch's sdpa."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    group = dist.group.WORLD
    if kind == "hf":
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

        return UlyssesSPAttentionHF(  # type: ignore[no-any-return]
            sdpa_attention_forward, 1, job.heads, job.head_dim, job.kv_heads, job.layers, group,
            seq_length_is_variable=True,
        ).forward  # fmt: skip
    from deepspeed.sequence.layer import DistributedAttention

    def local(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out.transpose(1, 2).contiguous()

    whole = DistributedAttention(local, group, 2, 1)

    def attend(module: Any, q: Any, k: Any, v: Any, attention_mask: Any, **_: Any) -> tuple[Any, None]:
        return whole(*(x.transpose(1, 2).contiguous() for x in (q, k, v)), 0), None

    return attend


def _written() -> int:
    """Bytes that this process has written, to sockets too."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("wchar"))
