"""Megatron's arguments: checked and put in effect, and the route and kernel that they choose.

Every function takes a TransformerConfig or the parsed arguments, which have fields of the same names.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from burst_mcore.attention.geometry.shard import Ranks
from burst_mcore.attention.geometry.tiles import launches_of
from burst_mcore.attention.kernels.kernel import Problem
from burst_mcore.attention.kernels.table import KERNELS, by_rank
from burst_mcore.attention.request import shard_of
from burst_mcore.attention.resolve import problem_of
from burst_mcore.attention.schedule.heads import degrees_of
from burst_mcore.config import SETTINGS, BurstConfig
from burst_mcore.layout import Layout
from burst_mcore.mask import Mask
from burst_mcore.megatron import arguments as flags
from burst_mcore.megatron import layouts
from burst_mcore.megatron.rules import Settings, judge, of_fused_loss, of_layer, of_scripts
from burst_mcore.wrap import around, wrap

logger = logging.getLogger(__name__)

_BACKENDS = {"flash": ("flash2", "flash3", "flash4"), "fused": ("cudnn",)}
"""Kernels that --attention-backend allows."""
TOKENS = 2**17
"""The assumed tokens for the check of a layer's kernel, before its sequences are known."""


def check_arguments(arguments: Any) -> None:
    """Check the arguments by the table of `rules`, and against kernels, heads and layouts.

    Before any process group is made. Raises ValueError for an illegal argument.
    """
    s, uses_burst = Settings(arguments), flags.uses_burst(arguments)
    names = flags.given_flags(arguments, *SETTINGS, "rates", "mla_latent")
    if names and not uses_burst:
        raise ValueError(
            f"{names[0]} has no effect without burst attention: add --context-parallel-attention-backend "
            "burst, also beside a spec of your own that holds core_attention_spec()"
        )
    flags.recompute_policy(arguments)
    if s.burst_fused_loss:
        judge(of_fused_loss(s))
    if not uses_burst:
        return
    judge(of_layer(s, flags.mla_latent(arguments)) | of_scripts(s))
    flags.rates_of(arguments)
    burst, size = flags.burst_config(arguments), arguments.context_parallel_size
    route_flags = flags.given_flags(arguments, *ROUTING)
    types = s.cp_comm_type or None  # one for all layers, or one a layer
    for kind in types if isinstance(types, list | tuple) else [types]:
        burst_of_kind = configured(burst, arguments, kind, routing=route_flags)
        try:
            with_kernel(burst_of_kind, arguments, Ranks(size, size), Mask.causal())
        except ValueError as error:
            asker = f"--cp-comm-type {kind}: " if kind not in (None, "p2p") else ""
            raise ValueError(f"{asker}{error}") from error
    if size > 1:
        layout, tokens = Layout.of(burst.layout), arguments.seq_length or 0
        layouts.refuse_assumed_zigzag(arguments, layouts.Sharding(layout, flags.packed_of(arguments)))
        if tokens % (divisor := layout.divisor(size)):
            raise ValueError(f"--seq-length {tokens} is no multiple of {divisor}: layout {layout} needs it")


def use_burst(arguments: Any) -> None:
    """Check the arguments; with burst attention put the layout, and data without masks, in effect."""
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig

    if not hasattr(arguments, "num_attention_heads"):  # a YAML file's are elsewhere
        return
    check_arguments(arguments)
    if not flags.uses_burst(arguments):
        return
    layouts.shard_sequences_alone()
    sharding = layouts.Sharding(Layout.of(flags.setting(arguments, "layout")), flags.packed_of(arguments))
    if sharding != layouts.STOCK:  # else Megatron's, or that of a script's own use_layout
        layouts.use_layout(sharding.layout, sharding.packed)
    wrap(GPTDatasetConfig, "__post_init__", _refusing_a_dense_mask)
    if getattr(arguments, "create_attention_mask_in_dataloader", False):
        # Megatron's default. Users who need a mask set it in GPTDatasetConfig.
        arguments.create_attention_mask_in_dataloader = False
        if os.environ.get("RANK", "0") == "0":
            logger.warning(
                "burst_mcore: the data loader builds no attention mask, which burst attention does not need "
                "(--no-create-attention-mask-in-dataloader)"
            )


MASKED_TOKENS = 2**14
"""The longest sequence with a dense attention mask; above, Megatron's mask takes 1 GiB a sample."""


def refuse_dense_mask(source: str, tokens: int) -> None:
    """Raise ValueError for an attention mask [tokens, tokens] that is too large; source: its origin."""
    if tokens > MASKED_TOKENS:
        raise ValueError(
            f"{source} asks for a dense mask of {tokens} x {tokens}: burst attention needs none, and takes "
            f"none above {MASKED_TOKENS} tokens: pass --no-create-attention-mask-in-dataloader"
        )


@around
def _refusing_a_dense_mask(check: Callable, config: Any) -> None:
    """Wrap the check of a data set's configuration: with burst attention a large dense mask raises."""
    check(config)
    if config.create_attention_mask and flags.uses_burst(flags.command_line()):
        refuse_dense_mask("create_attention_mask of GPTDatasetConfig", config.sequence_length)


def with_kernel(
    burst: BurstConfig, config: Any, ranks: Ranks, mask: Mask, dims: tuple[int, int] = (64, 64)
) -> BurstConfig:
    """Return `burst` with the kernel of Megatron's flags, after checks of heads and kernel.

    Args:
        config: of a layer, or the arguments.
        dims: head dims of queries and values; every kernel supports the default.

    Raises:
        ValueError: the ranks cannot share the heads, or the kernel does not support the layer here.
    """
    s, shards, heads = Settings(config), config.tensor_model_parallel_size, config.num_attention_heads
    is_grouped = s.group_query_attention is not False  # without, arguments have one group
    groups = (s.num_query_groups if is_grouped else None) or heads
    q_shape = 1, 1, heads // shards, dims[0]
    half = (torch.bfloat16 if s.bf16 else None) or (torch.float16 if s.fp16 else None)
    dtype = half or s.params_dtype or torch.float32  # of q: parameters may have another one yet
    shard = shard_of(q_shape, max(1, groups // shards), dims[1], dtype, burst.grad_dtype)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options = {"launches": launches_of(mask, TOKENS), "deterministic": burst.deterministic}
    problem = problem_of(shard.pooled(degrees_of(burst, ranks, shard)[0]), device=device, **options)
    burst = kernel_of(burst, config, problem)
    reason = None if burst.kernel == "auto" else KERNELS[burst.kernel].supports(problem)
    if reason is not None:
        legal = [kernel.name for kernel in KERNELS.values() if kernel.supports(problem) is None]
        raise ValueError(f"--burst-kernel {burst.kernel}: {reason}; legal here: auto, {', '.join(legal)}")
    return burst


ROUTING = ("ring", "head_parallel", "head_placement")
"""The fields of BurstConfig that choose the route, like --cp-comm-type."""


def configured(
    burst: BurstConfig,
    config: Any,
    cp_comm_type: str | None,
    size: int | None = None,
    routing: Sequence[str] | None = None,
) -> BurstConfig:
    """Return `burst` with the determinism of `config`, and the --cp-comm-type of a layer.

    p2p leaves the route to `burst`; a2a is Ulysses over all ranks, a2a+p2p Ulysses over the inner of two
    hierarchical groups, all_gather the direct exchange. size: of the group, by default the configuration's.
    routing: the flags of `ROUTING` on the command line, by default those of the fields that `burst` sets.

    Raises:
        ValueError: another cp_comm_type, a2a+p2p without hierarchical sizes, or a type beside `routing`.
    """
    s = Settings(config)
    if s.deterministic_mode:
        burst = replace(burst, deterministic=True)
    size = (s.context_parallel_size or 1) if size is None else size
    word = (cp_comm_type or "p2p").lower().replace("_", "")
    if word not in ("p2p", "a2a", "a2a+p2p", "allgather"):
        raise ValueError(f"unknown --cp-comm-type {cp_comm_type}; legal: p2p, a2a, a2a+p2p, all_gather")
    if word == "p2p" or size == 1:
        return burst
    if routing is None:
        routing = [flags.flag_of(name) for name in ROUTING if getattr(burst, name) != SETTINGS[name].default]
    if routing:
        both = f"--cp-comm-type {cp_comm_type} says how ranks communicate, and so does {routing[0]}"
        raise ValueError(f"{both}: give one of them")
    if word == "a2a":
        return replace(burst, head_parallel=size)
    if word == "allgather":
        return replace(burst, ring="direct", head_parallel=1)
    if not s.hierarchical_context_parallel_sizes:
        raise ValueError("--cp-comm-type a2a+p2p needs --hierarchical-context-parallel-sizes")
    inner = int(s.hierarchical_context_parallel_sizes[0])
    return replace(burst, head_parallel=inner, head_placement="inner")


def kernel_of(burst: BurstConfig, config: Any, problem: Problem) -> BurstConfig:
    """Return `burst` with a kernel that --attention-backend and --flash-attention-version allow.

    A version of flash-attn chooses flash-attn, except with --attention-backend fused, as in Megatron.

    Raises:
        ValueError: no allowed kernel supports the problem (with the reasons), or `burst` names another.
    """
    s = Settings(config)
    words, legal, version = [], tuple(KERNELS), s.flash_attention_version
    if s.backend in _BACKENDS:
        words, legal = [f"--attention-backend {s.backend}"], _BACKENDS[s.backend]
    if version is not None:
        words.append(f"--flash-attention-version {version}")
        legal = legal if s.backend == "fused" else (f"flash{version}",)
    if burst.kernel not in ("auto", *legal):
        raise ValueError(f"--burst-kernel {burst.kernel} contradicts {' '.join(words)}: give one of them")
    if not words or burst.kernel != "auto":
        return burst
    order = [name for name in by_rank(problem.device, problem.launches) if name in legal]
    reasons = {name: KERNELS[name].supports(problem) for name in order or legal}
    for name, reason in reasons.items():
        if reason is None:
            return replace(burst, kernel=name)
    refusals = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    raise ValueError(f"{' '.join(words)}: no kernel supports it ({refusals})")
