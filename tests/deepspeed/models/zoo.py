"""Every causal LM that transformers names, tiny: is it the same over a CP group, or unsupported?"""

from __future__ import annotations

import copy
import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "helpers"))  # as a program

import torch
import torch.distributed as dist
from causal_lms import drawn
from ranks import processes
from transformers import AutoModelForCausalLM
from transformers import __version__ as VERSION  # noqa: N812
from transformers.configuration_utils import ALLOWED_ATTN_LAYER_TYPES, ALLOWED_MLP_LAYER_TYPES
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from burst_mcore.deepspeed.groups import unit_of
from burst_mcore.deepspeed.initialize import prepare_for_engine
from burst_mcore.deepspeed.section import KEY, section_of
from burst_mcore.transformers.data.loader import ShardedLoader
from burst_mcore.transformers.errors import UnsupportedError
from burst_mcore.transformers.models.supported import types_of, use_burst

NAMES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
TOKENS, ROWS, VOCABULARY = 64, 2, 80

ALIKE: dict[int, str] = {
    32: "hidden_size n_embd d_model dim embedding_size input_embedding_size d_embed hidden_dim",
    2: "num_hidden_layers n_layer n_layers num_layers num_key_value_heads num_kv_heads num_experts_per_tok "
    "swa_num_key_value_heads num_global_key_value_heads moe_k moe_topk top_k_experts moe_top_k "
    "linear_num_key_heads n_groups mamba_n_groups",
    1: "decoder_layers encoder_layers num_decoder_layers num_encoder_layers n_group topk_group "
    "n_shared_experts num_shared_experts moe_num_shared_experts first_k_dense_replace",
    4: "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads "
    "swa_num_attention_heads num_experts num_local_experts n_routed_experts moe_num_experts qk_rope_head_dim "
    "linear_num_value_heads linear_num_heads",
    8: "head_dim global_head_dim kv_channels swa_head_dim d_head d_kv attention_head_dim q_lora_rank "
    "kv_lora_rank qk_nope_head_dim v_head_dim swa_v_head_dim hidden_size_per_layer_input linear_key_head_dim "
    "linear_value_head_dim linear_head_dim mamba_n_heads mamba_num_heads mamba_head_dim",
    12: "qk_head_dim",
    48: "intermediate_size n_inner ffn_dim d_inner ffn_hidden_size d_ff dff",
    16: "decoder_ffn_dim encoder_ffn_dim moe_intermediate_size expert_ffn_hidden_size sliding_window "
    "window_size shared_expert_intermediate_size moe_shared_expert_intermediate_size sliding_window_size "
    "state_size ssm_state_size mamba_d_state mamba_chunk_size chunk_size",
    64: "mamba_d_ssm",
    512: "max_position_embeddings n_positions n_ctx max_seq_len max_source_positions",
    VOCABULARY: "vocab_size vocab_size_per_layer_input",
}
SIZES: dict[str, Any] = {
    **{name: size for size, names in ALIKE.items() for name in names.split()},
    "num_kv_shared_layers": 0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "is_decoder": True,
    "use_cache": False,
    "use_sliding_window": True,
    "mlp_only_layers": [0],
    "num_dense_layers": 1,
    "moe_layer_start_index": 1,
    "no_rope_layer_interval": 2,
    "cross_attention_layers": [1],
}  # fmt: skip
"""What configurations are given of the keys that they have; every key that drops something is 0."""
TOWER = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
"""The sizes of a tower."""
LATENT = {"num_key_value_heads": 4, "head_dim": 4}
"""Multi-head latent attention: as many K/V heads as heads, and positions in a head's rotary part."""
PARTICULAR: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "deepseek_v3", "longcat_flash", "minicpm3", "sarvam_mla", "youtu"), LATENT),
    "kimi_linear": {**LATENT, "num_experts_per_tok": 2},
    "bailing_hybrid": {**LATENT, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    **{name: {"rotary_dim": 4} for name in ("codegen", "gptj")},
    "glm4_moe_lite": LATENT,
    "deepseek_v2": {**LATENT, "num_experts_per_tok": 2, "topk_method": "greedy"},
    "gemma4": {"per_layer_config": None, "use_bidirectional_attention": "vision"},
    **{name: {"per_layer_config": None} for name in ("gemma4_unified", "gemma4_unified_text")},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "gemma4_text": {"num_kv_shared_layers": 1, "num_hidden_layers": 4, "layer_types": [
        "sliding_attention", "full_attention", "sliding_attention", "full_attention"]},
    "roc_bert": {"shape_embed_dim": 8, "pronunciation_embed_dim": 8, "shape_vocab_size": 90,
                 "pronunciation_vocab_size": 90},
    "xlm": {"emb_dim": 32, "n_words": VOCABULARY},
    "reformer": {"axial_pos_embds_dim": [8, 24]},
    "zaya": {"num_experts_per_tok": 1},
    "llama4_text": {"attention_chunk_size": 16, "floor_scale": 8, "attn_scale": 0.5},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    **{name: {"layers_block_type": ["linear_attention", "hybrid"]} for name in ("zamba", "zamba2")},
    "nemotron_h": {"layers_block_type": ["linear_attention", "full_attention", "mlp", "moe"]},
    "cohere_compass_text": {"rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": 10000.0}
        for kind in ("full_attention", "sliding_attention")}},
    "dots3_note_text": {"num_key_value_heads": 4},
}  # fmt: skip
"""By name: what a configuration needs besides, to be built as small."""


TOWERS = {
    "gemma3": {"vision_config": TOWER},
    "got_ocr2": {"vision_config": {**TOWER, "image_size": 64, "mlp_dim": 16, "output_channels": 16}},
    "moss_transcribe_diarize": {"audio_config": TOWER},
}
"""Towers of models that are compared without pictures or sound."""
RANDOM = ("phimoe",)
"""Models whose experts are drawn at random in training: compared in evaluation."""


def config_of(name: str) -> Any:
    """The tiny configuration of a name."""
    kind = CONFIG_MAPPING[name]
    own = kind()
    text = own.get_text_config()
    particular = PARTICULAR.get(name, {})
    settings = sizes_of(text) | particular
    if text is own:
        return kind(**settings)
    where = next(key for key, value in vars(own).items() if value is text)
    return kind(**{where: {**text.to_dict(), **settings}, **TOWERS.get(name, {})})


def sizes_of(config: Any) -> dict[str, Any]:
    """Of what a configuration has: small sizes, layers of every kind, and nothing at random."""
    sizes = {key: value for key, value in SIZES.items() if _has(config, key)}
    random = [key for key in vars(config) if "drop" in key or "jitter" in key]
    sizes |= {key: 0.0 for key in random if isinstance(getattr(config, key), float)}
    return sizes | _layers(config)


def _layers(config: Any) -> dict[str, Any]:
    """Layers of every kind that a model has, of attention and of MLPs; {} if they have no kinds.

    Defaults of a configuration may lack a kind that the published models have.
    """
    keys = {"layer_types": ALLOWED_ATTN_LAYER_TYPES, "mlp_layer_types": ALLOWED_MLP_LAYER_TYPES}
    kinds = {key: _kinds(config, key, legal) for key, legal in keys.items() if key in vars(config)}
    every = {key: named for key, named in kinds.items() if named}
    if not every:
        return {}
    layers = max(2, *map(len, every.values()))
    sharded = {key: [named[i % len(named)] for i in range(layers)] for key, named in every.items()}
    sliding = any("sliding" in kind for kind in sharded.get("layer_types", ()))
    window = {"sliding_window": 16} if sliding else {}
    return {**sharded, **window, "num_hidden_layers": layers}


def _kinds(config: Any, key: str, legal: tuple[str, ...]) -> list[str]:
    """The kinds of layers of its defaults, and those that the code of its configuration or model names."""
    module = type(config).__module__
    for name in (module, module.replace(".configuration_", ".modeling_")):
        words = set(re.findall(r'"(\w+)"', inspect.getsource(importlib.import_module(name))))
        named = [kind for kind in legal if kind in words]
        if named:
            break
    return list(dict.fromkeys([*(getattr(config, key) or ()), *named]))


def _has(config: Any, key: str) -> bool:
    """Whether a configuration has a key that is set, and is no other's name."""
    return key in vars(config) and (
        vars(config)[key] is not None or key in ("head_dim", "num_key_value_heads")
    )


def outcomes(rank: int, size: int, names: tuple[str, ...]) -> dict[str, tuple[str, str]]:
    """Of each name (outcome, words): equal, wrong, unsupported, crashed, not built."""
    torch.manual_seed(1)
    torch.use_deterministic_algorithms(False)  # several models have operators that have no other way
    ids = torch.randint(3, VOCABULARY, (ROWS, TOKENS))
    labels = ids.masked_fill(torch.rand(ROWS, TOKENS) < 0.3, -100)
    labels[0, : TOKENS * 3 // 4] = -100
    batch = {"input_ids": ids, "labels": labels}
    return {name: _outcome(name, batch) for name in names}


def model_of(name: str) -> Any:
    """The tiny model of a name, with the same random weights on every rank."""
    config = config_of(name)
    _refuse_large(config)
    torch.manual_seed(2)
    model = drawn(AutoModelForCausalLM.from_config(config, attn_implementation="eager"))
    model.train(name not in RANDOM)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def _outcome(name: str, batch: dict[str, Any]) -> tuple[str, str]:
    try:
        model = model_of(name)
    except Exception as error:
        return _as_it_is(name, error)
    other = copy.deepcopy(model)
    try:
        use_burst(other, 2)
    except UnsupportedError as error:
        return "unsupported", str(error)
    batch = batch | {name: blocks() for name in (types_of(model),) if name}
    try:
        want = model(**batch).loss
        want.backward()
    except Exception as error:
        return "not built", f"the plain model fails: {type(error).__name__}: {str(error)[:200]}"
    try:
        found = sharded(other, batch)
    except UnsupportedError as error:
        return "unsupported", str(error)
    except Exception as error:
        return "crashed", f"{type(error).__name__}: {str(error)[:300]}"
    loss, error = abs(found.item() / want.item() - 1), worst(other, model)
    return ("equal" if loss < 1e-4 and error < 2e-4 else "wrong"), f"loss {loss:.1e}, gradients {error:.1e}"


def blocks() -> torch.Tensor:
    """Types of tokens [rows, tokens], of which some models make their masks: those of two images, or of one.

    Where the type means a prefix, the prefix of the first row has two parts.
    """
    types = torch.zeros(ROWS, TOKENS, dtype=torch.int64)
    types[0, 3:21] = types[0, 25:34] = types[1, 30:61] = 1
    return types


def sharded(model: Any, batch: dict[str, Any], **section: Any) -> torch.Tensor:
    """The loss over a CP group of all ranks, and gradients averaged over it."""
    unit = unit_of(dist.get_world_size())
    sequence = prepare_for_engine(model, section_of({KEY: section}), unit)
    loader = ShardedLoader([batch], group=sequence.group, **sequence.sharding)
    (part,) = loader
    loss: torch.Tensor = model(**part).loss
    loss.backward()
    average_gradients(model)
    return loss


def average_gradients(model: Any) -> None:
    """Average the gradients of all ranks; one that a rank has not is 0."""
    for p in model.parameters():
        if p.requires_grad:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


def worst(found: Any, want: Any) -> float:
    """The largest error of a gradient of a model, from those of another."""
    ours, theirs = dict(found.named_parameters()), dict(want.named_parameters())
    return max(_error(ours[key].grad, p.grad) for key, p in theirs.items() if p.grad is not None)


def _error(found: torch.Tensor, want: torch.Tensor) -> float:
    """The largest difference, relative to the largest entry; 0 where there is nothing but rounding."""
    largest = float(want.abs().max())
    return 0.0 if largest < 1e-6 else float((found - want).abs().max()) / largest


def _refuse_large(config: Any) -> None:
    """ValueError for a configuration that is not tiny: without allocating anything."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    count = sum(p.numel() for p in model.parameters())
    if count > 3e6:
        largest = max(model.named_parameters(), key=lambda item: item[1].numel())
        raise ValueError(f"{count:.3g} parameters, of which {largest[0]} {tuple(largest[1].shape)}")


def _as_it_is(name: str, error: Exception) -> tuple[str, str]:
    """Of a model that does not fit into a tiny configuration: whether it is unsupported at full size."""
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[name](), attn_implementation="eager")
        use_burst(model, 2)
    except UnsupportedError as refusal:
        return "unsupported", str(refusal)
    except Exception as again:
        return "not built", f"{type(again).__name__}: {str(again)[:200]}"
    return "not built", f"{type(error).__name__}: {str(error)[:200]}"


WITH_IMAGES = "\n## Image-text models, with images\n"
"""The heading of the part of the page that another script (tests/vision/zoo_of_images.py) is about."""


def page(found: dict[str, tuple[str, str]]) -> str:
    """The outcomes as a page of the docs."""
    equal = [name for name, (outcome, _) in found.items() if outcome == "equal"]
    lines = [
        "# Causal LMs of transformers, one by one",
        "",
        "Check whether burst can train your model. A slow test compares this page with new results;",
        "`python tests/deepspeed/models/zoo.py docs/frameworks/models.md` makes it again.",
        "",
        f"The page covers all {len(found)} names of `AutoModelForCausalLM` in transformers {VERSION}.",
        "Each model is tiny, has random weights, and a layer of every kind that its code in transformers",
        "names. It runs in float32 on 2 rows of 64 tokens with unequal labels: on 2 processes that share",
        "each sequence, and in one process with eager attention. Models that make their masks of types of",
        "tokens get types: tokens of images, or of a prefix. Pictures are below.",
        "",
        f"**Equal ({len(equal)}):** losses agree to 1e-4, every gradient to 2e-4 of its largest entry.",
        "",
        ", ".join(f"`{name}`" for name in equal),
        "",
        "**Unsupported**: an error in preparation; for a mask, or attention elsewhere, in the first forward:",
        "",
        "| models | reason |",
        "|---|---|",
    ]
    for outcome, last in (("unsupported", ""), ("not built", "Not compared")):
        reasons: dict[str, list[str]] = {}
        for name, (what, words) in found.items():
            if what == outcome:
                reasons.setdefault(_reason(words), []).append(f"`{name}`")
        if last and reasons:
            lines += ["", f"**{last}**: transformers built no tiny model in these tests.", ""]
            lines += ["| models | transformers' error |", "|---|---|"]
        lines += [f"| {', '.join(names)} | {reason} |" for reason, names in reasons.items()]
    return "\n".join([*lines, ""])


def _reason(words: str) -> str:
    """What a refusal says, without the class that it begins with, and without the legal kinds of layers."""
    words = " ".join(words.split()).replace("|", "/").partition("; supported are ")[0]
    head, _, rest = words.partition("): ")
    if not head.startswith("unsupported ("):
        return words
    subject, _, reason = rest.partition(" ")
    return reason if subject != subject.lower() else rest


def everything(
    outcomes: Any = outcomes, names: tuple[str, ...] = NAMES, at_once: int = 24
) -> dict[str, tuple[str, str]]:
    """The outcome of every name, on two processes; a few at a time, whose memory is freed between."""
    found: dict[str, tuple[str, str]] = {}
    for first in range(0, len(names), at_once):
        mine, other = processes(2, outcomes, names[first : first + at_once])
        assert {name: x[0] for name, x in mine.items()} == {name: x[0] for name, x in other.items()}
        found |= mine
        for name, (what, words) in mine.items():
            sys.stdout.write(f"{name} | {what} | {' '.join(words.split())}\n")
    return found


if __name__ == "__main__":
    target = Path(sys.argv[1])
    _, heading, with_images = target.read_text().partition(WITH_IMAGES)
    target.write_text(page(everything()) + heading + with_images)
