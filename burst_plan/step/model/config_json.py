"""The model that a config.json of Hugging Face describes, if it is a decoder whose layers are predicted."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from burst_plan.step.model.sizes import Model

OTHER_NAMES: dict[str, tuple[str, ...]] = {
    "hidden_size": ("n_embd",),
    "num_attention_heads": ("n_head",),
    "num_hidden_layers": ("n_layer",),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size"),
    "hidden_act": ("activation_function", "activation"),
}
"""Names of the same sizes in older families, such as GPT-2's."""
ATTENTION = ("full_attention", "sliding_attention", "attention")
"""Kinds of layers that are predicted."""
OTHER_LAYERS = (
    "mamba_", "ssm_", "linear_", "conv_", "attn_layer_period", "attn_type_list", "attention_chunk_size",
)  # fmt: skip
"""How names begin that only models with layers of other kinds have."""
FAMILIES: dict[str, dict[str, Any]] = {
    "bloom": {"tie_word_embeddings": True, "hidden_act": "gelu"},
    "cohere": {"tie_word_embeddings": True},
    "cohere2": {"tie_word_embeddings": True, "head_dim": 128, "sliding_window_pattern": 4},
    "exaone4": {"sliding_window_pattern": 4},
    "falcon": {"tie_word_embeddings": True, "hidden_act": "gelu", "multi_query": True},
    "gemma": {"tie_word_embeddings": True, "head_dim": 256},
    "gemma2": {
        "tie_word_embeddings": True, "head_dim": 256, "num_key_value_heads": 4, "sliding_window_pattern": 2,
    },
    "gemma3_text": {
        "tie_word_embeddings": True, "head_dim": 256, "num_attention_heads": 8, "num_key_value_heads": 4,
        "vocab_size": 262208, "sliding_window_pattern": 6,
    },
    "gpt2": {"tie_word_embeddings": True, "hidden_act": "gelu_new"},
    "gpt_bigcode": {"tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh", "multi_query": True},
    "gpt_oss": {"sliding_window_pattern": 2},
    "mixtral": {"num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
    "opt": {"tie_word_embeddings": True, "hidden_act": "relu"},
    "qwen2": {"use_sliding_window": False},
    "qwen2_moe": {"use_sliding_window": False},
    "qwen3": {"head_dim": 128, "use_sliding_window": False},
    "qwen3_moe": {"num_experts_per_tok": 8, "moe_intermediate_size": 768, "use_sliding_window": False},
    "starcoder2": {"tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"},
}  # fmt: skip
"""What a config.json leaves out where it is the default of its model_type in transformers."""


def of_file(path: Path) -> Model:
    """Return the model of a file. Raises ValueError for a file that cannot be read or is no such decoder."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(config, dict) or not isinstance(config.get("text_config") or {}, dict):
            raise ValueError("it and its text_config must be JSON objects")
        return from_config(config.get("text_config") or config, path.parent.name or "model")
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} describes no decoder: {error}") from None


def from_config(config: Mapping[str, Any], name: str) -> Model:
    """Return the model of a Hugging Face configuration.

    Raises:
        ValueError: a size that is missing or not legal, or layers that are not predicted.
    """
    _refuse_others(config)
    kind = str(config.get("model_type", ""))
    config = {**FAMILIES.get(kind, {}), **_named(config)}
    hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    latent = config.get("kv_lora_rank") or 0
    rope = _size(config, "qk_rope_head_dim") if latent else 0
    dim = _size(config, "qk_nope_head_dim") + rope if latent else config.get("head_dim") or hidden // heads
    if not latent and not config.get("head_dim") and hidden % heads:
        raise ValueError(f"{heads} heads do not divide hidden_size {hidden}, and it has no head_dim")
    ffn = config.get("intermediate_size") or 4 * hidden
    layers = _size(config, "num_hidden_layers")
    windowed = _windowed(config, layers)
    return Model(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads if latent else _kv_heads(config, heads),
        head_dim=dim,
        value_dim=config.get("v_head_dim", dim) if latent else dim,
        ffn=ffn,
        vocab=_size(config, "vocab_size"),
        gated=kind.startswith("gemma") or config.get("hidden_act", "silu") in ("silu", "swish"),
        tied=bool(config.get("tie_word_embeddings", False)),
        window=config["sliding_window"] if windowed else 0,
        windowed=windowed,
        q_rank=(config.get("q_lora_rank") or 0) if latent else 0,
        kv_rank=latent,
        rope_dim=rope,
        qk_norm=not latent and kind in ("qwen3", "qwen3_moe", "gemma3_text"),
        **_experts(config, ffn, layers),
    )


def _refuse_others(config: Mapping[str, Any]) -> None:
    """Refuse a model that is no decoder, or has layers besides attention. Raises ValueError."""
    if config.get("is_encoder_decoder"):
        raise ValueError("it is an encoder and a decoder")
    if any(str(made).endswith("ForMaskedLM") for made in config.get("architectures") or ()):
        raise ValueError(f"{', '.join(config['architectures'])} sees tokens on both sides")
    kinds: Iterable[Any] = config.get("layer_types") or config.get("layers_block_type") or ()
    odd = sorted({str(kind) for kind in kinds} - set(ATTENTION))
    odd += [name for name, value in config.items() if value and name.startswith(OTHER_LAYERS)]
    if odd:
        raise ValueError(
            f"layers other than attention over all tokens or a window are not predicted: {odd[0]}"
        )


def _named(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with the usual names of sizes beside those of its family."""
    named = dict(config)
    for usual, others in OTHER_NAMES.items():
        sizes = [config[name] for name in (usual, *others) if config.get(name) is not None]
        named |= {usual: sizes[0]} if sizes else {}
    return named


def _size(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if value is None:
        raise ValueError(f"it has no {name}")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be an integer from 1, got {value!r}")
    return value


def _kv_heads(config: Mapping[str, Any], heads: int) -> int:
    if config.get("new_decoder_architecture"):  # of Falcon
        return _size(config, "num_kv_heads")
    return 1 if config.get("multi_query") else config.get("num_key_value_heads") or heads


def _windowed(config: Mapping[str, Any], layers: int) -> int:
    """Return how many layers see a window of tokens alone."""
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return 0
    if kinds := config.get("layer_types"):
        return sum(kind == "sliding_attention" for kind in kinds)
    every: int = config.get("sliding_window_pattern") or 0
    if every:  # one layer of so many sees all
        return layers - layers // every
    whole: int = config.get("max_window_layers") or 0
    return layers - whole


def _experts(config: Mapping[str, Any], ffn: int, layers: int) -> dict[str, int]:
    """Return the sizes of experts; none of a dense model. Raises ValueError for experts of unknown names."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    experts = next((config[key] for key in names if config.get(key)), 0)
    if not experts:
        unknown = [name for name, n in config.items() if name.endswith("_num_experts") and n and n != 1]
        if unknown:
            raise ValueError(f"experts are read from {', '.join(names)}, not from {unknown[0]}")
        return {}
    width = config.get("moe_intermediate_size") or ffn
    shared = (config.get("n_shared_experts") or 0) * width
    every = config.get("decoder_sparse_step") or config.get("moe_layer_freq") or 1
    first, dense = config.get("first_k_dense_replace") or 0, config.get("mlp_only_layers") or ()
    # Qwen counts layers from 1 where it takes every n-th, DeepSeek from 0.
    begin = 1 if config.get("decoder_sparse_step") else 0
    return {
        "experts": experts,
        "active": config.get("num_experts_per_tok") or 1,
        "expert_ffn": width,
        "shared_ffn": config.get("shared_expert_intermediate_size") or shared,
        "dense_layers": sum(i < first or i in dense or (i + begin) % every > 0 for i in range(layers)),
    }
