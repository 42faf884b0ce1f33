"""The table of Megatron's settings that burst attention does not support, with reasons and alternatives.

Functions return the rows, one for each subject; `judge` raises the first row that is set. They read the
parsed arguments or, when a model is built, its configuration, with the same names. No Megatron is imported
here.
"""

from __future__ import annotations

from typing import Any

SOFTMAX_TYPES = ("vanilla", "off-by-one", "learnable")
Rows = dict[str, Any]
"""The error (setting, reason, alternative) of each row, and a value that is true if the setting is set."""


class Settings:
    """The fields of arguments or of a configuration, and additional fields; None for a missing field."""

    def __init__(self, source: Any, **beside: Any) -> None:
        self._source, self._beside = source, beside

    def __getattr__(self, name: str) -> Any:
        return self._beside[name] if name in self._beside else getattr(self._source, name, None)

    @property
    def backend(self) -> str:
        """The option of --attention-backend."""
        backend = self.attention_backend
        return "auto" if backend is None else str(getattr(backend, "name", backend))

    @property
    def recomputed(self) -> list[str]:
        """The modules of --recompute-modules, under selective recompute."""
        return (self.recompute_modules or []) if self.recompute_granularity == "selective" else []


def judge(rows: Rows, prefix: str = "") -> None:
    """Raise a ValueError with the error of the first row that is set."""
    for words, is_set in rows.items():
        if is_set:
            raise ValueError(f"{prefix}{words}")


def of_recompute(s: Settings) -> Rows:
    """Return the illegal combinations of recompute flags. `uses_burst`: whether attention is ours."""
    policy, keep, memory = s.burst_recompute, s.burst_recompute_keep, s.burst_recompute_memory_gb
    name, is_kept = f"--burst-recompute {policy}", policy not in (None, "full")
    selects = s.recompute_granularity == "selective" and s.recompute_modules is not None
    return {
        f"--burst-recompute segment and --burst-recompute-keep F go together, got {name} and "
        f"--burst-recompute-keep {keep}: give both or none": (keep is None) == (policy == "segment"),
        "--burst-recompute-keep auto and --burst-recompute-memory-gb GB go together, got "
        f"--burst-recompute-keep {keep} and --burst-recompute-memory-gb {memory}: give both or none": (
            (memory is None) == (keep == "auto")
        ),
        f"--burst-recompute-offload is for --burst-recompute attention or segment: drop it beside {name}": (
            s.burst_recompute_offload and not is_kept
        ),
        f"{name} needs --context-parallel-attention-backend burst: other attention keeps nothing": (
            is_kept and not s.uses_burst
        ),
        f"{name} would have no effect: without --recompute-granularity nothing is checkpointed": (
            is_kept and s.recompute_granularity is None
        ),
        f"{name} would have no effect: add core_attn to --recompute-modules {' '.join(s.recomputed)}": (
            is_kept and selects and "core_attn" not in s.recomputed
        ),
    }


def of_attention(s: Settings) -> Rows:
    """Return the unsupported settings of a layer. `attention_type`: of the layer's constructor."""
    no, graphs = "burst attention does not support", s.cuda_graph_impl or "none"
    kind, softmax = s.attention_type or "self", s.softmax_type or "vanilla"
    return {
        f"{no} attention dropout {s.attention_dropout} (pass --attention-dropout 0)": s.attention_dropout,
        f"{no} FP8 attention, as it computes in q's dtype (leave out fp8_dot_product_attention and "
        "fp8_multi_head_attention)": s.fp8_dot_product_attention or s.fp8_multi_head_attention,
        f"{no} --batch-invariant-mode, as its kernels depend on the batch": s.batch_invariant_mode,
        f"{no} Kitchen's attention (drop --use-kitchen-attention)": s.use_kitchen_attention,
        f"{no} CUDA graphs, as no GPU has shown yet that its messages can be captured (pass "
        "--cuda-graph-impl none)": graphs != "none" or s.enable_cuda_graph or s.external_cuda_graph,
        f"{no} --attention-backend {s.backend}: legal are auto, flash, fused": (
            s.backend in ("unfused", "local")
        ),
        f"{no} softmax_type {softmax!r}: legal are {', '.join(SOFTMAX_TYPES)}": softmax not in SOFTMAX_TYPES,
        f"{no} attention of type {kind!r}: leave Megatron's own core attention there": kind != "self",
        f"{no} --reset-attention-mask: pack the documents (PackedSeqParams)": s.reset_attention_mask,
        f"{no} --flash-decode, which goes past core attention: generate at --context-parallel-size 1": (
            s.flash_decode and s.context_parallel_size > 1
        ),
    }


def of_scripts(s: Settings) -> Rows:
    """Return the settings of Megatron's training scripts that no layer sees, or that layers support."""
    stages = s.pipeline_model_parallel_size or 1
    is_float, largest = not (s.bf16 or s.fp16), s.qk_clip or s.log_max_attention_logit
    documents = s.dataloader_inter_document_masking
    return {
        "Megatron's clip_qk takes a model in half precision, and for --qk-clip whole weights: pass --bf16 or "
        "--fp16, and drop --use-distributed-optimizer": (
            (largest and is_float) or (s.qk_clip and s.use_distributed_optimizer)
        ),
        "--dataloader-inter-document-masking makes one sequence of a micro batch, and stages expect several: "
        f"pass --micro-batch-size 1 with --pipeline-model-parallel-size {stages}": (
            documents and stages > 1 and s.micro_batch_size > 1
        ),
        "--dataloader-inter-document-masking does not go with interleaved pipelines (Megatron's scripts give "
        "no documents to stages in the middle): leave out the virtual stages": (
            documents and s.virtual_pipeline_model_parallel_size
        ),
        "--experimental-attention-variant dsa attends sparsely in every layer, so burst attention has none: "
        "drop one of the flags": s.experimental_attention_variant == "dsa",
    }


def of_latent(s: Settings) -> Rows:
    """Return the settings that exclude --burst-mla-latent, which needs the up-projection's plain weight."""
    no, off = "--burst-mla-latent does not support", "(or pass off)"
    return {
        f"{no} layers that have no latent (add --multi-latent-attention)": not s.multi_latent_attention,
        f"{no} fused rope (pass --no-rope-fusion)": s.apply_rope_fusion,
        f"{no} mla_up_proj in --recompute-modules: K and V are not kept anyway": "mla_up_proj"
        in s.recomputed,
        f"{no} FP8 or FP4 weights {off}": s.fp8 or s.fp4,
        f"{no} --delay-wgrad-compute {off}": s.delay_wgrad_compute,
        f"{no} Megatron-FSDP (--use-megatron-fsdp) {off}": s.use_megatron_fsdp,
        f"{no} an experimental attention variant {off}": s.experimental_attention_variant,
    }


def of_layer(s: Settings, latent: str) -> Rows:
    """Return the unsupported settings of layers. latent: --burst-mla-latent."""
    return of_attention(s) | (of_latent(s) if latent != "off" else {})


def of_fused_loss(s: Settings) -> Rows:
    """Return the settings that exclude the fused loss. `gtp_remat_size`: of the output layer."""
    no = "--burst-fused-loss does not go with"
    return {
        f"{no} --cross-entropy-loss-fusion: both replace the loss, drop one": s.cross_entropy_loss_fusion,
        f"{no} --defer-embedding-wgrad-compute: the gradient of the head is made with the loss, drop one": (
            s.defer_embedding_wgrad_compute
        ),
        f"{no} --overlap-moe-expert-parallel-comm: its schedule calls the head by another way, drop one": (
            s.overlap_moe_expert_parallel_comm
        ),
        f"{no} an output layer that is sharded (gtp_remat)": (s.gtp_remat_size or 1) > 1,
    }


def of_sharding(s: Settings) -> Rows:
    """Return the settings that assume zigzag documents, for another `sharding` (`layouts.Sharding`)."""
    variant = s.experimental_attention_variant
    end = f"assumes documents sharded zigzag, but {s.sharding} is set: {s.sharding.instead()}"
    return {
        f"multi-token prediction (--mtp-num-layers) {end}": s.mtp_num_layers,
        f"fused rope (pass --no-rope-fusion) {end}": s.apply_rope_fusion,
        f"--experimental-attention-variant {variant} {end}": variant,
        f"--sft {end}": s.sft,
    }
