"""Small Megatron models over gloo: one training step on every rank, and what it gave for the whole model."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from ranks import processes

from burst_mcore import BurstConfig, shard, unshard
from burst_mcore.megatron import cpu

VERSION = tuple(int(part) for part in version("megatron-core").split(".")[:2])
N, BATCH, VOCAB = 64, 2, 96


class Step(NamedTuple):
    """losses [BATCH, N] in the order of the sequence; gradient norms by parameter, whole over TP and CP."""

    losses: torch.Tensor
    norms: dict[str, float]
    core_attentions: list[str]


class Case(NamedTuple):
    model: str = "gpt"
    attention: str = "burst"
    tp: int = 1
    cp: int = 1
    backward: str = "auto"
    recompute: str | None = None
    microbatches: int = 1
    fields: tuple[tuple[str, Any], ...] = ()
    burst: tuple[tuple[str, Any], ...] = ()
    hierarchy: tuple[int, ...] | None = None


def step(case: Case) -> Step:
    """One step of `case` over as many processes as it needs; what rank 0 saw."""
    return processes(case.tp * case.cp, _step, case, timeout=300)[0]


def _step(rank: int, size: int, case: Case) -> Step:
    cpu.enable()
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=case.tp,
        context_parallel_size=case.cp,
        hierarchical_context_parallel_sizes=list(case.hierarchy) if case.hierarchy else None,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    torch.manual_seed(0)
    model = build(case)
    cp_rank, cp_group = (
        parallel_state.get_context_parallel_rank(),
        parallel_state.get_context_parallel_group(),
    )

    def local(x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        return shard(x, dim, rank=cp_rank, size=case.cp)

    at = torch.arange(N).expand(BATCH, N)
    later = torch.ones(N, N, dtype=torch.bool).triu(1)[None, None]
    tokens = torch.randint(
        0, VOCAB, (case.microbatches, BATCH, N + 1), generator=torch.Generator().manual_seed(3)
    )
    # MTP's loss divides by the masked tokens of a rank, so CP 1 and CP 2 agree only where rolling the mask
    # changes no rank's count: no token counts at the start of a chunk.
    counted = (at % (N // 4) != 0).float()
    losses = [
        model(
            local(t[:, :-1]), local(at), local(later, dim=2), labels=local(t[:, 1:]), loss_mask=local(counted)
        )
        for t in tokens
    ]  # all forwards before the first backward, as in a pipeline
    for loss in losses:
        (loss.sum() / (BATCH * N * case.microbatches)).backward()
    whole = [torch.empty_like(losses[0]) for _ in range(case.cp)]
    dist.all_gather(whole, losses[0].detach().contiguous(), group=cp_group)
    norms = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        gradient = parameter.grad.double()
        dist.all_reduce(gradient, group=cp_group)
        square = gradient.square().sum()
        if getattr(parameter, "tensor_model_parallel", False):
            dist.all_reduce(square, group=parallel_state.get_tensor_model_parallel_group())
        norms[name] = square.sqrt().item()
    cores = [type(m).__name__ for n, m in model.named_modules() if n.endswith("core_attention")]
    return Step(unshard(whole, 1), norms, cores)


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
        fields["recompute_granularity"] = case.recompute
        if case.recompute == "full":
            fields.update(recompute_method="uniform", recompute_num_layers=1)
    fields.update(case.fields)
    make = MLATransformerConfig if fields.get("multi_latent_attention") else TransformerConfig
    return make(**fields)


def build(case: Case) -> Any:
    """The model of `case`: Megatron's own spec, or ours."""
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.models.gpt.gpt_model import GPTModel

    from burst_mcore.megatron import spec

    config = transformer_config(case)
    burst = BurstConfig(backward=case.backward, **dict(case.burst))
    common = {
        "vocab_size": VOCAB,
        "max_sequence_length": N,
        "position_embedding_type": "rope",
    }
    if case.model == "hybrid":
        from megatron.core.models.hybrid.hybrid_model import HybridModel

        hybrid = spec.hybrid_stack_spec(config, burst)
        if case.attention == "default":
            hybrid = with_stock_attention(hybrid)
        return HybridModel(config, hybrid, hybrid_layer_pattern="*-*-", **common)
    layer = gpt_layer_specs.get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        multi_latent_attention=config.multi_latent_attention,
        normalization="RMSNorm",
    )
    mtp = None
    if case.model == "mtp":
        mtp = gpt_layer_specs.get_gpt_mtp_block_spec(config, layer, use_transformer_engine=False)
    if case.attention == "burst":
        layer = spec.layer_spec(config, burst)
        mtp = None if mtp is None else spec.with_burst_attention(mtp, burst)
    return GPTModel(config, layer, mtp_block_spec=mtp, **common)


def with_stock_attention(hybrid: Any) -> Any:
    """A hybrid stack of local modules with Megatron's own attention, which no version ships."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    hybrid.submodules.attention_layer.submodules.self_attention.submodules.core_attention = (
        DotProductAttention
    )
    return hybrid
