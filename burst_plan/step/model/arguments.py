"""The model that Megatron's arguments describe, and their degrees of parallelism."""

from __future__ import annotations

import argparse
import ast
import shlex
from typing import Any, NoReturn

from burst_plan.step.model.sizes import Model

MOST_LAYERS = 4096
"""The largest number in a pattern of layers."""


class ArgumentParser(argparse.ArgumentParser):
    """A parser of Megatron's arguments that raises ValueError."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"Megatron's arguments: {message}")


def of_arguments(text: str) -> tuple[Model, dict[str, Any]]:
    """Return the model of Megatron's arguments; flags without sizes are ignored."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in ("num-layers", "hidden-size", "num-attention-heads"):
        parser.add_argument(f"--{flag}", type=int, required=True)
    for flag, value in OPTIONAL.items():
        parser.add_argument(f"--{flag}", type=int, default=value)
    for flag in ("swiglu", "group-query-attention", "untie-embeddings-and-output-weights",
                 "multi-latent-attention", "qk-layernorm"):  # fmt: skip
        parser.add_argument(f"--{flag}", action="store_true")
    parser.add_argument("--moe-layer-freq", default="1")
    parser.add_argument("--hybrid-layer-pattern", "--hybrid-override-pattern")
    a = parser.parse_known_args(_words(text))[0]
    _check(a)
    latent = a.multi_latent_attention
    dim = (
        a.qk_head_dim + a.qk_pos_emb_head_dim
        if latent
        else (a.kv_channels or a.hidden_size // a.num_attention_heads)
    )
    ffn = a.ffn_hidden_size or (int(4 * a.hidden_size * 2 / 3) // 64 * 64 if a.swiglu else 4 * a.hidden_size)
    model = Model(
        name="megatron",
        layers=a.num_layers,
        hidden=a.hidden_size,
        heads=a.num_attention_heads,
        kv_heads=(a.num_query_groups or 1) if a.group_query_attention else a.num_attention_heads,
        head_dim=dim,
        value_dim=a.v_head_dim if latent else dim,
        ffn=ffn,
        vocab=a.padded_vocab_size or a.vocab_size,
        gated=a.swiglu,
        tied=not a.untie_embeddings_and_output_weights,
        experts=a.num_experts or 0,
        active=a.moe_router_topk if a.num_experts else 0,
        expert_ffn=(a.moe_ffn_hidden_size or ffn) if a.num_experts else 0,
        shared_ffn=(a.moe_shared_expert_intermediate_size or 0) if a.num_experts else 0,
        dense_layers=_without_experts(a.moe_layer_freq, a.num_layers) if a.num_experts else 0,
        q_rank=(a.q_lora_rank or 0) if latent else 0,
        kv_rank=a.kv_lora_rank if latent else 0,
        rope_dim=a.qk_pos_emb_head_dim if latent else 0,
        qk_norm=a.qk_layernorm and not latent,
    )
    pinned = {"tp": a.tensor_model_parallel_size, "pp": a.pipeline_model_parallel_size,
              "cp": a.context_parallel_size, "ep": a.expert_model_parallel_size, "seq": a.seq_length,
              "batch": a.global_batch_size}  # fmt: skip
    return model, {name: value for name, value in pinned.items() if value is not None}


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ValueError(f"Megatron's arguments: {error}") from None


def _check(a: argparse.Namespace) -> None:
    """Check for arguments that are missing, illegal or contradictory. Raises ValueError."""
    if a.vocab_size is None and a.padded_vocab_size is None:
        raise ValueError("Megatron's arguments name no --vocab-size: the size of the LM head is unknown")
    if a.hybrid_layer_pattern is not None:
        raise ValueError(f"--hybrid-layer-pattern {a.hybrid_layer_pattern} is not planned: give layers alike")
    for name, value in vars(a).items():
        if isinstance(value, int) and not isinstance(value, bool) and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if a.kv_channels is None and not a.multi_latent_attention and a.hidden_size % a.num_attention_heads:
        raise ValueError(
            f"--num-attention-heads {a.num_attention_heads} does not divide --hidden-size {a.hidden_size}: "
            "give --kv-channels"
        )
    if a.num_query_groups not in (None, a.num_attention_heads) and not a.group_query_attention:
        raise ValueError("--num-query-groups has no effect without --group-query-attention: give both")
    if a.num_experts is None and (a.expert_model_parallel_size or 1) > 1:
        raise ValueError(
            f"--expert-model-parallel-size {a.expert_model_parallel_size} needs --num-experts: there are none"
        )
    tp = a.tensor_model_parallel_size or 1
    if a.expert_tensor_parallel_size not in (None, tp):
        raise ValueError(
            f"--expert-tensor-parallel-size {a.expert_tensor_parallel_size} is not planned: experts share TP "
            f"{tp} with the other matrices"
        )
    if a.micro_batch_size not in (None, 1):
        raise ValueError(f"--micro-batch-size {a.micro_batch_size} is not planned: 1 sequence is")


def _without_experts(pattern: str, layers: int) -> int:
    """Return the layers without experts, by --moe-layer-freq: N, or a list such as [0]*3+[1]*58."""
    try:
        bits = _evaluated(ast.parse(pattern.strip(), mode="eval").body)
    except (SyntaxError, ValueError, TypeError, RecursionError):
        bits = None
    if isinstance(bits, int) and bits > 0:
        return sum(i % bits > 0 for i in range(layers))
    if isinstance(bits, list) and len(bits) == layers and {*bits} <= {0, 1}:
        return bits.count(0)
    raise ValueError(
        f"--moe-layer-freq is a number, or a list of 0 and 1 for {layers} layers such as [0]*3+[1]*5, got "
        f"{pattern!r}"
    )


def _evaluated(node: ast.expr) -> Any:
    """Return the value of integers, lists, sums and products. Raises ValueError for other expressions."""
    match node:
        case ast.Constant(value=int(number)) if 0 <= number <= MOST_LAYERS:
            return number
        case ast.List(elts=elements):
            return [_evaluated(element) for element in elements]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _evaluated(left) + _evaluated(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _evaluated(left) * _evaluated(right)
    raise ValueError("no such expression")


_WITHOUT_DEFAULT = """num-query-groups kv-channels ffn-hidden-size vocab-size padded-vocab-size num-experts
q-lora-rank moe-ffn-hidden-size moe-shared-expert-intermediate-size tensor-model-parallel-size seq-length
pipeline-model-parallel-size context-parallel-size expert-model-parallel-size expert-tensor-parallel-size
micro-batch-size global-batch-size"""
OPTIONAL: dict[str, int | None] = {
    **dict.fromkeys(_WITHOUT_DEFAULT.split()),
    "moe-router-topk": 2,
    "kv-lora-rank": 32,
    "qk-head-dim": 128,
    "qk-pos-emb-head-dim": 64,
    "v-head-dim": 128,
}
"""Flags of Megatron with sizes or degrees, and its defaults."""
