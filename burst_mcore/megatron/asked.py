"""What Megatron's arguments ask of core attention: served by a BurstConfig, or refused by name.

Every function takes a TransformerConfig or the parsed arguments, whose fields have the same names.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from burst_mcore.attention.candidates import Ranks, degrees_of
from burst_mcore.attention.geometry.tiles import launches_of
from burst_mcore.attention.kernels.kernel import Problem
from burst_mcore.attention.kernels.table import KERNELS, by_rank
from burst_mcore.attention.prepare import problem_of
from burst_mcore.attention.request import shard_of
from burst_mcore.config import SETTINGS, BurstConfig
from burst_mcore.layout import Layout
from burst_mcore.mask import Mask
from burst_mcore.megatron import fused_loss
from burst_mcore.megatron.arguments import (
    burst_config,
    flag_of,
    given_flags,
    mla_latent,
    options_without_effect,
    packed_of,
    rates_of,
    recompute_policy,
    setting,
    uses_burst,
)
from burst_mcore.megatron.layouts import ZIGZAG, Dealing, refuse_assumed_zigzag

SOFTMAX_TYPES = ("vanilla", "off-by-one", "learnable")
_BACKENDS = {"flash": ("flash2", "flash3", "flash4"), "fused": ("te", "cudnn")}
"""Kernels that --attention-backend allows."""
TOKENS = 2**17
"""Tokens for which a layer's kernel is tried before its sequences are known."""


def check_arguments(arguments: Any) -> None:
    """Refuse what follows from the arguments alone, before any process group is made.

    Raises:
        ValueError: options of burst attention without it, or that contradict others; what is asked of core
            attention that burst attention does not do; heads or tokens that the ranks cannot share.
    """
    idle = options_without_effect(arguments)
    if idle is not None:
        raise ValueError(
            f"{idle} has no effect without burst attention: add --context-parallel-attention-backend burst, "
            "also beside a spec of your own that holds core_attention_spec()"
        )
    recompute_policy(arguments)
    what = fused_loss.refusal(arguments) if getattr(arguments, "burst_fused_loss", False) else None
    if what is not None:
        raise ValueError(f"--burst-fused-loss does not go with {what}")
    if not uses_burst(arguments):
        return
    what = refusal(arguments, latent=mla_latent(arguments))
    if what is not None:
        raise ValueError(f"burst attention does not support {what}")
    _check_combinations(arguments)
    burst, size = burst_config(arguments), arguments.context_parallel_size
    for kind in layers_comm_types(arguments):
        try:
            with_kernel(configured(burst, arguments, kind), arguments, Ranks(size, size), Mask.causal())
        except ValueError as error:
            asker = f"--cp-comm-type {kind}: " if kind not in (None, "p2p") else ""
            raise ValueError(f"{asker}{error}") from error
    _check_tokens(Layout.of(burst.layout), arguments)


def _check_combinations(arguments: Any) -> None:
    """Refuse what layers, their rings and their batches would refuse one by one, later."""
    size, layout = arguments.context_parallel_size, setting(arguments, "layout")
    kinds = [kind for kind in layers_comm_types(arguments) if (kind or "p2p").lower() != "p2p"]
    ways = given_flags(arguments, "ring", "head_parallel", "head_placement")
    if size > 1 and kinds and ways:
        raise ValueError(
            f"--cp-comm-type {kinds[0]} says how ranks communicate, and so does {ways[0]}: give one of them"
        )
    if size > 1 and getattr(arguments, "flash_decode", False):
        raise ValueError("--flash-decode goes past core attention: generate at --context-parallel-size 1")
    if size > 1 and getattr(arguments, "sft", False) and Layout.of(layout) != ZIGZAG:
        raise ValueError(f"--burst-layout {layout} does not go with --sft, whose documents are dealt zigzag")
    _check_largest_logits(arguments)
    _check_documents(arguments)
    rates_of(arguments)


def _check_largest_logits(arguments: Any) -> None:
    """Refuse what Megatron's `clip_qk` fails on after a step: it takes the model out of two wrappers."""
    is_clipped = _is_set(arguments, "qk_clip")
    is_float = not _is_set(arguments, "bf16", "fp16")
    is_dealt = is_clipped and _is_set(arguments, "use_distributed_optimizer")
    if is_dealt or (is_float and (is_clipped or _is_set(arguments, "log_max_attention_logit"))):
        raise ValueError(
            "Megatron's clip_qk takes a model in half precision, and for --qk-clip whole weights: pass "
            "--bf16 or --fp16, and drop --use-distributed-optimizer"
        )


def _check_documents(arguments: Any) -> None:
    """Refuse documents between any tokens beside pipelines to which Megatron cannot hand them."""
    if not _is_set(arguments, "dataloader_inter_document_masking"):
        return
    stages = getattr(arguments, "pipeline_model_parallel_size", 1)
    if stages > 1 and arguments.micro_batch_size > 1:
        raise ValueError(
            "--dataloader-inter-document-masking makes one sequence of the samples of a micro batch, and "
            f"pipeline stages expect {arguments.micro_batch_size} (--micro-batch-size): pass "
            f"--micro-batch-size 1 with --pipeline-model-parallel-size {stages}"
        )
    if getattr(arguments, "virtual_pipeline_model_parallel_size", None):
        raise ValueError(
            "--dataloader-inter-document-masking does not go with interleaved pipelines (virtual stages): "
            "Megatron's scripts give no documents to stages in the middle: leave out the virtual stages"
        )


def with_kernel(
    burst: BurstConfig, config: Any, ranks: Ranks, mask: Mask, dims: tuple[int, int] = (64, 64)
) -> BurstConfig:
    """`burst` with the kernel that Megatron's flags ask for, once heads and kernel are known to be legal.

    Args:
        config: of a layer, or the arguments.
        dims: of queries and values; every kernel takes the default.

    Raises:
        ValueError: so many ranks cannot share the heads, or the kernel cannot serve the layer on this device.
    """
    shards, heads = config.tensor_model_parallel_size, config.num_attention_heads
    is_grouped = getattr(config, "group_query_attention", True)  # without, arguments have one group
    groups = (getattr(config, "num_query_groups", None) if is_grouped else None) or heads
    q_shape = 1, 1, heads // shards, dims[0]
    dtype = dtype_of_calls(config)
    shard = shard_of(q_shape, max(1, groups // shards), dims[1], dtype, burst.grad_dtype)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    others = {"device": device, "launches": launches_of(mask, TOKENS), "deterministic": burst.deterministic}
    problem = problem_of(shard.pooled(degrees_of(burst, ranks, shard)[0]), **others)
    burst = kernel_of(burst, config, problem)
    reason = None if burst.kernel == "auto" else KERNELS[burst.kernel].supports(problem)
    if reason is not None:
        legal = [kernel.name for kernel in KERNELS.values() if kernel.supports(problem) is None]
        raise ValueError(f"--burst-kernel {burst.kernel}: {reason}; legal here: auto, {', '.join(legal)}")
    return burst


def dtype_of_calls(config: Any) -> torch.dtype:
    """Return the dtype of q: with autocast and wrappers parameters may still be of another one."""
    if _is_set(config, "bf16"):
        return torch.bfloat16
    return torch.float16 if _is_set(config, "fp16") else getattr(config, "params_dtype", torch.float32)


def _check_tokens(layout: Layout, arguments: Any) -> None:
    size, tokens = arguments.context_parallel_size, arguments.seq_length
    if size == 1:
        return
    refuse_assumed_zigzag(Dealing(layout, packed_of(arguments)), arguments)
    divisor = layout.divisor(size)
    if tokens and tokens % divisor:
        raise ValueError(
            f"--seq-length {tokens} is no multiple of {divisor}: layout {layout} over {size} ranks needs that"
        )


def refusal(config: Any, dropout: float | None = None, latent: str = "off") -> str | None:
    """Return a requested feature of core attention that burst attention lacks; None if all are there.

    dropout: of the layer, if it has its own. latent: as --burst-mla-latent.
    """
    dropout = (getattr(config, "attention_dropout", 0) or 0) if dropout is None else dropout
    graphs = getattr(config, "cuda_graph_impl", None) or "none"
    backend = _backend(config)
    asked = {
        f"attention dropout {dropout} (pass --attention-dropout 0)": dropout > 0,
        "FP8 attention (fp8_dot_product_attention, fp8_multi_head_attention): it computes in q's dtype": (
            _is_set(config, "fp8_dot_product_attention", "fp8_multi_head_attention")
        ),
        "--batch-invariant-mode: its kernels depend on the batch": _is_set(config, "batch_invariant_mode"),
        "Kitchen's attention (--use-kitchen-attention)": _is_set(config, "use_kitchen_attention"),
        "CUDA graphs: no GPU has shown yet that its messages can be captured (pass --cuda-graph-impl none)": (
            graphs != "none" or _is_set(config, "enable_cuda_graph", "external_cuda_graph")
        ),
        f"--attention-backend {backend}: legal are auto, flash, fused": backend in ("unfused", "local"),
    }
    what = next((what for what, is_asked in asked.items() if is_asked), None)
    return _latent_refusal(config) if what is None and latent != "off" else what


MASKED_TOKENS = 2**14
"""The longest sequence whose dense attention mask is taken: from there on Megatron's takes 1 GiB a sample."""


def refuse_dense_mask(source: str, tokens: int) -> None:
    """ValueError for an attention mask [tokens, tokens] that is too large; `source` says where it is from."""
    if tokens > MASKED_TOKENS:
        raise ValueError(
            f"{source} asks for a dense mask of {tokens} x {tokens}: burst attention needs none, and takes "
            f"none above {MASKED_TOKENS} tokens: pass --no-create-attention-mask-in-dataloader"
        )


def _latent_refusal(config: Any) -> str | None:
    """Return a requested feature of MLA layers that --burst-mla-latent lacks; None if there is none.

    It takes the input of the layer's up-projection, and the projection's weight as it is in memory.
    """
    selective = getattr(config, "recompute_granularity", None) == "selective"
    recomputed = (getattr(config, "recompute_modules", None) or []) if selective else []
    asked = {
        "layers that have no latent (add --multi-latent-attention)": (
            not _is_set(config, "multi_latent_attention")
        ),
        "fused rope (pass --no-rope-fusion)": (
            _is_set(config, "apply_rope_fusion") and _is_set(config, "multi_latent_attention")
        ),
        "mla_up_proj in --recompute-modules: K and V are not kept anyway": "mla_up_proj" in recomputed,
        "FP8 or FP4 weights": _is_set(config, "fp8", "fp4"),
        "--delay-wgrad-compute": _is_set(config, "delay_wgrad_compute"),
        "Megatron-FSDP (--use-megatron-fsdp)": _is_set(config, "use_megatron_fsdp"),
        "an experimental attention variant": _is_set(config, "experimental_attention_variant"),
    }
    what = next((what for what, is_asked in asked.items() if is_asked), None)
    return None if what is None else f"--burst-mla-latent with {what} (or pass off)"


def configured(
    burst: BurstConfig, config: Any, cp_comm_type: str | None, size: int | None = None
) -> BurstConfig:
    """`burst` with what `config` asks for: determinism, and --cp-comm-type of a layer.

    p2p leaves the way to `burst`; a2a shares all heads, a2a+p2p those of the inner of two hierarchical
    groups, all_gather is the direct exchange. size: of the group, by default the configuration's.

    Raises:
        ValueError: another cp_comm_type, a2a+p2p without hierarchical sizes, or one beside a ring,
            a head_parallel or a head_placement of `burst` that is not its default.
    """
    if getattr(config, "deterministic_mode", False):
        burst = replace(burst, deterministic=True)
    size = getattr(config, "context_parallel_size", 1) if size is None else size
    word = (cp_comm_type or "p2p").lower().replace("_", "")
    if word not in ("p2p", "a2a", "a2a+p2p", "allgather"):
        raise ValueError(f"unknown --cp-comm-type {cp_comm_type}; legal: p2p, a2a, a2a+p2p, all_gather")
    if word == "p2p" or size == 1:
        return burst
    settings = "ring", "head_parallel", "head_placement"
    given = [name for name in settings if getattr(burst, name) != SETTINGS[name].default]
    if given:
        raise ValueError(
            f"--cp-comm-type {cp_comm_type} says how ranks communicate, and so does {flag_of(given[0])} "
            f"{getattr(burst, given[0])}: give one of them"
        )
    if word == "a2a":
        return replace(burst, head_parallel=size)
    if word == "allgather":
        return replace(burst, ring="direct", head_parallel=1)
    sizes = getattr(config, "hierarchical_context_parallel_sizes", None)
    if not sizes:
        raise ValueError("--cp-comm-type a2a+p2p needs --hierarchical-context-parallel-sizes")
    return replace(burst, head_parallel=int(sizes[0]), head_placement="inner")


def layers_comm_types(config: Any) -> list[str | None]:
    """--cp-comm-type as it was given: one for all layers, or one a layer."""
    given = getattr(config, "cp_comm_type", None)
    return list(given) if isinstance(given, list | tuple) and given else [given or None]


def kernel_of(burst: BurstConfig, config: Any, problem: Problem) -> BurstConfig:
    """`burst` with a kernel that --attention-backend and --flash-attention-version allow.

    Raises:
        ValueError: none of them can serve the problem (with its reasons), or `burst` names another kernel.
    """
    flags, allowed = _allowed(burst.kernel, config)
    if not flags or burst.kernel != "auto":
        return burst
    refusals = []
    ranked = [k.name for k in by_rank(problem.device, problem.launches) if k.name in allowed]
    for name in ranked or allowed:
        reason = KERNELS[name].supports(problem)
        if reason is None:
            return replace(burst, kernel=name)
        refusals.append(f"{name}: {reason}")
    raise ValueError(f"{flags}: no kernel serves it ({'; '.join(refusals)})")


def _allowed(kernel: str, config: Any) -> tuple[str, tuple[str, ...]]:
    """Return Megatron's flags that choose kernels, "" if none does, and the names of the kernels they allow.

    A version of flash-attn asks for it; beside --attention-backend fused it says nothing, as in Megatron.

    Raises:
        ValueError: `kernel`, the word of --burst-kernel, is not among them.
    """
    backend, version = _backend(config), getattr(config, "flash_attention_version", None)
    flags, allowed = [], tuple(KERNELS)
    if backend in _BACKENDS:
        flags, allowed = [f"--attention-backend {backend}"], _BACKENDS[backend]
    if version is not None:
        flags.append(f"--flash-attention-version {version}")
        allowed = allowed if backend == "fused" else (f"flash{version}",)
    if kernel not in ("auto", *allowed):
        raise ValueError(f"--burst-kernel {kernel} contradicts {' '.join(flags)}: give one of them")
    return " ".join(flags), allowed


def _is_set(config: Any, *names: str) -> bool:
    return any(getattr(config, name, False) for name in names)


def _backend(config: Any) -> str:
    backend = getattr(config, "attention_backend", None)
    return "auto" if backend is None else str(getattr(backend, "name", backend))


def softmax_offset(config: TransformerConfig, pg_collection: Any) -> Tensor | None:
    """Return the sinks for config.softmax_type, [heads of this rank]; a Parameter if they are learnable.

    The Parameter is marked as dealt over tensor parallelism: norms for clipping have the heads of all ranks.

    Raises:
        ValueError: an unknown type.
    """
    kind = getattr(config, "softmax_type", "vanilla")
    if kind not in SOFTMAX_TYPES:
        raise ValueError(f"burst attention takes softmax_type {', '.join(SOFTMAX_TYPES)}, got {kind!r}")
    if kind == "vanilla":
        return None
    group = getattr(pg_collection, "tp", None) or parallel_state.get_tensor_model_parallel_group()
    heads = config.num_attention_heads // group.size()
    device = torch.cuda.current_device()
    if kind == "off-by-one":
        return torch.zeros(heads, device=device, dtype=config.params_dtype)
    offset = torch.nn.Parameter(torch.empty(heads, device=device, dtype=config.params_dtype))
    set_tensor_model_parallel_attributes(offset, is_parallel=True, dim=0, stride=1)
    if config.perform_initialization:
        config.init_method(offset)
    return offset
