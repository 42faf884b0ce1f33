"""Training steps of a small GPT under Megatron: its own attention and TransformerEngine's, and ours."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from burst_bench.core import Method, World, add, installed, shared_heads
from burst_bench.methods.steps import OURS, VOCABULARY, WIDER, StepSetting, Train, TrainedCase, needs
from burst_mcore.checkpointing import Full, Policy
from burst_mcore.layout import shard
from burst_plan.explain.problem import DTYPES

COMMUNICATIONS = ("p2p", "all_gather", "a2a", "a2a+p2p")
"""The context parallelism of TransformerEngine, by kind of message."""
OWN = "megatron (CP 1)"
"""Megatron's own attention has no context parallelism: each rank trains on a whole sequence."""
SCORES = 12
"""Measured float32 tensors of heads x seq x seq that a rank holds at its peak there: 8 to 13."""


def start(case: TrainedCase, world: World) -> None:
    """Initialise Megatron, quietly."""
    warnings.filterwarnings("ignore", module="megatron")  # its warnings name packages that are not installed
    if world.device == "cpu":
        from burst_mcore.megatron import cpu

        logging.getLogger("burst_mcore.megatron.cpu").setLevel(logging.ERROR)
        cpu.enable_training()
    logging.getLogger("megatron").setLevel(logging.ERROR)
    _parallel(case, case.ranks)


def _parallel(case: TrainedCase, cp: int) -> None:
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        context_parallel_size=cp, hierarchical_context_parallel_sizes=_levels(case, cp)
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)


def _levels(case: TrainedCase, cp: int) -> list[int] | None:
    """Return the ranks of a node, and nodes, of a context-parallel group over several nodes."""
    return [cp // case.nodes, case.nodes] if cp > case.nodes > 1 else None


@contextmanager
def _whole_sequences(case: TrainedCase) -> Iterator[None]:
    """Build models without context parallelism inside this context. Collective."""
    _parallel(case, 1)
    try:
        yield
    finally:
        _parallel(case, case.ranks)


def first_loss(case: TrainedCase, world: World) -> float:
    """Return the loss of the model in one process."""
    with _whole_sequences(case), torch.no_grad():
        model = _model(case, 1, _local, world)
        return float(model(*_batch(case, world, 1)).mean())


def _local(config: Any) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    return get_gpt_layer_local_spec(normalization="RMSNorm")


def _model(case: TrainedCase, cp: int, spec_of: Callable[[Any], Any], world: World, **fields: Any) -> Any:
    """Return the model, the same every time."""
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    width, dtype = case.width, DTYPES[case.dtype]
    on_cpu = world.device == "cpu"
    config = TransformerConfig(
        num_layers=case.layers, hidden_size=width, ffn_hidden_size=WIDER * width,
        num_attention_heads=case.heads, num_query_groups=case.kv_heads, kv_channels=case.head_dim,
        context_parallel_size=cp, hierarchical_context_parallel_sizes=_levels(case, cp),
        attention_dropout=0.0, hidden_dropout=0.0, normalization="RMSNorm", add_bias_linear=False,
        gated_linear_unit=True, activation_func=torch.nn.functional.silu, bias_activation_fusion=False,
        bias_dropout_fusion=False, masked_softmax_fusion=False, gradient_accumulation_fusion=False,
        persist_layer_norm=False, calculate_per_token_loss=True, use_cpu_initialization=on_cpu,
        transformer_impl="local" if on_cpu else "transformer_engine",
        params_dtype=dtype, bf16=dtype == torch.bfloat16, **fields,
    )  # fmt: skip
    torch.manual_seed(0)
    model = GPTModel(
        config, spec_of(config), vocab_size=VOCABULARY, max_sequence_length=case.seq,
        position_embedding_type="rope", share_embeddings_and_output_weights=False,
    )  # fmt: skip
    return model.to(world.device, dtype)


def _batch(case: TrainedCase, world: World, cp: int) -> tuple[Any, ...]:
    """Return this rank's tokens, positions, no mask, no other input, and labels."""
    part_of = partial(shard, dim=1, rank=world.rank % cp, size=cp, layout="zigzag")
    sequence = case.sample, torch.arange(case.seq)[None], case.sample.roll(-1, 1)
    tokens, numbers, labels = (part_of(x).to(world.device) for x in sequence)
    return tokens, numbers, None, None, labels


def _train(model: Any, batch: tuple[Any, ...], policy: Policy) -> Train:
    """Return the step of a model with Megatron's data parallelism and its distributed optimizer."""
    from megatron.core import distributed
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    from burst_mcore.megatron.recompute import use_recompute

    sharding = distributed.DistributedDataParallelConfig(use_distributed_optimizer=True)
    parallel = distributed.DistributedDataParallel(model.config, sharding, model)
    options = OptimizerConfig(
        lr=0.0, weight_decay=0.0, use_distributed_optimizer=True, params_dtype=model.config.params_dtype,
        bf16=model.config.bf16,
    )  # fmt: skip
    optimizer = get_megatron_optimizer(options, [parallel])

    def step() -> float:
        use_recompute(policy)
        parallel.zero_grad_buffer()
        optimizer.zero_grad()
        losses = parallel(*batch)
        total = losses.sum()
        total.backward()
        count = torch.tensor(losses.numel(), dtype=torch.int, device=losses.device)
        distributed.finalize_model_grads([parallel], count)
        optimizer.step()
        sums = torch.tensor(
            [float(total.detach()), losses.numel()], dtype=torch.float64, device=losses.device
        )
        dist.all_reduce(sums)
        return float(sums[0] / sums[1])

    return step


def _ours(setting: StepSetting, case: TrainedCase, world: World) -> Train:
    from burst_mcore.megatron import spec
    from burst_mcore.megatron.fused_loss import fuse_loss
    from burst_mcore.torch.parallel import POLICIES

    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    layer = partial(spec.layer_spec, burst_config=setting.config)
    model = _model(case, case.ranks, layer, world, **({} if setting.recompute == "none" else recompute))
    if setting.fused:
        fuse_loss(model)
    return _train(model, _batch(case, world, case.ranks), POLICIES[setting.recompute] or Full())


def _own(case: TrainedCase, world: World) -> Train:
    with _whole_sequences(case):
        return _train(_model(case, 1, _local, world), _batch(case, world, 1), Full())


def _engine(communication: str, case: TrainedCase, world: World) -> Train:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    spec = get_gpt_layer_with_transformer_engine_spec()
    model = _model(case, case.ranks, lambda config: spec, world, cp_comm_type=communication)
    return _train(model, _batch(case, world, case.ranks), Full())


def _own_needs(case: TrainedCase, device: str) -> str | None:
    """Return the missing package, or the missing memory, without which the system ends processes."""
    lacks = NEEDS(None, case, device)
    if lacks is not None or device != "cpu":
        return lacks
    scores = SCORES * 4 * case.ranks * case.heads * case.seq**2
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if scores <= memory:
        return None
    return f"{scores / 1e9:.0f} GB for scores of whole sequences, of {memory / 1e9:.0f} GB here: less seq"


def _engine_needs(communication: str, case: TrainedCase, device: str) -> str | None:
    lacks = installed("transformer-engine", case, device, on_gpu=True)
    if lacks is None and communication == "a2a":
        return shared_heads(case, case.ranks)
    if lacks is None and communication == "a2a+p2p" and case.nodes < 2:
        return "2 nodes or more: nodes=2"
    return lacks


NEEDS = partial(needs, ["megatron-core"])
add(
    "megatron",
    Method(OWN, _own, _own_needs, ours=False),
    *(Method(f"te {w}", partial(_engine, w), partial(_engine_needs, w), ours=False) for w in COMMUNICATIONS),
    *(Method(name, partial(_ours, setting), partial(NEEDS, setting)) for name, setting in OURS.items()),
)
