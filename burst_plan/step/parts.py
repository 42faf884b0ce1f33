"""The parts of a decoder in the order of forward: bytes that each saves for backward, and needs in backward.

Saved bytes were listed tensor by tensor, in a dispatch mode, for Megatron's local spec and for Llama
in transformers (docs/guides/plan-details.md). TransformerEngine's and BMTrain's follow from kernels' inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

from burst_mcore.attention.geometry.shard import Shard
from burst_mcore.loss.chunked import automatic_chunk
from burst_mcore.loss.products import Products
from burst_plan.step.model import Model
from burst_plan.step.plan import Plan
from burst_plan.step.recurrence import work


class Bytes(NamedTuple):
    """Bytes of one element: of a hidden state, of an MLP's width, or of the logits."""

    kept: int
    """From forward to backward."""
    backward: int
    """In addition to saved bytes, at the worst moment of its backward: gradients, less the freed tensors."""


@dataclass(frozen=True, kw_only=True)
class Modules:
    """The modules of a layer, and the bytes that their operators save."""

    norm: Bytes
    gated: Bytes
    """An MLP with a gate: it saves the two products and their gated product."""
    angles: int = 0
    """Bytes per head dim that rotations save in each layer: cosines and sines of queries and of keys."""
    views: bool = False
    """Whether V is a view of the product of Q, K and V, which then lives as long as V."""
    latent_views: bool = False
    """Whether V is a view of MLA's product of K and V, from the latent."""
    output: int = 0
    """Bytes per hidden element of a layer's output, which a recomputation makes again and holds."""
    gathered: int = 2
    """Bytes per hidden element of the sequence that sequence parallelism gathers: one at a time, if fused."""
    logits: Bytes
    """Logits of a loss that is not fused."""
    copies: Bytes
    """Copies of tokens for experts."""
    matrices: int = 4
    """Modules of a dense layer with a matrix: of Q, K and V, of O, and two of an MLP."""
    weighted: int = 0
    """Bytes per element of an expert's width that the product with a routing weight saves."""


MEGATRON = Modules(
    norm=Bytes(2 + 2, 2),  # input and result; the input's gradient
    gated=Bytes(4 + 2, 4),  # both products and the gated product; the gradient of both products
    views=True,
    output=2,
    logits=Bytes(4, 2),  # a float32 softmax, which becomes the gradient; logits in 16 bits
    copies=Bytes(2, 2),  # an expert's input; its gradient
)
"""Megatron on TransformerEngine: norms, SwiGLU and rotation are fused kernels."""
TRANSFORMERS = Modules(
    matrices=7,
    latent_views=True,
    # A float32 copy of the input, the normalised input, the result; five float32 temporaries.
    norm=Bytes(4 + 2 + 2, 5 * 4 - 2 - 2),
    gated=Bytes(2 + 2 + 2 + 2, 3 * 2 - 2),
    logits=Bytes(4, 8),  # a float32 log-softmax; its gradient and that of the float32 logits
    copies=Bytes(2 + 2, 2),  # an expert's input and output; the input's gradient
)
"""Modules of transformers: Llama under DeepSpeed."""
MODULES = {
    "megatron": MEGATRON,
    "megatron, local": Modules(
        # A float32 copy of the input, the float32 normalised input, the result; five float32 temporaries.
        norm=Bytes(4 + 4 + 2, 5 * 4 - 2),
        # Both products, SiLU of one, the other plus an offset, the gated product; three gradients.
        gated=Bytes(4 + 2 + 2 + 2, 3 * 2 - 2),
        angles=2 * 2 * 2,
        views=True,
        output=2,
        gathered=2 + 2,  # hidden states, in a buffer that stays, and their gradient
        logits=MEGATRON.logits,
        copies=Bytes(2 + 2, 2),  # in the order of other ranks, and sorted by expert
        weighted=2,
    ),
    "deepspeed": TRANSFORMERS,
    "liger-deepspeed": replace(TRANSFORMERS, norm=MEGATRON.norm, gated=MEGATRON.gated),
    "megatron-deepspeed": MEGATRON,
    "bmtrain": replace(MEGATRON, views=False, output=0),
}
"""Modules by `Plan.modules`; a suffix "deepspeed" is the engine.

BMTrain's modules are assumed fused, with Megatron's loss. Liger's kernels in transformers are
assumed to be fused as in TransformerEngine."""


PLAIN = Bytes(2 + 2, 2)
"""An MLP without a gate: input and result of its activation; in backward, the gradient of the input."""


CHUNK = 65536
"""Tokens of a chunk of attention, `--ds-sequence-parallel-fpdt-chunk-size` of Megatron-DeepSpeed."""


class LayerPart(NamedTuple):
    """A part of a layer, or of the modules behind the layers."""

    name: str
    kept: float
    backward: float
    """As in `Bytes`, of all its numbers."""


@dataclass(frozen=True, kw_only=True)
class LossChunks:
    """How a fused loss makes logits: in chunks, with the gradient of the head."""

    max_bytes: float
    """Bytes of the logits of a chunk, at most."""
    products: Products
    rows: int = 0
    """Rows of the head, at most, whose gradient is made in 16 bits before it is accumulated."""


def layers(
    model: Model, plan: Plan, shard: Shard, layout: str = "zigzag"
) -> list[tuple[float, list[LayerPart]]]:
    """Return the kinds of layers: the share of each kind in all layers, and its parts."""
    dense = model.layers - model.sparse_layers - model.without_mlp
    mlps = [(dense, [_mlp(model, plan, shard.tokens * model.ffn / plan.tp)]),
            (model.sparse_layers, _experts(model, plan, shard))]  # fmt: skip
    beside = max(0, model.attending + model.mixer.layers - model.layers)
    attention, recurrence = _attending(model, plan, shard), _recurrence(model, plan, shard, layout)
    mixing = [(model.attending - beside, attention), (model.mixer.layers - beside, recurrence),
              (beside, attention + recurrence)]  # fmt: skip
    norm = _norm("norms", model, plan, shard)
    mixing, mlps = ([(n, [norm, *parts]) for n, parts in kinds if n] for kinds in (mixing, mlps))
    if model.without_mlp:
        return [(n / model.layers, parts) for n, parts in (*mixing, *mlps)]
    return [(n * m / model.layers**2, mixer + mlp) for (n, mixer), (m, mlp) in product(mixing, mlps)]


def _norm(name: str, model: Model, plan: Plan, shard: Shard) -> LayerPart:
    norm, hidden = MODULES[plan.modules].norm, shard.tokens * model.hidden / plan.tp * (1 + model.sandwich)
    return LayerPart(name, norm.kept * hidden, norm.backward * hidden)


def _attending(model: Model, plan: Plan, shard: Shard) -> list[LayerPart]:
    """Return attention, and the norms of latents or heads before it."""
    attention = _attention(model, MODULES[plan.modules], shard, alone=plan.cp == 1)
    share = on_gpu(shard, plan)
    attention = attention._replace(kept=share * attention.kept, backward=share * attention.backward)
    if plan.recomputes:  # a layer's saved tensors are counted with all layers
        attention = attention._replace(kept=attention.kept - shard.result_bytes * plan.kept)
    return [*_more_norms(model, plan, shard), attention]


def _recurrence(model: Model, plan: Plan, shard: Shard, layout: str) -> list[LayerPart]:
    """Return a recurrence or a convolution: one call of its kernel, and over ranks also states."""
    if not (mixer := model.mixer).layers:
        return []
    load = work(mixer, layout, shard.tokens * plan.cp, plan.cp)
    size = 2.0 * shard.tokens * load.kept + load.states
    return [LayerPart(mixer.kind, size, 2.0 * shard.tokens * (load.kept - mixer.kept + mixer.channels))]


def on_gpu(shard: Shard, plan: Plan) -> float:
    """Return the share of Q, K, V and O that is on the GPU: two chunks, if the others wait on the host."""
    return min(1.0, 2 * CHUNK / (shard.tokens * plan.cp)) if plan.chunked else 1.0


def _mlp(model: Model, plan: Plan, width: float, name: str = "MLP") -> LayerPart:
    """Return an MLP; width: its elements of all tokens between the matrices.

    A tile has as many tokens as a token has hidden numbers, as in DeepSpeed's TiledMLP.
    """
    bytes_each = MODULES[plan.modules].gated if model.gated else PLAIN
    if plan.tiled:
        return LayerPart(name, 0.0, sum(bytes_each) * min(width, model.hidden * model.width))
    return LayerPart(name, bytes_each.kept * width, bytes_each.backward * width)


def _experts(model: Model, plan: Plan, shard: Shard) -> list[LayerPart]:
    """Return experts, shared and routed. Routing is taken to be even, and ranks of TP gather whole copies."""
    tokens = shard.tokens / plan.tp
    shared_part = _mlp(model, plan, tokens * model.shared_ffn, "shared experts")
    width = tokens * model.active * model.expert_ffn
    routed = _mlp(model, plan, width, "experts")
    modules, copies = MODULES[plan.modules], shard.tokens * model.active * model.hidden
    router = 4.0 * tokens * model.experts  # its probabilities, in float32
    return [
        LayerPart("routed tokens", modules.copies.kept * copies + router, modules.copies.backward * copies),
        shared_part,
        LayerPart(
            "experts",
            routed.kept + modules.weighted * width,
            routed.backward + modules.copies.backward * copies,
        ),
    ]


def _more_norms(model: Model, plan: Plan, shard: Shard) -> list[LayerPart]:
    """Return the norms of latents (MLA), or of the heads of queries and keys, where a model has them."""
    norm = MODULES[plan.modules].norm
    if model.kv_rank:
        numbers = shard.tokens / plan.tp * (model.q_rank + model.kv_rank)
        return [LayerPart("latents", norm.kept * numbers, norm.backward * numbers)]
    if model.qk_norm:
        numbers = float(shard.tokens * (shard.heads + shard.kv_heads) * shard.head_dim)
        return [LayerPart("norms of heads", norm.kept * numbers, norm.backward * numbers)]
    return []


def _attention(model: Model, modules: Modules, shard: Shard, *, alone: bool) -> LayerPart:
    """Return attention: Q, K, V, O and LSE; in backward dO, and gradients without a ring's sums."""
    rows = shard.tokens
    rotated = 2.0 * rows * (shard.heads + shard.kv_heads) * shard.head_dim
    values = 2.0 * rows * shard.kv_heads * shard.value_dim
    viewed = rotated * modules.views
    if model.kv_rank:  # keys are copied with the rope key of all heads
        viewed = 2.0 * rows * shard.kv_heads * (shard.head_dim - model.rope_dim) * modules.latent_views
    saved_bytes = rotated + viewed + values + rows * modules.angles * shard.head_dim
    gated = model.gates + shard.value_dim * (model.gates > 0)  # gates, and their factor
    saved_bytes += 2.0 * rows * shard.heads * gated
    return LayerPart(
        "attention",
        saved_bytes + shard.result_bytes,
        2.0 * rows * shard.heads * shard.value_dim + (rotated + values if alone else 0.0),
    )


def ends(model: Model, plan: Plan, shard: Shard, chunks: LossChunks) -> list[LayerPart]:
    """Return the parts behind the layers: the last norm, and the loss."""
    modules, norm = MODULES[plan.modules], _norm("last norm", model, plan, shard)
    vocab = model.vocab / plan.tp
    if not plan.fused_loss:
        logits = shard.tokens * vocab
        return [norm, LayerPart("logits", modules.logits.kept * logits, modules.logits.backward * logits)]
    head = model.head / plan.tp
    # Gradients are held until backward: of the hidden states in 16 bits, of the head in float32.
    waits = 2.0 * shard.tokens * model.hidden + 4.0 * head
    product = 2.0 * min(vocab, chunks.rows) * model.hidden
    dtypes, columns = chunks.products, max(int(vocab), model.hidden)  # a chunk has logits and their gradients
    size = dtypes.logits.itemsize + (dtypes.gradients.itemsize if dtypes.gradients != dtypes.logits else 0)
    chunk = automatic_chunk(shard.tokens, columns, dtypes, int(chunks.max_bytes)) * vocab * size
    return [norm, LayerPart("logits", waits, chunk + product)]


def kept(parts: Sequence[LayerPart]) -> dict[str, float]:
    """Return the bytes that parts save, by name."""
    sizes: dict[str, float] = {}
    for part in parts:
        sizes[part.name] = sizes.get(part.name, 0.0) + part.kept
    return sizes
