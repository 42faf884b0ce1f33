"""The memory of a rank in a training step, as a stack of bytes by kind. Arithmetic of shapes, in 16 bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from burst_mcore.attention.geometry.shard import Shard
from burst_mcore.attention.numerics.merge import GradientSum
from burst_mcore.loss.chunked import CHUNK_BYTES
from burst_mcore.loss.products import VOCABULARY_BLOCK, Products
from burst_plan.step.model import Model
from burst_plan.step.parts import MODULES, LossChunks, ends, kept, layers, on_gpu
from burst_plan.step.plan import Plan

ADAM = 12
"""Bytes of a parameter: a float32 copy and Adam's two moments (arXiv 1910.02054, section 3)."""
FUSED_LOGITS = 5e9
"""Most bytes of logits that a fused loss holds at a time: a sixteenth of a GPU of 80 GB."""
ON_GPU = LossChunks(max_bytes=FUSED_LOGITS, products=Products(torch.float32, torch.bfloat16))
ON_CPU = LossChunks(
    max_bytes=CHUNK_BYTES, products=Products(torch.bfloat16, torch.bfloat16), rows=2 * VOCABULARY_BLOCK
)
RESERVED = 2e9
"""Bytes of a GPU that CUDA, NCCL and the allocator's gaps take in addition to tensors: an assumption."""


def shard_of(model: Model, plan: Plan, seq: int) -> Shard:
    """Return the shapes of attention on one rank."""
    return Shard(
        batch=1,
        tokens=-(-seq // plan.cp),
        heads=model.heads // plan.tp,
        kv_heads=max(1, model.kv_heads // plan.tp),
        head_dim=model.head_dim,
        value_dim=model.value_dim,
        dtype=torch.bfloat16,
    )


def stack(
    model: Model, plan: Plan, seq: int, direction: str = "query", nodes: int = 1, heads: int = 1,
    layout: str = "zigzag",
) -> dict[str, float]:  # fmt: skip
    """Return bytes of a rank by kind at the worst moment.

    Args:
        direction: the side that rotates in attention's backward.
        nodes: nodes of the ring; with several, two rings are active at once.
        heads: ranks that share heads.
    """
    every = moments(model, plan, seq, direction, nodes, heads, layout)
    return _merged(max((stacks for _, stacks in every), key=lambda stacks: sum(map(total, stacks))))


def moments(
    model: Model, plan: Plan, seq: int, direction: str, nodes: int = 1, heads: int = 1,
    layout: str = "zigzag", chunks: LossChunks = ON_GPU,
) -> Iterator[tuple[str, Sequence[dict[str, float]]]]:  # fmt: skip
    """Yield each moment, forward first, then the worst of each backward, and its bytes: stacks that add up.

    Backward goes from the last part to the first. A part's saved tensors are freed before the next part. The
    ring's buffers stay: in a pool on a CPU, and on a GPU in the caching allocator, which seldom gives large
    blocks to tensors of other sizes. The latter is an assumption, chosen to match the paper's figures.
    """
    shard = shard_of(model, plan, seq)
    kinds, last = layers(model, plan, shard, layout), ends(model, plan, shard, chunks)
    buffers = {"ring buffers": ring_bytes(shard, plan, direction, nodes) * (model.attending > 0)}
    if alone := heads == plan.cp > 1:  # gradients of Q, K and V before and after an exchange of heads
        buffers = {"exchanged heads": 2.0 * (shard.q_bytes + shard.kv_bytes) * on_gpu(shard, plan)}
    base = {**states(model, plan), **_inputs(model, plan, shard), **buffers}
    waiting = 0.0 if plan.recomputes else in_flight(model, plan)
    others = [_times(waiting * share, kept(parts)) for share, parts in kinds]
    yield "forward", (base, *others, kept(last))
    for place, part in enumerate(last):
        whole = 4.0 * model.head / plan.tp * (plan.zero >= 3)  # the head and its gradient, for the loss
        work = {f"backward of {part.name}": part.backward, "gathered weights": whole}
        yield f"backward of {part.name}", (base, *others, kept(last[: place + 1]), work)
    others = [_times(max(0.0, waiting - 1) * share, kept(parts)) for share, parts in kinds]
    work = _work(model, plan, shard)
    for kind, (_, parts) in enumerate(kinds):
        for place, part in enumerate(parts):
            now = {f"backward of {part.name}": part.backward, **work}
            if part.name == "attention" and plan.cp > 1 and not alone:
                results = backward_bytes(shard, plan.cp, nodes, of_queries=direction == "query")
                now["results of a tile"] = on_gpu(shard, plan) * max(0.0, results - buffers["ring buffers"])
            yield f"{kind}.{place}: backward of {part.name}", (base, *others, kept(parts[: place + 1]), now)


def backward_bytes(shard: Shard, ranks: int, nodes: int, *, of_queries: bool) -> float:
    """Return the peak bytes that a causal backward adds, on a ring of `ranks` over `nodes`.

    The sum of rotating blocks and gradients, staying gradients, local gradients, and a tile's results.
    """
    data, gradient = shard.block_bytes(of_queries=of_queries)
    _, stays = shard.block_bytes(of_queries=not of_queries)
    sides = (shard.q_bytes, shard.kv_bytes) if of_queries else (shard.kv_bytes, shard.q_bytes)
    blocks, sums = min(2, max(1, ranks - 2)), min(2, ranks - 1) - (2 < ranks < 5 and not of_queries) / 2
    if 1 < nodes < ranks:
        blocks, sums = 2 + (nodes > 3), 3 + (ranks > 2 * nodes)
    if nodes == 2 < ranks:  # the mask removes half of the gradients that return to their own node
        sums = 3.5 if ranks > 6 else 2
    halves = of_queries and shard.kv_bytes / 2 > GradientSum.waiting_bytes and shard.kv_heads % 2 == 0
    tile = (sides[1] / 2 + of_queries * shard.out_bytes) / (2 if halves else 1) + 2 * shard.statistic_bytes
    return float(blocks * data + sums * gradient + stays + 2 * sides[0] + tile)


def _times(number: float, stack: dict[str, float]) -> dict[str, float]:
    return {name: number * size for name, size in stack.items()}


def _merged(stacks: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the sum of several stacks, without empty kinds."""
    names = dict.fromkeys(name for stack in stacks for name in stack)
    sizes = {name: sum(stack.get(name, 0.0) for stack in stacks) for name in names}
    return {name: size for name, size in sizes.items() if size}


def _work(model: Model, plan: Plan, shard: Shard) -> dict[str, float]:
    """Return the bytes that backward of each part of a layer needs in addition to saved tensors."""
    hidden = shard.tokens * model.hidden
    modules = MODULES[plan.modules]
    return {
        "gradient of the layer": 2.0 * hidden / plan.tp,
        "output of the layer": modules.output * hidden / plan.tp * plan.recomputes,
        "gathered sequence": modules.gathered * hidden * (plan.tp > 1),
        "gathered weights": _gathered(model, plan),
        "gradient of the tied head": _tied(model, plan),
    }


def total(memory: dict[str, float]) -> float:
    """Return all bytes of a stack."""
    return sum(memory.values())


def parameters(model: Model, plan: Plan) -> tuple[tuple[float, int], tuple[float, int]]:
    """Return the parameters of a rank in the fullest pipeline stage, before ZeRO shards them.

    Each number comes with the ranks over which ZeRO shards it: routed experts are the second.
    """
    heads = model.head * (1 if model.tied or plan.pp > 1 else 2)
    layers = model.parameters - model.head * (1 if model.tied else 2) - model.expert_parameters
    experts = model.expert_parameters / plan.pp / plan.tp / plan.ep
    return ((layers / plan.pp + heads) / plan.tp, plan.sharded), (experts, plan.sharded // plan.ep)


def states(model: Model, plan: Plan) -> dict[str, float]:
    """Return the bytes of weights, gradients and optimizer. Megatron sums gradients in float32.

    DeepSpeed's gradients go to the host where its optimizer is (arXiv 2101.06840, section 4.1).
    """
    numbers = parameters(model, plan)
    whole, sharded = sum(n for n, _ in numbers), sum(n / ranks for n, ranks in numbers)
    gradient = 4 if plan.framework == "megatron" else 2
    if plan.offload_optimizer and plan.zero >= 2 and plan.framework.endswith("deepspeed"):
        gradient = 0
    return {
        "weights": 2 * (sharded if plan.zero >= 3 else whole),
        "gradients": gradient * (sharded if plan.zero >= 2 else whole),
        "optimizer": 0.0 if plan.offload_optimizer else ADAM * (sharded if plan.zero >= 1 else whole),
    }


def in_flight(model: Model, plan: Plan) -> float:
    """Return the number of layers of a stage whose backward is pending, over its micro-batches in flight."""
    flight = min(plan.micro, plan.pp) * (1 + (plan.pp - 1) / (plan.pp * plan.chunks) * (plan.chunks > 1))
    return flight * model.layers / plan.pp


def _inputs(model: Model, plan: Plan, shard: Shard) -> dict[str, float]:
    """Return the bytes that recomputed layers save: their inputs, and kept attention."""
    if not plan.recomputes:
        return {}
    layers = in_flight(model, plan)
    on_device = min(layers, 2)  # of layers offloaded to the host: one in use, one in transfer
    inputs = on_device if plan.offload_inputs else layers
    output = on_device if plan.offload_activations else layers
    return {
        "inputs of layers": inputs * 2.0 * shard.tokens / plan.tp * model.hidden,
        "kept attention": output * shard.result_bytes * plan.kept * model.attending / model.layers,
    }


def ring_bytes(shard: Shard, plan: Plan, direction: str, nodes: int) -> float:
    """Return the bytes of rotating blocks and of local sums, in attention's backward.

    A ring of two ranks has one step, so one block; a longer ring receives a block while it reads another.
    """
    if plan.cp == 1:
        return 0.0
    data, gradient = shard.block_bytes(of_queries=direction == "query")
    stays = shard.block_bytes(of_queries=direction != "query")[1]
    steps = min(2, plan.cp - 1)
    return float(steps * ((2 if nodes > 1 else 1) * data + gradient) + stays)


def _gathered(model: Model, plan: Plan) -> float:
    """Return the bytes that ZeRO-3 gathers at once: weights of this layer and the next, and one gradient.

    The head and its gradient are counted as well: backward of the last layer begins before they are freed.
    """
    if plan.zero < 3:
        return 0.0
    layer = (model.parameters - model.head * (1 if model.tied else 2)) / model.layers / plan.tp
    return 3 * 2 * layer + 4 * model.head / plan.tp


def _tied(model: Model, plan: Plan) -> float:
    """Return the bytes of the head's gradient, which is held until the embedding's if weights are tied.

    Fused kernels add it to Megatron's own buffer at once.
    """
    waits = plan.framework.endswith("deepspeed") or (plan.local and not plan.fused_loss)
    return 2.0 * model.head / plan.tp if model.tied and plan.pp == 1 and waits else 0.0


def longest(fits: Callable[[int], bool], unit: int, limit: int = 2**31) -> int:
    """Return the longest sequence that fits, in multiples of `unit`; 0 if none fits."""
    if not fits(unit):
        return 0
    low, high = 1, 2
    while high * unit <= limit and fits(high * unit):
        low, high = high, 2 * high
    while high - low > max(1, low // 128):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * unit) else (low, middle)
    return low * unit
