"""The time of a training step: seconds of compute by part, and of exposed communication by cause."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from burst_mcore.attention.geometry.shard import Ranks
from burst_mcore.rates import Rates
from burst_plan.machines import CONSTANTS
from burst_plan.step.attention import AttentionTime
from burst_plan.step.memory import parameters, shard_of
from burst_plan.step.model import Mixer, Model
from burst_plan.step.parts import MODULES
from burst_plan.step.plan import Plan
from burst_plan.step.recurrence import exchanges, work

FORWARD, BACKWARD = 1.0, 2.0
"""Products of a pass, as multiples of a forward: backward has those of two gradients."""
EMBEDDING = 4
"""Passes of memory over the hidden states, of the embedding in both directions: an assumption."""
HIDDEN, HEADS, WIDTH = 10, 2, 3
"""Passes of memory over a layer's hidden states, its queries and keys, and its MLP's width, in a forward.

Norms, residuals, rotations and activations make them, fused as Megatron's are: an assumption."""
COPIES = 4
"""Passes of memory over the copies of tokens for experts, which are written and read back: an assumption."""
KEPT = 2
"""Passes of memory over the saved tensors of a recurrence, which are written and read: an assumption."""
COLLECTIVES = 2
"""A gather and a scatter of sequence parallelism around attention, and around an MLP, in a layer's pass.

It is arXiv 2205.05198, section 4.2. Around experts ranks gather and scatter copies of tokens."""
EXCHANGES = 2
"""Exchanges of expert parallelism, in a layer's pass: tokens go to experts, and back."""
PREFETCH = 5e7
"""Parameters that DeepSpeed prefetches during a module: `stage3_prefetch_bucket_size` of its config."""
PAGEABLE = 1 / 5
"""Share of the rate of pinned memory that copies to and from pageable memory reach.

Pinned memory is 6 times as fast with a GPU alone, 4 to 5 times with eight (deepspeedai/DeepSpeed#5301)."""
ADAM_ON_GPU, ADAM_ON_HOST = 30, 28
"""Bytes of a parameter that Adam moves: gradient, copy and two moments; on a GPU the weight too."""


@dataclass(frozen=True)
class Times:
    """Seconds of a step."""

    compute: Mapping[str, float]
    """By part."""
    exposed: Mapping[str, float]
    """Exposed communication and waiting, by cause."""

    @property
    def total(self) -> float:
        return sum(self.compute.values()) + sum(self.exposed.values())


def times(
    model: Model,
    plan: Plan,
    seq: int,
    cluster: Ranks,
    rates: Rates,
    peak: float,
    attention: AttentionTime,
    again: float = 0.0,
) -> Times:
    """Return the seconds of a step. All micro-batches of the fullest stage are counted, in turn.

    Args:
        peak: FLOPs a second of products in 16 bits.
        again: share of attention's forward that backward computes again.
    """
    rows = plan.micro * seq / plan.cp / plan.tp
    layers, mixer = model.layers / plan.pp, model.mixer
    rate = peak * CONSTANTS.products
    passes = _passes(plan)
    product = 2 * rows / rate
    calls, attends = plan.micro * layers, plan.micro * model.attending / plan.pp
    kernel_forward = attention.forward * attention.share
    kernel_backward = attention.backward * attention.share
    mlp = model.mlp_active * passes + model.mlp_first * FORWARD * plan.tiled
    place = seq, attention.layout, cluster, rates, rate
    kernels, exchanged = _mixed(mixer, plan, *place) if mixer.layers else (0.0, {})
    compute = {
        "embedding": EMBEDDING * 2 * rows * model.hidden / rates.memory,
        "norms and activations": _elementwise(model, layers) * rows * passes / rates.memory,
        "projections": model.mixing / plan.pp * product * passes,
        "experts" if model.experts else "mlp": mlp / plan.pp * product,
        "attention forward": attends * kernel_forward,
        "attention again": attends * kernel_forward * again,
        "attention backward": attends * kernel_backward,
        mixer.kind or "recurrence": kernels,
        "loss": model.head * product * (FORWARD + BACKWARD),
        "optimizer": _optimizer(model, plan, rates),
    }
    busy = sum(compute.values()) - compute["optimizer"]
    around = attends * (1 - attention.share) * (attention.forward * (1 + again) + attention.backward)
    gathers = 0.0  # of ZeRO-3, in each pass and micro-batch
    if plan.zero >= 3 and plan.sharded > 1:
        gathers = 2 * plan.micro * _sharded(2, model, plan, cluster, rates)
    beside = _beside(model, plan, gathers, busy)
    cause = "ring" if attention.head_parallel < plan.cp else "exchange of heads"
    exposed = {
        cause if plan.cp > 1 else "kernel launches": around,  # a ring of one position is none
        **{name: (2 + plan.recomputes) * seconds for name, seconds in exchanged.items()},
        "tensor parallel": _tensor(model, plan, calls, seq, cluster, rates, product / plan.micro),
        "tokens to experts": _experts(model, plan, calls, seq, cluster, rates),
        "weights gathered": gathers - beside + gathers / (2 * plan.micro * model.layers),
        "gradients reduced": _reduced(model, plan, cluster, rates, busy, beside),
        "activations offloaded": _offloaded(model, plan, seq, calls, busy),
    }
    bubble = (plan.pp - 1) / (plan.chunks * plan.micro)
    exposed["pipeline"] = bubble * (busy + sum(exposed.values()))
    return Times(compute, {cause: s for cause, s in exposed.items() if s > 0})


def _passes(plan: Plan) -> float:
    """Return the products of a micro-batch, as multiples of a forward's."""
    return FORWARD + BACKWARD + plan.recomputes * FORWARD


def _mixed(
    mixer: Mixer, plan: Plan, seq: int, layout: str, cluster: Ranks, rates: Rates, rate: float
) -> tuple[float, dict[str, float]]:
    """Return the seconds of recurrences or convolutions, from products or memory, and of their exchanges."""
    load, passes = work(mixer, layout, seq, plan.cp), plan.micro * mixer.layers
    forth, home = (2.0 * (KEPT * load.kept + moved) / rates.memory for moved in load.moved)
    token = (FORWARD + plan.recomputes * FORWARD) * max(2 * load.products / rate, forth)
    token += BACKWARD * max(2 * load.back / rate, home)
    costs = exchanges(mixer, layout, seq, plan.ring(cluster), rates) if plan.cp > 1 else {}
    return passes * seq / plan.cp * token, {name: passes * seconds for name, (_, seconds) in costs.items()}


def _elementwise(model: Model, layers: float) -> float:
    """Return the bytes that norms, rotations, residuals and activations of a forward move per token."""
    heads = (model.heads + model.kv_heads) * model.head_dim * model.attending / model.layers
    copies = model.sparse_layers / model.layers * model.active * model.hidden
    width = model.width * (1 - model.without_mlp / model.layers)
    hidden = (HIDDEN + 4 * model.sandwich) * model.hidden * model.blocks / (2 * model.layers)
    return layers * 2.0 * (hidden + HEADS * heads + WIDTH * width + COPIES * copies)


def _optimizer(model: Model, plan: Plan, rates: Rates) -> float:
    """Return the seconds of Adam, limited by memory, on the GPU or on the host."""
    numbers = sum(n / (ranks if plan.zero else 1) for n, ranks in parameters(model, plan))
    if plan.offload_optimizer:
        return numbers * (4 / CONSTANTS.host_link + ADAM_ON_HOST / CONSTANTS.host_memory)
    return numbers * ADAM_ON_GPU / rates.memory


def _tensor(
    model: Model, plan: Plan, calls: float, seq: int, cluster: Ranks, rates: Rates, product: float
) -> float:
    """Return the seconds of tensor and sequence parallelism; product: seconds of a parameter in a forward.

    Backward gathers the inputs of attention and of an MLP once more, while it makes the gradients of these
    inputs (arXiv 2205.05198, section 4.2.2).
    """
    if plan.tp == 1:
        return 0.0
    within = min(plan.tp, cluster.intra)
    tokens, sparse = 2 * seq / plan.cp * model.hidden, model.sparse_layers / model.layers
    around_all = 2 - sparse * (model.shared_ffn == 0)  # attention, and an MLP of all tokens
    seconds = around_all * (_collective(tokens, plan.tp, within, rates) + CONSTANTS.loops)
    if sparse:
        seconds += sparse * (_collective(model.active * tokens, plan.tp, within, rates) + CONSTANTS.loops)
    out = model.heads * model.value_dim * model.hidden
    beside = product * (model.projections - out + model.mlp_first / model.layers)
    return calls * (COLLECTIVES * (_passes(plan) - 1) * seconds + max(0.0, seconds - beside))


def _experts(model: Model, plan: Plan, calls: float, seq: int, cluster: Ranks, rates: Rates) -> float:
    """Return the seconds of expert parallelism: tokens go to experts and back."""
    if plan.ep == 1:
        return 0.0
    size = 2 * seq / plan.cp / plan.tp * model.active * model.hidden
    each = _exchange(size, plan.neighbours(plan.ep, cluster), rates) + CONSTANTS.loops
    return calls * model.sparse_layers / model.layers * EXCHANGES * (_passes(plan) - 1) * each


def _exchange(size: float, ranks: Ranks, rates: Rates) -> float:
    """Return the seconds of an all-to-all of `size` bytes per rank for all ranks, itself included."""
    near = size * (ranks.intra - 1) / ranks.size / rates.link(inter=False)
    far = size * (ranks.size - ranks.intra) / ranks.size / rates.link(inter=True)
    return max(near, far)


def _collective(size: float, ranks: int, within: int, rates: Rates) -> float:
    """Return the seconds of an all-gather or a reduce-scatter of `size` bytes; within: ranks of a node.

    NCCL runs rings: each ring step passes all shares but one, also between nodes, where network cards run
    parallel rings (nccl-tests, doc/PERFORMANCE.md).
    """
    far = within * rates.link(inter=True) if ranks > within else math.inf
    return size * (ranks - 1) / ranks / min(rates.link(inter=False), far)


def _sharded(bytes_each: float, model: Model, plan: Plan, cluster: Ranks, rates: Rates) -> float:
    """Return the seconds of a collective of all parameters over the ranks of ZeRO.

    Experts go over fewer ranks: every `ep`-th, which have the same experts.
    """
    (others, ranks), (experts, alike) = parameters(model, plan)
    node = max(1, cluster.intra // plan.tp)
    seconds = _collective(bytes_each * others, ranks, min(ranks, node), rates)
    return seconds + _collective(bytes_each * experts, alike, min(alike, max(1, node // plan.ep)), rates)


def _beside(model: Model, plan: Plan, gathers: float, busy: float) -> float:
    """Return the hidden seconds of gathers: of gathers that begin before their layer.

    A layer is gathered ahead as a whole. DeepSpeed gathers `PREFETCH` parameters during each module.
    """
    dense = model.parameters - model.expert_parameters - model.head * (1 if model.tied else 2)
    layer = dense / model.layers / plan.tp
    prefetch = PREFETCH * MODULES[plan.modules].matrices if plan.framework.endswith("deepspeed") else layer
    return min(gathers * min(1.0, prefetch / layer), busy)


def _reduced(model: Model, plan: Plan, cluster: Ranks, rates: Rates, busy: float, beside: float) -> float:
    """Return the exposed seconds of the reduction of gradients, during backward of the last micro-batch.

    Half of the gathers that compute hides, `beside`, are in backward, on the same links.
    """
    if plan.sharded == 1:
        return 0.0
    # Float32 in Megatron; in DeepSpeed by `seq_parallel_communication_data_type` in its runtime/constants.py
    wide = plan.framework == "megatron" or (plan.cp > 1 and plan.framework.endswith("deepspeed"))
    size = ((4 if wide else 2) + 2 * (0 < plan.zero < 3)) * (1 if plan.zero else 2)
    rounds = plan.micro if plan.zero >= 2 else 1
    seconds = rounds * _sharded(size, model, plan, cluster, rates)
    backward = busy * BACKWARD / (FORWARD + BACKWARD)
    hidden = max(0.0, backward - beside / 2) if plan.zero >= 2 else backward / plan.micro
    return max(0.0, seconds - hidden) + seconds / max(1, rounds * model.layers)


def _offloaded(model: Model, plan: Plan, seq: int, calls: float, busy: float) -> float:
    """Return the exposed seconds of offload to the host in forward, and back in backward.

    Copies of kept attention run in parallel with compute. DeepSpeed copies inputs to pageable memory, and
    waits for them (deepspeedai/DeepSpeed#501).
    """
    if not plan.recomputes:
        return 0.0
    attends = model.attending / model.layers
    attention = attends * shard_of(model, plan, seq).result_bytes * plan.kept * plan.offload_activations
    inputs = 2.0 * seq / plan.cp / plan.tp * model.hidden * plan.offload_inputs
    each = 2 * calls / CONSTANTS.host_link
    return max(0.0, each * attention - busy) + each * inputs / PAGEABLE
