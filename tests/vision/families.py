"""Tiny models of transformers that read images, videos or sound, and batches for them."""

from __future__ import annotations

import importlib
import inspect
from functools import partial
from typing import Any

import torch
import transformers
from causal_lms import drawn
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES as CLASSES
from zoo import PARTICULAR, VOCABULARY, sizes_of

PLACE, LAST = VOCABULARY - 4, VOCABULARY - 5
"""The token for which features of images stand, and the last token of text."""
PLACES = {"image": PLACE, "video": VOCABULARY - 3, "audio": VOCABULARY - 2}
"""By kind of media, the token for which features stand; types of tokens count the kinds from 1."""
PIXELS = {"image": "pixel_values", "video": "pixel_values_videos", "audio": "input_features"}
"""By kind of media, the column of which features are made."""
Grids = list[tuple[int, int, int]]
"""Sizes of media in patches, where these may differ: (frames, rows, columns) of each."""
Media = dict[str, tuple[Grids, list[list[int]]]]
"""By kind, sizes, and the tokens of each row at which the media begin, in order."""
HIDDEN = 32
SIDE, PATCH = 16, 4
"""Pixels of the side of an image of fixed size, and of a patch."""

SMALL: dict[int, str] = {
    2: "num_hidden_layers depth num_attention_heads num_heads encoder_layers encoder_attention_heads "
    "attention_heads num_key_value_heads resampler_depth resampler_n_heads num_res_blocks num_global_layers "
    "temporal_downsample_factor pooling_kernel_size num_filters",
    PATCH: "patch_size n_window resampler_n_latents num_image_tokens num_query_tokens",
    8: "head_dim resampler_head_dim num_mel_bins pos_emb_height pos_emb_width max_image_size max_img_size "
    "max_source_positions",
    SIDE: "hidden_size embed_dim d_model encoder_hidden_size mm_embed_dim output_proj_dims mm_posemb_size "
    "downsample_hidden_size image_size resolution window_size num_pos_feats projection_hidden_size "
    "output_channels vision_hidden_size codebook_dim",
    24: "intermediate_size encoder_ffn_dim vision_output_dim mlp_dim projector_hidden_size "
    "projector_input_dim projector_output_dim",
    HIDDEN: "out_hidden_size projection_dim output_dim image_token_embed_dim text_hidden_size base_channels "
    "latent_channels",
    64: "num_position_embeddings max_position_embeddings position_embedding_size codebook_size "
    "num_embeddings img_max_token_num num_patches",
    VOCABULARY: "vocab_size",
}
TOWER: dict[str, Any] = {
    **{name: size for size, names in SMALL.items() for name in names.split()},
    **{"deepstack_visual_indexes": [0, 1], "fullatt_block_indexes": [1], "global_attn_indexes": [1]},
}
"""Values of the keys of configurations of towers, and of models around them."""


def _timm(architecture: str, hidden: int, kind: str = "timm_wrapper", **args: Any) -> dict[str, Any]:
    """A tower of timm: a package that these three models need, and no other test."""
    tower = {"model_type": kind, "architecture": architecture, "hidden_size": hidden, "model_args": args}
    return {"vision_config": tower}


TILES = {"image_grid_pinpoints": [[SIDE, 2 * SIDE], [2 * SIDE, SIDE]]}
MUSE = {"layer_types": ["sliding_attention", *["full_attention"] * 2]}
FAMILIES: dict[str, dict[str, dict[str, Any]]] = {
    "apertus1p5": {
        "tower": {"codebook_size": 8, "channel_multiplier": [1, 1, 2]},
        "whole": {"image_token_offset": 30, "audio_token_offset": 38},
    },
    "aria": {"whole": {"projector_patch_to_query_dict": {16: 4}}},
    **{
        name: {"text": {"word_embed_proj_dim": HIDDEN}}
        for name in ("blip-2", "instructblip", "instructblipvideo")
    },
    **{name: {"whole": {"vocabulary_map": {"<image>": PLACE}}} for name in ("chameleon", "emu3")},
    "deepseek_ocr2": {
        "text": {"mlp_layer_types": ["dense", "sparse"], "n_routed_experts": 4, "num_experts_per_tok": 2},
        "tower": {"window_size": 2, "downsample_channels": [8, SIDE], "mlp_dim": 24},
    },
    "diffusion_gemma": {"text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}},
    "ernie4_5_vl_moe": {
        "text": {
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
        }
    },
    "fast_vlm": {
        "whole": _timm("fastvit_mci0", 128, inference_mode=True, layers=(1,) * 4, embed_dims=(8, 16, 32, 64))
    },
    **{name: {"whole": {"mm_tokens_per_image": 4}} for name in ("gemma3", "shieldgemma2")},
    "gemma3n": {
        "text": {"intermediate_size": 48, "activation_sparsity_pattern": None},
        "whole": {
            **{"vision_soft_tokens_per_image": 4},
            **_timm(
                "mobilenetv5_base", 2048, "gemma3n_vision", channel_multiplier=0.1, msfa_output_resolution=2
            ),
        },
    },
    "gemma4_unified": {"tower": {"patch_size": 2}},
    "granite4_vision": {
        "text": {"num_hidden_layers": 5},
        "tower": {"hidden_size": 64},
        "whole": {
            **TILES,
            "downsample_rate": "2/4",
            "deepstack_layer_map": [[-2, 0]],
            "spatial_target_layers": [1, 2, 3, 4],
        },
    },
    "llama4": {"tower": {"intermediate_size": 64}},
    **{
        name: {"tower": {"patch_size": 8}, "whole": TILES}
        for name in ("llava_next", "llava_next_video", "llava_onevision")
    },
    "mistral4": {"text": {"num_key_value_heads": 4, "head_dim": 12}},
    "molmo2": {
        "text": {"rope_scaling_layers": [0]},
        "tower": {"vision_feature_layer": [1, 0]},
        "whole": {"image_patch_id": PLACE},
    },
    "muse_glimmer": {"text": MUSE, "whole": {"out_hidden_size": 64}},
    "muse_spark": {
        **{"text": MUSE, "whole": {"out_hidden_size": 64}},
        "tower": {"hidden_sizes": [16] * 4, "depths": [1] * 4},
    },
    "ovis2": {"whole": {"hidden_size": HIDDEN, "visual_indicator_token_ids": [70, 71, 72, 73, 74]}},
    "perception_lm": {
        "whole": _timm(
            "vit_pe_core_tiny_patch16_384",
            SIDE,
            embed_dim=SIDE,
            depth=2,
            num_heads=2,
            img_size=(SIDE, SIDE),
            patch_size=PATCH,
            global_pool="",
            use_post_transformer_norm=False,
            ref_feat_shape=(4, 4),
        )
    },
    "qwen2_vl": {"tower": {"hidden_size": HIDDEN}},
    "qwen4_exp": {
        "text": {
            **{"indexer_budget": 16, "indexer_compress_ratio": 4, "indexer_n_heads": 2},
            **{"indexer_kv_heads": 1, "indexer_head_dim": 8},
        }
    },
    "step3p7": {
        "text": {
            "layer_types": ["full_attention", "sliding_attention"],
            "mlp_layer_types": ["dense", "sparse"],
            "num_hidden_layers": 2,
            "sliding_window": 16,
        }
    },
    "vipllava": {"tower": {"num_hidden_layers": 12}},
    "voxtral": {"tower": {"intermediate_size": HIDDEN}},
}
"""By name: what configurations need besides: of text, of towers where they have the key, of the whole."""
SQUARE = ("kimi_k25", "paddleocr_vl")
"""Models whose patches are squares, and no rows of numbers."""
ROWS_OF = ("idefics2", "idefics3", "smolvlm", "granite_docling")
"""Models whose pictures are in rows of as many, of which some are empty."""
STAMPED = ("qwen3_vl", "qwen3_vl_moe", "cosmos3_edge", "glm4v")
"""Models with a token of text between the frames of a video."""
SIZED = ("pixtral", "apertus1p5_vision_tokenizer")
"""Towers that are told the sizes of images, which are padded to the largest."""
PADDED = {"spatial_shapes", "image_position_ids"}
"""Columns of models whose images have as many patches, of which the last are padding."""
FOURTEEN = (
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "gemma3", "paligemma", "llava", "llava_next"),
    *("llava_onevision", "mistral3", "internvl", "glm4v", "idefics3", "smolvlm"),
)
"""The families that every test of equality goes over."""


def config_of(name: str) -> Any:
    """The tiny configuration of a name."""
    kind, family = CONFIG_MAPPING[name], FAMILIES.get(name, {})
    own = kind()
    text = own.get_text_config()
    of_text = _of_text(text) | family.get("text", {})
    of_whole = family.get("whole", {})
    if text is own:
        towers = {key: x for key, x in _small(own).items() if key in own.sub_configs}
        return kind(**of_text, **towers, **of_whole)
    parts = _small(own)
    for key, of in own.sub_configs.items():
        part = getattr(own, key) or (of() if key == "vision_config" else None)
        if part is text:
            parts[key] = {**text.to_dict(), **of_text}
        elif part is not None:
            parts[key] = {**part.to_dict(), **_small(part, family.get("tower", {}))}
    places = {f"{of}_token_{x}": token for of, token in PLACES.items() for x in ("id", "index")}
    parts |= {key: token for key, token in places.items() if key in vars(own)}
    return kind(**{**parts, **of_whole, "tie_word_embeddings": False})


def _of_text(text: Any) -> dict[str, Any]:
    """The sizes of the text, and layers of every kind."""
    values = sizes_of(text)
    wide = {key: x for key, x in vars(text).items() if isinstance(x, tuple | list)}
    values |= {key: [values[key]] * len(x) for key, x in wide.items() if isinstance(values.get(key), int)}
    if "_heterogeneity_spec" in vars(text):
        values["per_layer_config"] = None
    rope = getattr(text, "rope_parameters", None) or {}
    modeling = importlib.import_module(type(text).__module__.replace(".configuration_", ".modeling_"))
    if "rope_theta" in rope and "mrope_section" in inspect.getsource(modeling):
        values["rope_parameters"] = {**rope, "mrope_section": [2, 1, 1], "partial_rotary_factor": 1.0}
    return values | PARTICULAR.get(text.model_type, {})


def _small(tower: Any, more: dict[str, Any] = {}) -> dict[str, Any]:  # noqa: B006
    """The sizes of a tower, none larger than it was, and `more`; of a tuple of numbers each is as small."""
    there = {key: x for key, x in vars(tower).items() if x is not None}
    sizes = {key: size for key, size in TOWER.items() if key in there}
    for key, x in there.items():
        if "drop" in key and isinstance(x, float):
            sizes[key] = 0.0
        if key in sizes and isinstance(sizes[key], int):
            sizes[key] = [sizes[key]] * len(x) if isinstance(x, list | tuple) else min(sizes[key], x)
        if key in tower.sub_configs:
            sizes[key] = {**x.to_dict(), **_small(x, more)}
    if "layer_types" in there:
        sizes["layer_types"] = [*dict.fromkeys(there["layer_types"])]
        sizes["num_hidden_layers"] = len(sizes["layer_types"])
    elif "depths" in there:
        del sizes["num_hidden_layers"]
    return sizes | {key: x for key, x in more.items() if key in there}


def class_of(name: str) -> Any:
    """The class of models of a name."""
    return getattr(transformers, CLASSES[name])


def model_of(name: str) -> Any:
    """The tiny model of a name, with the same random weights on every rank."""
    torch.manual_seed(2)
    model = class_of(name)._from_config(config_of(name), attn_implementation="eager")
    if name == "deepseek_ocr2":  # makes 144 features of each image, for which these rows have no place
        model.model.vision_tower.query_768_resolution = torch.nn.Embedding(3, SIDE)
    if name == "llama4":  # whose own forward reads it, in transformers 5.24
        transformers.modeling_outputs.MoeCausalLMOutputWithPast.image_outputs = None
    return drawn(model)


def maker(model: Any, kind: str) -> Any:
    """What makes features of a kind of media: the method of the innermost module that has one."""
    name = f"get_{kind}_features"
    return getattr([model, *(m for m in model.modules() if hasattr(m, name))][-1], name)


def columns_of(model: Any, kind: str, grids: Grids) -> dict[str, Tensor]:
    """The columns of media of a kind, by the names of the parameters of what makes their features."""
    names = {*inspect.signature(maker(model, kind)).parameters}
    config, grid, count = model.config, torch.tensor(grids), len(grids)
    random = partial(torch.randn, generator=torch.Generator().manual_seed(3))
    at, patches, wide = torch.arange(int(grid.prod(-1).max())), grid.prod(-1)[:, None], grid[:, 2:]
    there = at < patches
    tiled = hasattr(config, "image_grid_pinpoints")
    others = {
        f"{kind}_grid_thw": grid,
        f"{kind}_merge_sizes": torch.full((count,), 2),
        "high_res_pixel_values": random(count, 3, SIDE, SIDE),
        "image_grid_hw": grid[:, 1:],
        "image_grids": torch.tensor([[2, 2, 0, 0]] * count),
        "image_position_ids": torch.stack([at % wide, at // wide], -1).where(there[..., None], -1),
        "image_token_pooling": torch.arange(count * SIDE).view(-1, 4),
        "qformer_input_ids": torch.full((count, 5), 3),
        "spatial_shapes": grid[:, 1:],
        "target_sizes": torch.full((count, 2), 4),
    }
    if tiled:
        others["image_sizes"] = torch.tensor(config.image_grid_pinpoints)[torch.arange(count) % 2]
    elif getattr(config, "vision_config", config).model_type in SIZED:
        others["image_sizes"] = grid[:, 1:] * PATCH
    if "spatial_shapes" in names:
        others["pixel_attention_mask"] = there.long()
    elif config.model_type == "granite_docling":
        others["pixel_attention_mask"] = torch.ones(1, count, dtype=torch.bool)
    if kind == "video" and "second_per_grid_ts" in inspect.signature(model.forward).parameters:
        names.add("second_per_grid_ts")
        others["second_per_grid_ts"] = torch.arange(1.0, count + 1)
    pixels = random(*_shape(config, kind, names, grid, others.get("image_sizes")))
    if names & PADDED:
        pixels = pixels * there[..., None]
    name = PIXELS[kind] if PIXELS[kind] in names else PIXELS["image"]
    return {name: pixels, **{key: x for key, x in others.items() if key in names}}


def _shape(config: Any, kind: str, names: set[str], grid: Tensor, sizes: Tensor | None) -> tuple[int, ...]:
    """The shape of the pixels of media, or of their sound."""
    count, flat = len(grid), 3 * PATCH**2
    patches, most = int(grid.prod(-1).sum()), int(grid.prod(-1).max())
    tower = getattr(config, "vision_config", config)
    frames = getattr(tower, "temporal_patch_size", getattr(tower, "patch_temporal", 1))
    told = {  # by a column
        "input_features": (count, 8, SIDE),
        "target_sizes": (1, 3, PATCH, count * SIDE * PATCH),
        "image_grid_hw": (patches, flat),
        f"{kind}_grid_thw": (patches, 3, PATCH, PATCH)
        if config.model_type in SQUARE
        else (patches, frames * flat),
        **{column: (count, most, flat) for column in PADDED},
        "image_token_pooling": (count, TOWER["num_position_embeddings"], flat),
    }
    shape = next((shape for column, shape in told.items() if column in names), None)
    if shape is not None:
        return shape
    if config.model_type in ROWS_OF:
        return 1, count, 3, SIDE, SIDE
    if config.model_type == "perception_lm" or kind == "video":
        return count, 2, 3, SIDE, SIDE
    if hasattr(config, "image_grid_pinpoints"):
        return count, 3, 3, SIDE, SIDE
    return (count, 3, SIDE, SIDE) if sizes is None else (count, 3, *sizes.amax(0).tolist())


def batch_of(model: Any, tokens: int, media: Media) -> dict[str, Tensor]:
    """A batch [rows, tokens] with media, and labels of text alone.

    As many placeholders follow each other as an image has features, or a frame of a video.
    """
    name, takes = model.config.model_type, inspect.signature(model.forward).parameters
    draw = torch.Generator().manual_seed(4)
    rows = max(len(starts) for _, starts in media.values())
    ids = torch.randint(3, LAST, (rows, tokens), generator=draw)
    types = torch.zeros_like(ids)
    batch: dict[str, Tensor] = {}
    for number, kind in enumerate(PLACES, 1):
        grids, starts_of = media.get(kind, ([], []))
        columns = columns_of(model, kind, grids) if grids else {}
        lengths = iter(lengths_of(model, kind, columns, len(grids)) if grids else ())
        for row, starts in enumerate(starts_of):
            for at in starts:
                for length in next(lengths):
                    assert at + length <= tokens
                    types[row, at : at + length] = number
                    at += length + 1
        assert next(lengths, None) is None
        ids[types == number] = PLACES["image" if name == "glm4v" else kind]
        batch |= columns
    silent = (types > 0) | (torch.rand(ids.shape, generator=draw) < 0.2)
    batch |= {"input_ids": ids, "labels": ids.masked_fill(silent, -100)}
    for column in ("token_type_ids", "mm_token_type_ids"):
        if column in takes:
            batch[column] = types if name != "paligemma" else (types == 0).long()
    if name in ROWS_OF and "pixel_values" in batch:
        images = batch["pixel_values"][0].split([*map(len, media["image"][1])])
        batch["pixel_values"] = padded = pad_sequence(images, batch_first=True)
        if name == "granite_docling":
            batch["pixel_attention_mask"] = padded.flatten(2).any(-1)
    return batch


def lengths_of(model: Any, kind: str, columns: dict[str, Tensor], count: int) -> list[list[int]]:
    """By image, how many features its parts have that follow each other: the frames of a video, or all."""
    make = maker(model, kind)
    inputs = {key: x for key, x in columns.items() if key in inspect.signature(make).parameters}
    with torch.no_grad():
        out = make(**inputs, return_dict=True)
    features = out.get("pooler_output")
    if features is None:
        features = out.get("last_hidden_state")
    if features is None:
        features = out["deepstack_features"][0][1]
    if isinstance(features, Tensor) or len(features) != count:
        features = features if isinstance(features, Tensor) else torch.cat([*features])
        counts = [features.shape[:-1].numel() // count] * count
    else:
        counts = [len(x) for x in features]
    stamped = model.config.model_type in STAMPED and f"{kind}_grid_thw" in columns
    frames = columns[f"{kind}_grid_thw"][:, 0].tolist() if stamped else [1] * count
    return [[n // parts] * parts for n, parts in zip(counts, frames, strict=True)]
