"""The sizes of a model: from a preset's name, the config.json of a folder, or Megatron's arguments."""

from __future__ import annotations

import argparse
import ast
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn


@dataclass(frozen=True, kw_only=True)
class Model:
    """A decoder's sizes. Raises ValueError for a size that is not legal."""

    name: str = "model"
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    """Of queries and keys."""
    value_dim: int
    ffn: int
    """Width of a dense MLP."""
    vocab: int
    gated: bool = True
    """Whether an MLP has a gate: three matrices, else two."""
    tied: bool = False
    """Whether embedding and LM head are one matrix."""
    experts: int = 0
    """Routed experts of a layer; 0 for a dense model."""
    active: int = 0
    """Routed experts that serve a token."""
    expert_ffn: int = 0
    shared_ffn: int = 0
    """Width of all shared experts together."""
    dense_layers: int = 0
    """Layers without experts, of a model that has experts."""
    q_rank: int = 0
    """Latent width of queries (MLA); 0: none."""
    kv_rank: int = 0
    """Latent width of keys and values (MLA); 0: no MLA."""
    rope_dim: int = 0
    """Part of `head_dim` that all heads share, of MLA."""
    qk_norm: bool = False
    """Whether each head of queries and of keys has a norm."""

    def __post_init__(self) -> None:
        optional = {"experts", "active", "expert_ffn", "shared_ffn", "dense_layers", "q_rank", "kv_rank"}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type != "int":
                continue
            least = 0 if field.name in optional | {"rope_dim"} else 1
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{field.name} of a model must be an integer from {least}, got {value!r}")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads must divide heads, got {self.kv_heads} and {self.heads}")
        if self.experts and self.dense_layers >= self.layers:
            raise ValueError(f"none of the {self.layers} layers has experts: {self.dense_layers} are dense")
        if self.experts and not (0 < self.active <= self.experts and self.expert_ffn):
            raise ValueError(
                f"a model with {self.experts} experts needs their width and how many serve a token, got "
                f"{self.expert_ffn} and {self.active}"
            )

    @property
    def projections(self) -> int:
        """Parameters of the projections of attention, in a layer."""
        out = self.heads * self.value_dim * self.hidden
        if not self.kv_rank:
            return out + self.hidden * (
                (self.heads + self.kv_heads) * self.head_dim + self.kv_heads * self.value_dim
            )
        queries = self.heads * self.head_dim
        q = self.hidden * queries if not self.q_rank else self.q_rank * (self.hidden + queries)
        up = self.heads * (self.head_dim - self.rope_dim + self.value_dim)
        return out + q + self.hidden * (self.kv_rank + self.rope_dim) + self.kv_rank * up

    def mlp(self, width: int) -> int:
        """Parameters of an MLP of this width."""
        return (3 if self.gated else 2) * self.hidden * width

    @property
    def sparse_layers(self) -> int:
        """Layers with experts."""
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def expert_parameters(self) -> int:
        """Parameters of all routed experts of all layers."""
        return self.sparse_layers * self.experts * self.mlp(self.expert_ffn)

    @property
    def mlp_active(self) -> int:
        """Parameters of the MLPs that serve a token, of all layers."""
        dense = (self.layers - self.sparse_layers) * self.mlp(self.ffn)
        each = self.active * self.mlp(self.expert_ffn) + self.mlp(self.shared_ffn)
        return dense + self.sparse_layers * (each + self.hidden * self.experts)

    @property
    def mlp_first(self) -> float:
        """Those of `mlp_active` that multiply the input of an MLP."""
        return self.mlp_active * (2 / 3 if self.gated else 1 / 2)

    @property
    def head(self) -> int:
        """Parameters of the LM head."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """All parameters."""
        idle = self.sparse_layers * (self.experts - self.active) * self.mlp(self.expert_ffn)
        norms = (2 * self.layers + 1) * self.hidden + self.layers * (
            self.q_rank + self.kv_rank + 2 * self.head_dim * self.qk_norm
        )
        embeddings = self.head * (1 if self.tied else 2)
        return self.layers * self.projections + self.mlp_active + idle + norms + embeddings

    @property
    def width(self) -> int:
        """Columns of the MLPs that a token meets in the widest layer."""
        return max(self.ffn if self.dense_layers or not self.experts else 0,
                   self.active * self.expert_ffn + self.shared_ffn)  # fmt: skip

    def flops(self, keys: float) -> float:
        """Return the FLOPs of a token in training, none recomputed; keys: it attends to, on average."""
        products = self.layers * self.projections + self.mlp_active + self.head
        pairs = self.layers * self.heads * (self.head_dim + self.value_dim) * keys
        return 6.0 * (products + pairs)


def _llama(
    name: str, layers: int, hidden: int, heads: int, kv: int, ffn: int, vocab: int, **more: Any
) -> Model:
    dim = hidden // heads
    return Model(name=name, layers=layers, hidden=hidden, heads=heads, kv_heads=kv, head_dim=dim,
                 value_dim=dim, ffn=ffn, vocab=vocab, **more)  # fmt: skip


def _gpt(name: str, layers: int, hidden: int, heads: int) -> Model:
    return _llama(name, layers, hidden, heads, heads, 4 * hidden, 50304, gated=False, tied=True)


PRESETS = {
    model.name: model
    for model in (
        _llama("7b", 32, 4096, 32, 32, 11008, 32000),
        _llama("14b", 40, 5120, 40, 40, 13824, 120000),
        _llama("llama2-7b", 32, 4096, 32, 32, 11008, 32000),
        _llama("llama3-8b", 32, 4096, 32, 8, 14336, 128256),
        _llama("llama3-70b", 80, 8192, 64, 8, 28672, 128256),
        _llama("llama3-405b", 126, 16384, 128, 8, 53248, 128256),
        _gpt("gpt-2.7b", 32, 2560, 32),
        _gpt("gpt-6.7b", 32, 4096, 32),
        _gpt("gpt-13b", 40, 5120, 40),
        _gpt("gpt-30b", 48, 7168, 64),  # of DeepSpeed's figures, in which 16 ranks share its heads
    )
}
"""7b and 14b are those of the BurstEngine paper, the others as their makers publish them."""


def model_of(text: str) -> tuple[Model, dict[str, Any]]:
    """Return a model, and the settings of parallelism that come with it ("tp", "pp", "cp", "seq").

    text: a preset, a folder with config.json, or Megatron's arguments.

    Raises:
        ValueError: none of these, or sizes that are not legal.
    """
    if text in PRESETS:
        return PRESETS[text], {}
    if text.lstrip().startswith("--"):
        return _of_arguments(shlex.split(text))
    path = Path(text)
    if path.is_dir() and (path / "config.json").is_file():
        return _of_config(path / "config.json"), {}
    raise ValueError(
        f"unknown model {text!r}: give one of {', '.join(PRESETS)}, a folder with config.json, or arguments "
        "of Megatron that begin with --"
    )


def _of_config(path: Path) -> Model:
    try:
        config = json.loads(path.read_text())
        return from_config(config.get("text_config") or config, path.parent.name or "model")
    except KeyError as error:
        raise ValueError(f"{path} describes no decoder: it has no {error.args[0]}") from None
    except (OSError, ArithmeticError, LookupError, AttributeError, TypeError, RecursionError,
            json.JSONDecodeError) as error:  # fmt: skip
        raise ValueError(f"{path} describes no decoder: {type(error).__name__} {error}") from None


def from_config(config: Mapping[str, Any], name: str) -> Model:
    """Return the model of a Hugging Face configuration. Raises KeyError for a size that is missing."""
    kind = str(config.get("model_type", ""))
    config = {**FAMILIES.get(kind, {}), **config}
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    latent = config.get("kv_lora_rank") or 0
    rope = config["qk_rope_head_dim"] if latent else 0
    dim = config["qk_nope_head_dim"] + rope if latent else config.get("head_dim") or hidden // heads
    ffn = config.get("intermediate_size") or 4 * hidden
    return Model(
        name=name,
        layers=config["num_hidden_layers"],
        hidden=hidden,
        heads=heads,
        kv_heads=heads if latent else config.get("num_key_value_heads") or heads,
        head_dim=dim,
        value_dim=config.get("v_head_dim", dim) if latent else dim,
        ffn=ffn,
        vocab=config["vocab_size"],
        gated=kind.startswith("gemma") or config.get("hidden_act", "silu") in ("silu", "swish"),
        tied=bool(config.get("tie_word_embeddings", False)),
        q_rank=(config.get("q_lora_rank") or 0) if latent else 0,
        kv_rank=latent,
        rope_dim=rope,
        qk_norm=not latent and kind in ("qwen3", "qwen3_moe", "gemma3_text"),
        **_experts(config, ffn),
    )


def _experts(config: Mapping[str, Any], ffn: int) -> dict[str, int]:
    """Return the sizes of experts in a Hugging Face configuration; none of a dense model."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    experts = next((config[key] for key in names if config.get(key)), 0)
    if not experts:
        return {}
    width = config.get("moe_intermediate_size") or ffn
    shared = (config.get("n_shared_experts") or 0) * width
    every = config.get("decoder_sparse_step") or config.get("moe_layer_freq") or 1
    first, dense = config.get("first_k_dense_replace") or 0, config.get("mlp_only_layers") or ()
    # Qwen counts layers from 1 where it takes every n-th, DeepSeek from 0.
    begin = 1 if config.get("decoder_sparse_step") else 0
    layers = range(config["num_hidden_layers"])
    return {
        "experts": experts,
        "active": config.get("num_experts_per_tok") or 1,
        "expert_ffn": width,
        "shared_ffn": config.get("shared_expert_intermediate_size") or shared,
        "dense_layers": sum(i < first or i in dense or (i + begin) % every > 0 for i in layers),
    }


MOST_LAYERS = 4096
"""The largest number in a pattern of layers."""
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma": {"tie_word_embeddings": True, "head_dim": 256},
    "gemma2": {"tie_word_embeddings": True, "head_dim": 256, "num_key_value_heads": 4},
    "gemma3_text": {
        "tie_word_embeddings": True, "head_dim": 256, "num_attention_heads": 8, "num_key_value_heads": 4,
        "vocab_size": 262208,
    },
    "cohere": {"tie_word_embeddings": True},
    "cohere2": {"tie_word_embeddings": True, "head_dim": 128},
    "starcoder2": {"tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"},
    "qwen3": {"head_dim": 128},
    "mixtral": {"num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts_per_tok": 8, "moe_intermediate_size": 768},
}  # fmt: skip
"""Sizes that a config.json leaves out where they are the defaults of its model_type in transformers."""


class Arguments(argparse.ArgumentParser):
    """A parser of Megatron's arguments that raises ValueError."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"Megatron's arguments: {message}")


def _of_arguments(words: list[str]) -> tuple[Model, dict[str, Any]]:
    """Return the model of Megatron's arguments; flags that say nothing of sizes are left out."""
    parser = Arguments(add_help=False, allow_abbrev=False)
    for flag in ("num-layers", "hidden-size", "num-attention-heads"):
        parser.add_argument(f"--{flag}", type=int, required=True)
    for flag, value in _OPTIONAL.items():
        parser.add_argument(f"--{flag}", type=int, default=value)
    for flag in ("swiglu", "group-query-attention", "untie-embeddings-and-output-weights",
                 "multi-latent-attention", "qk-layernorm"):  # fmt: skip
        parser.add_argument(f"--{flag}", action="store_true")
    parser.add_argument("--moe-layer-freq", default="1")
    a = parser.parse_known_args(words)[0]
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


def _check(a: argparse.Namespace) -> None:
    """Refuse arguments that are missing, not legal, or contradict each other. Raises ValueError."""
    if a.vocab_size is None and a.padded_vocab_size is None:
        raise ValueError("Megatron's arguments name no --vocab-size: the size of the LM head is unknown")
    for name, value in vars(a).items():
        if isinstance(value, int) and not isinstance(value, bool) and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
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


_OPTIONAL: dict[str, int | None] = {
    "num-query-groups": None,
    "kv-channels": None,
    "ffn-hidden-size": None,
    "vocab-size": None,
    "padded-vocab-size": None,
    "num-experts": None,
    "moe-router-topk": 2,
    "moe-ffn-hidden-size": None,
    "moe-shared-expert-intermediate-size": None,
    "q-lora-rank": None,
    "kv-lora-rank": 32,
    "qk-head-dim": 128,
    "qk-pos-emb-head-dim": 64,
    "v-head-dim": 128,
    "tensor-model-parallel-size": None,
    "pipeline-model-parallel-size": None,
    "context-parallel-size": None,
    "expert-model-parallel-size": None,
    "expert-tensor-parallel-size": None,
    "seq-length": None,
    "micro-batch-size": None,
    "global-batch-size": None,
}
"""Flags of Megatron that tell sizes or degrees, and its defaults."""
