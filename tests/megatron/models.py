"""Small Megatron models over gloo: one training step on every rank, and what it gave for the whole model."""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import lru_cache
from importlib.metadata import version
from itertools import accumulate
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from counting import count_pairs
from ranks import on_ranks, processes

import burst_mcore.megatron.spec  # noqa: F401 - here once, with what it imports: ranks are forked
from burst_mcore import BurstConfig, Layout, shard, unshard
from burst_mcore.checkpointing import Full, Policy, Segment
from burst_mcore.megatron import cpu

VERSION = tuple(int(part) for part in version("megatron-core").split(".")[:2])
if VERSION >= (0, 19):  # what hybrid models and the trainer import, likewise
    import megatron.core.models.hybrid.hybrid_model
    import megatron.training.training  # noqa: F401
N, BATCH, VOCAB = 64, 2, 96

MLA = (
    ("multi_latent_attention", True),
    ("num_query_groups", 4),
    ("q_lora_rank", 32),
    ("kv_lora_rank", 16),
    ("qk_head_dim", 16),
    ("qk_pos_emb_head_dim", 8),
    ("v_head_dim", 16),
    ("rope_type", "rope"),
)
MOE = (("num_moe_experts", 2), ("moe_router_topk", 1), ("moe_router_pre_softmax", True))
MTP = (("mtp_num_layers", 1),)


needs_019 = pytest.mark.skipif(VERSION < (0, 19), reason="before 0.19 this model needs TransformerEngine")


class Step(NamedTuple):
    """losses [BATCH, N] in the order of the sequence; gradient norms by parameter, whole over TP and CP.

    Of packed documents, losses [1, their tokens] without padding.
    """

    losses: torch.Tensor
    norms: dict[str, float]
    core_attentions: list[str]
    gradients: dict[str, torch.Tensor]
    """Of this rank, by parameter."""
    recomputed: int
    """Query-key pairs that burst attention's forward met in backward, on all ranks."""
    latents: int
    """Core attentions that were given a latent."""


class Case(NamedTuple):
    model: str = "gpt"
    attention: str = "burst"
    tp: int = 1
    cp: int = 1
    backward: str = "auto"
    recompute: str | tuple[str, int] | None = None
    """"selective" (core attention), or full: "full" (each layer), or method and number of layers."""
    policy: Policy = Full()
    microbatches: int = 1
    lifo: bool = False
    """Whether the last microbatch goes back first."""
    strays: bool = False
    """Whether forwards without a backward come in between: without gradients, and dropped."""
    fields: tuple[tuple[str, Any], ...] = ()
    burst: tuple[tuple[str, Any], ...] = ()
    hierarchy: tuple[int, ...] | None = None
    position: str = "rope"
    layout: str = "zigzag"
    documents: tuple[int, ...] = ()
    """Lengths of packed documents; Megatron's own attention gets one after another."""
    slots: tuple[int, ...] = ()
    """Lengths that the documents are padded to, if they are."""
    fused: bool = False
    """Whether the loss is fused."""
    tied: bool = False
    """Whether embedding and head share their weight."""
    mla_latent: str = "off"
    pattern: str = "*-*-"
    """Layers of a hybrid model."""


def start_megatron(**sizes: int) -> None:
    """Start Megatron on the CPU of this rank, over groups of these sizes, and its random numbers."""
    cpu.enable()
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(**sizes)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    torch.manual_seed(0)


def _in_megatron(rank: int, size: int, function: Any, cp: int, *args: Any) -> Any:
    start_megatron(context_parallel_size=cp)
    return function(*args)


def in_megatron(function: Any, *args: Any, cp: int = 1) -> list[Any]:
    """function(*args) in every rank of a context-parallel group; what each rank found."""
    return processes(cp, _in_megatron, function, cp, *args)


def megatron_on(cp: int, size: int | None = None) -> Any:
    """Make a test of a function that all ranks of a context-parallel group call, of `size` ranks in all."""
    return on_ranks(size or cp, _in_megatron, cp)


def step(case: Case) -> Step:
    """One step of `case` over as many processes as it needs; what rank 0 saw."""
    return steps(case)[0][0]


def steps(*cases: Case) -> list[list[Step]]:
    """One step of each of `cases`, in turn, over the same processes; what each rank saw."""
    (size,) = {case.tp * case.cp for case in cases}
    return list(map(list, zip(*processes(size, _steps, cases), strict=True)))


@lru_cache
def default(**changes: Any) -> Step:
    """One step with Megatron's own attention, on one rank unless `changes` say otherwise."""
    return step(Case(attention="default", **changes))


def assert_equal(got: Step, want: Step, attention: str = "BurstCoreAttention") -> None:
    """The same losses and gradients, and the core attention is the one that was meant."""
    assert set(got.core_attentions) == {attention}
    torch.testing.assert_close(got.losses, want.losses, rtol=1e-5, atol=1e-6)
    assert got.norms.keys() == want.norms.keys()
    for name, norm in want.norms.items():
        assert got.norms[name] == pytest.approx(norm, rel=2e-5, abs=1e-9), name


def assert_as_alone(*cases: Case) -> None:
    """Every case gives what its model gives on one rank; cases of the same ranks run in one start of them."""
    alone = list(dict.fromkeys(map(_alone, cases)))
    wanted = {case: found[0] for case, found in zip(alone, steps(*alone), strict=True)}
    together = defaultdict(list)
    for case in cases:
        together[case.tp, case.cp, case.hierarchy, "sequence_parallel" in dict(case.fields)].append(case)
    for alike in together.values():
        for case, found in zip(alike, steps(*alike), strict=True):
            try:
                assert_equal(found[0], wanted[_alone(case)])
            except AssertionError as error:
                error.add_note(str(case))
                raise


def _alone(case: Case) -> Case:
    """The model of `case` on one rank, with Megatron's own attention.

    In layers of MLA that is not built without TransformerEngine: there the attention is ours.
    """
    latent = "+" in case.pattern or "multi_latent_attention" in dict(case.fields)
    kept = ("model", "microbatches", "position", "documents", "slots", "tied", "pattern")
    return Case(
        attention="burst" if latent else "default",
        fields=tuple(field for field in case.fields if field[0] != "sequence_parallel"),
        **{name: getattr(case, name) for name in kept},
    )


FEW_ULP = 8 * torch.finfo(torch.float32).eps
"""Of the largest gradient of a parameter, where a front is tiled in another way than the whole."""


def assert_same_gradients(got: Sequence[Any], want: Sequence[Any], policy: Policy) -> None:
    """Those of every parameter, on every rank: to the bit, if attention is tiled in one way."""
    for ours, theirs in zip(got, want, strict=True):
        assert ours.gradients.keys() == theirs.gradients.keys()
        for name, gradient in theirs.gradients.items():
            off = (ours.gradients[name] - gradient).abs().max()
            assert off <= (FEW_ULP * gradient.abs().max() if isinstance(policy, Segment) else 0), name


def _steps(rank: int, size: int, cases: tuple[Case, ...]) -> list[Step]:
    cpu.enable()
    from megatron.core import parallel_state

    ((tp, cp, hierarchy),) = {(case.tp, case.cp, case.hierarchy) for case in cases}
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        context_parallel_size=cp,
        hierarchical_context_parallel_sizes=list(hierarchy) if hierarchy else None,
    )
    if VERSION < (0, 19):
        let_mla_be_local()
    else:
        let_gated_delta_net_be_local()
    attended = count_pairs()
    return [_step(case, attended) for case in cases]


def _step(case: Case, attended: Counter[str]) -> Step:
    from megatron.core import parallel_state, tensor_parallel

    from burst_mcore.megatron.fused_loss import fuse_loss
    from burst_mcore.megatron.layouts import use_layout
    from burst_mcore.megatron.recompute import use_recompute

    tensor_parallel.model_parallel_cuda_manual_seed(1)
    torch.manual_seed(0)
    use_layout(case.layout)
    use_recompute(case.policy)
    if dict(case.fields).get("sequence_parallel"):
        let_torchs_norms_be_sequence_parallel()
    model = build(case)
    if case.fused:
        fuse_loss(model)
    cp_group = parallel_state.get_context_parallel_group()
    forwards = _packed if case.documents else _forwards
    losses, layout, real = forwards(model, case, cp_group)
    if case.strays:
        with torch.no_grad():
            forwards(model, case, cp_group)
        forwards(model, case, cp_group)
    attended.clear()
    for loss in reversed(losses) if case.lifo else losses:
        (loss.sum() / (len(loss) * real.sum() * case.microbatches)).backward()
    recomputed = torch.tensor(attended["backward"])
    dist.all_reduce(recomputed)
    whole = [torch.empty_like(losses[0]) for _ in range(case.cp)]
    dist.all_gather(whole, losses[0].detach().contiguous(), group=cp_group)
    norms, gradients = {}, {}
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        gradients[name] = parameter.grad
        gradient = parameter.grad.double()
        dist.all_reduce(gradient, group=cp_group)
        if getattr(parameter, "sequence_parallel", False):
            dist.all_reduce(gradient, group=parallel_state.get_tensor_model_parallel_group())
        square = gradient.square().sum()
        if getattr(parameter, "tensor_model_parallel", False):
            dist.all_reduce(square, group=parallel_state.get_tensor_model_parallel_group())
        norms[name] = square.sqrt().item()
    cores = [type(m).__name__ for n, m in model.named_modules() if n.endswith("core_attention")]
    latents = sum(getattr(module, "up_weight", None) is not None for module in model.modules())
    losses_of_all = unshard(whole, 1, layout=layout)[:, real]
    return Step(losses_of_all, norms, cores, gradients, int(recomputed), latents)


def let_mla_be_local() -> None:
    """Before 0.19 an MLA layer compares its modules with TransformerEngine's, also where there are none."""
    from megatron.core.transformer import multi_latent_attention

    for name in ("TELinear", "TEColumnParallelLinear", "Linear"):
        setattr(multi_latent_attention, name, None)
    multi_latent_attention.HAVE_TE = False


def let_gated_delta_net_be_local() -> None:
    """Its constructor asks for flash-linear-attention, of which deterministic mode takes a norm alone."""
    from megatron.core.ssm.gated_delta_net import common

    common.HAVE_FLA = True
    common.l2norm = lambda x: x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def let_torchs_norms_be_sequence_parallel() -> None:
    """Megatron refuses them under sequence parallelism, since it could not mark their weights; this does."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    make = WrappedTorchNorm.__new__

    def marked(cls: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        config = copy.copy(config)
        config.sequence_parallel = False
        norm = make(cls, config, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = True
        return norm

    WrappedTorchNorm.__new__ = marked


Forwards = tuple[list[torch.Tensor], Layout, torch.Tensor]
"""Losses of a rank by microbatch, how they are sharded, and which places of the whole are real tokens."""


def _forwards(model: Any, case: Case, cp_group: Any) -> Forwards:
    """Whole sequences: all forwards before the first backward, as in a pipeline."""
    at = torch.arange(N).expand(BATCH, N)
    later = torch.ones(N, N, dtype=torch.bool).triu(1)[None, None]
    # MTP's loss divides by the masked tokens of a rank, so CP 1 and CP 2 agree only where rolling the mask
    # changes no rank's count: no token counts at the start of a chunk.
    counted = (at % (N // 4) != 0).float()
    losses = []
    for t in _tokens(case, BATCH, N + 1):
        batch = {"tokens": t[:, :-1], "labels": t[:, 1:], "loss_mask": counted, "position_ids": at}
        batch = on_this_cp_rank({**batch, "attention_mask": later}, cp_group)
        given = [batch.pop(name) for name in ("tokens", "position_ids", "attention_mask")]
        losses.append(model(*given, **batch))
    return losses, Layout.of(case.layout), torch.ones(N, dtype=torch.bool)


def on_this_cp_rank(batch: dict[str, torch.Tensor], cp_group: Any) -> dict[str, torch.Tensor]:
    """This rank's part of a batch, by Megatron's own function."""
    from megatron.core.utils import get_batch_on_this_cp_rank

    how = {"is_hybrid_cp": False} if VERSION >= (0, 19) else {}
    part: dict[str, torch.Tensor] = get_batch_on_this_cp_rank(dict(batch), cp_group=cp_group, **how)
    return part


def _packed(model: Any, case: Case, cp_group: Any) -> Forwards:
    """Packed documents; one after another, each alone, for Megatron's own attention, which cannot pack."""
    slots = case.slots or case.documents
    cu_seqlens = list(accumulate(slots, initial=0))
    layout = Layout("zigzag-documents", ends=tuple(cu_seqlens)) if case.cp > 1 else Layout("zigzag")
    held = [torch.arange(n) for n in slots]
    real = torch.cat([at < n for at, n in zip(held, case.documents, strict=True)])
    at = torch.cat(held)[None]
    # As in `_forwards`: up to CP 2 no token counts for MTP at the start of a chunk.
    starts = torch.cat([place % max(1, len(place) // 4) == 0 for place in held])
    weighed = (real & ~starts).float()[None]
    losses = []
    for t in _tokens(case, 1, sum(slots) + 1):
        if case.attention == "default":
            documents = [slice(a, a + n) for a, n in zip(cu_seqlens, case.documents, strict=False)]
            of_each = [[x[:, d] for x in (t[:, :-1], at, t[:, 1:], weighed)] for d in documents]
            alone = [model(x, p, None, labels=y, loss_mask=mask) for x, p, y, mask in of_each]
            losses.append(torch.cat(alone, 1))
            continue
        tokens, labels, where, counted, mask = (
            shard(x, 1, rank=cp_group.rank(), size=case.cp, layout=layout)
            for x in (t[:, :-1], t[:, 1:], at, real[None], weighed)
        )
        params = packed_seq_params(case)
        found = model(tokens, where, None, labels=labels, loss_mask=mask, packed_seq_params=params)
        losses.append(found * counted)
    return losses, layout, real if case.attention == "burst" else real[real]


def packed_seq_params(case: Case) -> Any:
    """The documents of `case`, as a data loader gives them: fresh tensors."""
    from megatron.core.packed_seq_params import PackedSeqParams

    lengths = [list(accumulate(x, initial=0)) for x in (case.documents, case.slots) if x]
    real, *padded = (torch.tensor(x, dtype=torch.int32) for x in lengths)
    longest = max(case.slots or case.documents)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=real,
        cu_seqlens_kv=real,
        cu_seqlens_q_padded=padded[0] if padded else None,
        cu_seqlens_kv_padded=padded[0] if padded else None,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def _tokens(case: Case, *shape: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (case.microbatches, *shape), generator=torch.Generator().manual_seed(3))


def transformer_config(case: Case) -> Any:
    """A config that runs on CPU in float32, dropout off."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    fields: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "tensor_model_parallel_size": case.tp,
        "context_parallel_size": case.cp,
        "hierarchical_context_parallel_sizes": list(case.hierarchy) if case.hierarchy else None,
        "use_cpu_initialization": True,
        "transformer_impl": "local",
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": False,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
        "calculate_per_token_loss": True,
    }
    if case.recompute is not None:
        method = ("uniform", 1) if case.recompute == "full" else case.recompute
        fields["recompute_granularity"] = "selective" if method == "selective" else "full"
        if method != "selective":
            fields.update(recompute_method=method[0], recompute_num_layers=method[1])
    fields.update(case.fields)
    make = MLATransformerConfig if fields.get("multi_latent_attention") else TransformerConfig
    return make(**fields)


def build(case: Case, **stage: Any) -> Any:
    """The model of `case`: Megatron's own spec, or ours. stage: of a pipeline, for GPTModel."""
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.models.gpt.gpt_model import GPTModel

    from burst_mcore.megatron import spec

    config = transformer_config(case)
    burst = BurstConfig(backward=case.backward, layout=case.layout, **dict(case.burst))
    common = {
        "vocab_size": VOCAB,
        "max_sequence_length": N,
        "position_embedding_type": case.position,
        "share_embeddings_and_output_weights": case.tied,
    }
    if case.model == "hybrid":
        from megatron.core.models.hybrid.hybrid_model import HybridModel

        hybrid = spec.hybrid_stack_spec(config, burst)
        if case.attention == "default":
            hybrid = with_stock_attention(hybrid)
        return HybridModel(config, hybrid, hybrid_layer_pattern=case.pattern, **common)
    layer = gpt_layer_specs.get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        multi_latent_attention=config.multi_latent_attention,
        normalization="RMSNorm",
    )
    mtp = None
    if case.model == "mtp":
        mtp = gpt_layer_specs.get_gpt_mtp_block_spec(config, layer, use_transformer_engine=False)
    if case.attention == "burst":
        layer = spec.layer_spec(config, burst, case.mla_latent)
        mtp = None if mtp is None else spec.with_burst_attention(mtp, burst)
    if case.model == "linear":  # as heterogeneous layers may be
        from megatron.core.transformer.heterogeneous.linear_replacements import ColumnParallelLinearGathered

        layer.submodules.mlp = ColumnParallelLinearGathered
    return GPTModel(config, layer, mtp_block_spec=mtp, **common, **stage)


def with_stock_attention(hybrid: Any) -> Any:
    """A hybrid stack of local modules with Megatron's own attention, which no version ships."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    for kind in (hybrid.submodules.attention_layer, hybrid.submodules.mla_layer):
        if hasattr(kind, "submodules"):
            kind.submodules.self_attention.submodules.core_attention = DotProductAttention
    return hybrid
