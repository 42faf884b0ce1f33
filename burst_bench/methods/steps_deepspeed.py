"""Training steps of a small Llama under DeepSpeed: its own Ulysses in both its forms, and ours."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from burst_bench.core import Method, World, add
from burst_bench.methods.attention import start_deepspeed
from burst_bench.methods.steps import OURS, StepSetting, Train, TrainedCase, attend_by, causal, llama, needs
from burst_bench.methods.steps import first_loss as first_loss


def start(case: TrainedCase, world: World) -> None:
    """Initialise DeepSpeed, quietly, with ranks on the case's nodes."""
    for name in ("DeepSpeed", "burst_mcore"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")  # of its calls
    start_deepspeed(world.device)


def _train(section: dict[str, Any], attention: Callable[..., Any] | None, case: TrainedCase) -> Train:
    """Return the step of an engine; attention: instead of ours, in transformers' interface. Collective."""
    from burst_mcore.deepspeed.initialize import initialize, shard_loader
    from burst_mcore.transformers.prepare import sequence_of

    buckets = ("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size")
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "sequence_parallel_size": case.ranks,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.0, "weight_decay": 0.0}},
        "zero_optimization": {"stage": case.stage, **dict.fromkeys(buckets, 10**6)},
        "bf16": {"enabled": case.dtype == "bfloat16"},
        "steps_per_print": 10**9,
        "burst_attention": section,
    }
    model = llama(case)
    engine, *_ = initialize(model, config)
    if attention is not None:
        attend_by(model, attention)
        sequence_of(engine.module).trusted = True
    (batch,) = shard_loader(iter([{"input_ids": case.sample}]), engine)

    def step() -> float:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return step


def _ours(setting: StepSetting, case: TrainedCase, world: World) -> Train:
    config = setting.config
    section: dict[str, Any] = {
        "layout": "zigzag", "head_parallel": config.head_parallel, "backward": config.backward,
        "ring": config.ring, "fused_loss": setting.fused,
    }  # fmt: skip
    if setting.recompute != "none":
        section["checkpointing"] = {"policy": setting.recompute}
    return _train(section, None, case)


def _theirs(build: Callable[..., Callable[..., Any]], case: TrainedCase, world: World) -> Train:
    section = {"layout": "contiguous", "head_parallel": 1, "fused_loss": False}
    return _train(section, build(case, world), case)


def _ulysses_hf(case: TrainedCase, world: World) -> Callable[..., Any]:
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return UlyssesSPAttentionHF(  # type: ignore[no-any-return]
        sdpa_attention_forward, 1, case.heads, case.head_dim, case.kv_heads, case.layers, world.group,
        seq_length_is_variable=True,
    ).forward  # fmt: skip


def _ulysses_layer(case: TrainedCase, world: World) -> Callable[..., Any]:
    from deepspeed.sequence.layer import DistributedAttention

    def local(*qkv: Tensor) -> Tensor:
        out, _ = causal(None, *(x.transpose(1, 2) for x in qkv))
        return out.contiguous()

    ulysses = DistributedAttention(local, world.group, 2, 1)

    def attend(module: Any, q: Any, k: Any, v: Any, attention_mask: Any, **_: Any) -> tuple[Any, None]:
        return ulysses(*(x.transpose(1, 2).contiguous() for x in (q, k, v)), 0), None

    return attend


NEEDS = partial(needs, ("transformers", "deepspeed"))
THEIRS = partial(NEEDS, None)
add(
    "deepspeed",
    Method("ulysses (UlyssesSPAttentionHF)", partial(_theirs, _ulysses_hf), THEIRS, ours=False),
    Method("ulysses (DistributedAttention)", partial(_theirs, _ulysses_layer), THEIRS, ours=False),
    *(Method(name, partial(_ours, setting), partial(NEEDS, setting)) for name, setting in OURS.items()),
)
