"""The memory of a rank in a training step, as a stack of bytes by kind. Arithmetic of shapes, in 16 bits."""

from __future__ import annotations

from collections.abc import Callable

import torch

from burst_mcore.attention.shard import Shard
from burst_mcore.step.model import Model
from burst_mcore.step.way import Way

ADAM = 12
"""Bytes of a parameter: a float32 copy and Adam's two moments (arXiv 1910.02054, section 3)."""
WHOLE_LOGITS = {"megatron": 6, "bmtrain": 6, "deepspeed": 12}
"""Bytes of a logit that is not fused. Megatron: 16 bits, and a float32 softmax that becomes the gradient.

BMTrain is taken to do the same. Models of transformers: a float32 copy, its log-softmax, and its gradient."""
FUSED_LOGITS = 5e9
"""Bytes of the logits that a fused loss has at a time, at most: a sixteenth of a GPU of 80 GB."""
RESERVED = 2e9
"""Bytes of a GPU that CUDA, NCCL and the allocator's gaps take beside tensors: an assumption."""


def shard_of(model: Model, way: Way, seq: int) -> Shard:
    """Return the shapes of attention on one rank."""
    return Shard(
        batch=1,
        tokens=-(-seq // way.cp),
        heads=model.heads // way.tp,
        kv_heads=max(1, model.kv_heads // way.tp),
        head_dim=model.head_dim,
        value_dim=model.value_dim,
        dtype=torch.bfloat16,
    )


def stack(model: Model, way: Way, seq: int, direction: str = "query", nodes: int = 1) -> dict[str, float]:
    """Return bytes of a rank by kind at the worst moment: backward of a layer, or the loss.

    Args:
        direction: the side that travels in attention's backward.
        nodes: nodes of the ring; two rings are under way at once if there are several.
    """
    shard = shard_of(model, way, seq)
    kept = states(model, way) | activations(model, way, shard)
    of_layer = _saved(model, way, shard, whole=True) if way.recompute != "none" else 0.0
    layer = {
        "layer in backward": of_layer + _mlp_gradients(model, way, shard),
        "ring buffers": ring_bytes(shard, way, direction, nodes),
        "gathered weights": _gathered(model, way),
    }
    whole = shard.tokens * model.vocab / way.tp * WHOLE_LOGITS[way.framework]
    loss = {
        "logits": min(whole, FUSED_LOGITS) if way.fused_loss else whole,
        "gathered weights": 4.0 * model.head / way.tp if way.zero >= 3 else 0.0,
    }
    worst = max(layer, loss, key=lambda phase: sum(phase.values()))
    return {name: size for name, size in (kept | worst).items() if size}


def total(memory: dict[str, float]) -> float:
    """Return all bytes of a stack."""
    return sum(memory.values())


def parameters(model: Model, way: Way) -> float:
    """Return the parameters of a rank of the fullest pipeline stage, before ZeRO shards them."""
    ends = model.head * (1 if model.tied or way.pp > 1 else 2)
    return ((model.parameters - model.head * (1 if model.tied else 2)) / way.pp + ends) / way.tp


def states(model: Model, way: Way) -> dict[str, float]:
    """Return bytes of weights, gradients and optimizer. Megatron sums gradients in float32."""
    own, shards = parameters(model, way), way.sharded
    gradient = 4 if way.framework == "megatron" else 2
    return {
        "weights": own * 2 / (shards if way.zero >= 3 else 1),
        "gradients": own * gradient / (shards if way.zero >= 2 else 1),
        "optimizer": 0.0 if way.offload_optimizer else own * ADAM / (shards if way.zero >= 1 else 1),
    }


def activations(model: Model, way: Way, shard: Shard) -> dict[str, float]:
    """Return bytes that wait for backward in all layers of a stage, over its micro-batches in flight."""
    flight = min(way.micro, way.pp) * (1 + (way.pp - 1) / (way.pp * way.chunks) * (way.chunks > 1))
    layers = flight * model.layers / way.pp
    if way.recompute == "none":
        return {"layers' activations": layers * _saved(model, way, shard, whole=True)}
    inputs = 2.0 * shard.tokens / way.tp * model.hidden
    result = shard.result_bytes * way.kept
    on_device = min(layers, 2) if way.offload_activations else layers  # one in use, one on its way
    return {"inputs of layers": layers * inputs, "kept attention": on_device * result}


def _saved(model: Model, way: Way, shard: Shard, *, whole: bool) -> float:
    """Return bytes that backward of one layer reads: two inputs, two norms, q, k, v, O, LSE, the MLP's."""
    rows, width = shard.tokens, model.hidden / way.tp
    attention = shard.heads * (shard.head_dim + shard.value_dim) + shard.kv_heads * (
        shard.head_dim + shard.value_dim
    )
    mlp = (3 if model.gated else 2) * model.width / way.tp if whole else 0.0
    plain = 2.0 * rows * (4 * width + attention + mlp) + rows * shard.heads * shard.statistic
    if way.framework != "deepspeed":
        return plain
    # Models of transformers: norms keep float32 inputs, and queries and keys are kept before they rotate.
    return plain + rows * (2 * 4 * width + 2 * (shard.heads + shard.kv_heads) * shard.head_dim)


def _mlp_gradients(model: Model, way: Way, shard: Shard) -> float:
    """Return bytes of the gradients that an MLP's backward has at once."""
    return 2.0 * shard.tokens / way.tp * (2 * model.width + model.hidden)


def ring_bytes(shard: Shard, way: Way, direction: str, nodes: int) -> float:
    """Return bytes of travelling bundles and of sums that stay, in attention's backward."""
    if way.cp == 1:
        return 0.0
    data, gradient = shard.bundle_bytes(of_queries=direction == "query")
    stays = shard.bundle_bytes(of_queries=direction != "query")[1]
    bundles = 4 if nodes > 1 else 2
    return float(bundles * data + 2 * gradient + stays)


def _gathered(model: Model, way: Way) -> float:
    """Return bytes that ZeRO-3 has whole at once: weights of this layer and the next, one gradient."""
    if way.zero < 3:
        return 0.0
    layer = (model.parameters - model.head * (1 if model.tied else 2)) / model.layers / way.tp
    return 3 * 2 * layer + 4 * model.head / way.tp


def longest(fits: Callable[[int], bool], unit: int, most: int = 2**31) -> int:
    """Return the longest sequence that fits, in multiples of `unit`; 0 if none does."""
    if not fits(unit):
        return 0
    low, high = 1, 2
    while high * unit <= most and fits(high * unit):
        low, high = high, 2 * high
    while high - low > max(1, low // 128):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * unit) else (low, middle)
    return low * unit
