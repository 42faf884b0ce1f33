"""The model that a config.json of Hugging Face describes, if it is a supported decoder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from burst_plan.step.model.mixers import BUILD, NONE, Mixer
from burst_plan.step.model.sizes import Model

_TABLES = json.loads(files("burst_plan.step.model").joinpath("families.json").read_text(encoding="utf-8"))
OTHER_NAMES: dict[str, list[str]] = _TABLES["names"]
"""Names of the same sizes in other families, such as GPT-2's."""
FAMILIES: dict[str, dict[str, Any]] = _TABLES["defaults"]
"""By model_type: defaults of transformers for missing keys, and facts that no key states: norms of heads,
gates, and the mixer of a hybrid model."""
MIXERS: dict[str, list[str]] = _TABLES["mixers"]
"""The names of its sizes, by mixer."""
ATTENTION = ("full_attention", "sliding_attention", "attention", "hybrid")
MIXING = ("linear_attention", "mamba", "conv", "recurrent", "hybrid")
"""In a hybrid layer attention and a recurrence stand side by side."""
ALONE = ("mlp", "moe")
"""Layers without a mixer, in models whose other layers have no MLP."""
LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}  # of Nemotron-H's pattern
OTHER_LAYERS = ("mamba_", "ssm_", "linear_", "conv", "lru_", "attn_layer_", "attn_type_", "attention_chunk_")
"""Prefixes of names that only models with other kinds of layers have."""


def of_file(path: Path) -> Model:
    """Return the model of a file. Raises ValueError for an unreadable file or an unsupported model."""
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
        ValueError: a size that is missing or illegal, or unsupported layers.
    """
    kind = str(config.get("model_type", ""))
    family = FAMILIES.get(kind, {})
    sizes, config = config, {**family, **_named(config, family.get("names", {}))}
    kinds = _kinds(config)
    _refuse_others(sizes, kinds, "mixer" in config)
    kinds = [part for kind in kinds for part in config.get("stands_for", {}).get(kind, [kind])]
    hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    latent = config.get("kv_lora_rank") or 0
    rope = _size(config, "qk_rope_head_dim") if latent else 0
    dim = _size(config, "qk_nope_head_dim") + rope if latent else config.get("head_dim") or hidden // heads
    if not latent and not config.get("head_dim") and hidden % heads:
        raise ValueError(f"{heads} heads do not divide hidden_size {hidden}, and it has no head_dim")
    layers = len(kinds) or _size(config, "num_hidden_layers")
    bare = config.get("no_mlp") or {*kinds} & {*ALONE}
    experts = _experts(config, kinds, layers)
    attending = sum(each in ATTENTION for each in kinds) if kinds else layers
    windowed, ffn = _windowed(config, kinds, attending), _width(config, bool(experts))
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
        gated=kind.startswith("gemma")
        or config.get("gated", config.get("hidden_act", "silu") in ("silu", "swish")),
        tied=bool(config.get("tie_word_embeddings", False)),
        window=config["sliding_window"] if windowed else 0,
        windowed=windowed,
        q_rank=(config.get("q_lora_rank") or 0) if latent else 0,
        kv_rank=latent,
        rope_dim=rope,
        qk_norm=not latent and bool(config.get("qk_norm")),
        gates=dim if config.get("attn_output_gate") else int(bool(config.get("use_attention_gate"))),
        sandwich=bool(config.get("use_sandwich_norm")),
        biases=bool(config.get("biases")) * (layers * (2 * ffn + hidden) + attending * hidden),
        shared_gate=bool(config.get("shared_gate")),
        without_attention=layers - attending,
        without_mlp=sum(each not in ALONE for each in kinds) if bare else 0,
        mixer=_mixer({**config, "head_dim": dim}, sum(each in MIXING for each in kinds)),
        **experts,
        **_shared(config, attending),
    )


def _shared(config: Mapping[str, Any], attending: int) -> dict[str, int]:
    """Return the sizes of attention and MLP that layers share in turn, as in Zamba; {} for other models."""
    if "stands_for" not in config:
        return {}
    hidden, wide = (_size(config, name) for name in ("hidden_size", "attention_hidden_size"))
    adapters = (
        hidden + 2 * _width(config, False) + 6 * wide * bool(config.get("use_shared_attention_adapter"))
    )
    return {
        "copies": min(attending, config.get("num_mem_blocks") or 1) * bool(config["tie_word_embeddings"]),
        "wider": wide - hidden,
        "beside": hidden**2 + (config.get("adapter_rank") or 0) * adapters,
    }


def _kinds(config: Mapping[str, Any]) -> list[str]:
    """Return the kind of each layer; [] if a configuration that is not hybrid names no kinds: all attend."""
    layers = config.get("num_hidden_layers") or 0
    kinds = config.get("layer_types") or config.get("layers_block_type")
    if not kinds and (pattern := config.get("hybrid_override_pattern")):
        kinds = [LETTERS.get(letter, letter) for letter in pattern]
    if not kinds and (blocks := config.get("block_types")):  # a pattern that repeats
        kinds = [blocks[i % len(blocks)] for i in range(layers)]
    if kinds:
        return [str(kind) for kind in kinds]
    every, nested = config.get("full_attention_interval"), config.get("linear_attn_config")
    if every:
        attending = [*range(config.get("attn_layer_offset", every - 1), layers, every)]
    elif nested:  # Kimi counts from 1
        attending = [number - 1 for number in nested["full_attn_layers"]]
    else:
        attending = config.get("attn_layer_indices") or config.get("full_attn_idxs") or []
    if "mixer" in config and not attending:
        raise ValueError("it does not say which layers have attention")
    return ["attention" if i in attending else MIXING[0] for i in range(layers if "mixer" in config else 0)]


def _mixer(config: Mapping[str, Any], layers: int) -> Mixer:
    """Return the layers with a recurrence or a convolution."""
    if not layers:
        return NONE
    kind = config["mixer"]
    flags = ("_bias", "_norm", "_gates")
    sizes = [bool(config.get(x)) if x.endswith(flags) else _size(config, x) for x in MIXERS[kind]]
    return replace(BUILD[kind](*sizes), kind=kind, layers=layers)


def _refuse_others(config: Mapping[str, Any], kinds: Sequence[str], hybrid: bool) -> None:
    """Check that a model is a decoder with supported layers only. Raises ValueError."""
    if config.get("is_encoder_decoder"):
        raise ValueError("it is an encoder and a decoder")
    if any(str(architecture).endswith("ForMaskedLM") for architecture in config.get("architectures") or ()):
        raise ValueError(f"{', '.join(config['architectures'])} sees tokens on both sides")
    supported = {*ATTENTION, *MIXING, *ALONE} if hybrid else {*ATTENTION} - {*MIXING}
    unknown = sorted({*kinds} - supported)
    unknown += [
        name for name, value in config.items() if value and name.startswith(OTHER_LAYERS) and not hybrid
    ]
    if unknown:
        hybrids = ", ".join(family for family, defaults in FAMILIES.items() if "mixer" in defaults)
        raise ValueError(
            "layers other than attention over all tokens or a window, and the recurrences or convolutions "
            f"of {hybrids}, are not predicted: {unknown[0]}"
        )
    if kinds and config.get("num_hidden_layers") not in (None, len(kinds)):
        raise ValueError(f"it names the kinds of {len(kinds)} layers, and has {config['num_hidden_layers']}")


def _named(config: Mapping[str, Any], names: dict[str, list[str]]) -> dict[str, Any]:
    """Return a configuration with the usual names of sizes next to its own; names: this family's."""
    sizes_by_name = dict(config)
    sizes_by_name["mamba_inner"] = (config.get("mamba_expand") or 0) * (config.get("hidden_size") or 0)
    for usual, others in (OTHER_NAMES | names).items():
        sizes = [config[name] for name in (usual, *others) if config.get(name) is not None]
        sizes_by_name |= {usual: sizes[0]} if sizes else {}
    for name, size in (config.get("linear_attn_config") or {}).items():  # Kimi's file
        sizes_by_name[f"linear_{name.removeprefix('short_').replace('kernel_size', 'kernel_dim')}"] = size
    return sizes_by_name


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


def _width(config: Mapping[str, Any], experts: bool) -> int:
    """Return the width of a dense MLP, under the names and rules of some families."""
    width: int = config.get("intermediate_size") or 4 * _size(config, "hidden_size")
    if not experts:
        width = config.get("shared_intermediate_size") or width
    width //= config.get("intermediate_shares") or 1
    if config.get("block_auto_adjust_ff_dim"):  # LFM2
        step = config.get("block_multiple_of") or 1
        return -(-int((config.get("block_ffn_dim_multiplier") or 1.0) * int(2 * width / 3)) // step) * step
    return width


def _windowed(config: Mapping[str, Any], kinds: Sequence[str], layers: int) -> int:
    """Return the number of attention layers with a window."""
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return 0
    if config.get("layer_types"):
        return kinds.count("sliding_attention")
    if every := int(config.get("sliding_window_pattern") or 0):  # one layer of so many has no window
        return layers - layers // every
    return layers - int(config.get("max_window_layers") or 0)


def _experts(config: Mapping[str, Any], kinds: Sequence[str], layers: int) -> dict[str, int]:
    """Return the sizes of experts; {} for a dense model. Raises ValueError for experts of unknown names."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    experts = next((config[key] for key in names if config.get(key)), 0)
    if "mlp" in kinds and "moe" not in kinds:
        return {}
    if not experts:
        unknown = [name for name, n in config.items() if name.endswith("_num_experts") and n and n != 1]
        if unknown:
            raise ValueError(f"experts are read from {', '.join(names)}, not from {unknown[0]}")
        return {}
    width = config.get("moe_intermediate_size") or _width(config, True)
    shared = config.get("shared_expert_intermediate_size") or (config.get("n_shared_experts") or 0) * width
    return {
        "experts": experts,
        "active": config.get("num_experts_per_tok") or 1,
        "expert_ffn": width,
        "shared_ffn": shared,
        "dense_layers": _dense(config, kinds, layers),
    }


def _dense(config: Mapping[str, Any], kinds: Sequence[str], layers: int) -> int:
    """Return the number of dense layers in a model with experts."""
    if "moe" in kinds:
        return layers - kinds.count("moe")
    if types := config.get("mlp_layer_types"):
        return int(types.count("dense"))
    every = config.get("decoder_sparse_step") or config.get("moe_layer_freq") or 1
    first, dense = config.get("first_k_dense_replace") or 0, config.get("mlp_only_layers") or ()
    # Qwen counts layers from 1, if it takes every n-th, DeepSeek from 0, Jamba from an offset.
    begin = 1 if config.get("decoder_sparse_step") else -config.get("expert_layer_offset", 0)
    return sum(i < first or i in dense or (i + begin) % every > 0 for i in range(layers))
