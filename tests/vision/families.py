"""Tiny vision-language models of transformers with random weights, and batches with pictures."""

from __future__ import annotations

import importlib
import inspect
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as CLASSES
from zoo import PARTICULAR, SIZES, VOCABULARY, _has, _layers

PLACE, VIDEO, LAST = VOCABULARY - 4, VOCABULARY - 3, VOCABULARY - 5
"""Tokens for which features stand: of images, of videos; and the last token of text."""
HIDDEN = 32
SIDE, PATCH = 16, 4
"""Pixels of the side of an image of fixed size, and of a patch."""
PLACES = {f"{of}_token_{x}": at for of, at in (("image", PLACE), ("video", VIDEO)) for x in ("id", "index")}
ALIKE = {
    2: "num_hidden_layers depth num_attention_heads num_heads encoder_layers encoder_attention_heads "
    "attention_heads num_key_value_heads resampler_depth resampler_n_heads num_res_blocks num_global_layers "
    "temporal_downsample_factor pooling_kernel_size",
    PATCH: "patch_size n_window resampler_n_latents num_image_tokens num_query_tokens",
    8: "head_dim resampler_head_dim num_mel_bins pos_emb_height pos_emb_width max_image_size max_img_size",
    SIDE: "hidden_size embed_dim d_model encoder_hidden_size mm_embed_dim output_proj_dims mm_posemb_size "
    "downsample_hidden_size image_size resolution window_size num_pos_feats projection_hidden_size "
    "output_channels vision_hidden_size",
    24: "intermediate_size encoder_ffn_dim vision_output_dim mlp_dim projector_hidden_size",
    HIDDEN: "out_hidden_size projection_dim output_dim image_token_embed_dim text_hidden_size base_channels "
    "latent_channels",
    64: "num_position_embeddings max_position_embeddings position_embedding_size codebook_size "
    "num_embeddings img_max_token_num num_patches",
    VOCABULARY: "vocab_size",
}
TOWER: dict[str, Any] = {
    **{name: size for size, names in ALIKE.items() for name in names.split()},
    **{"deepstack_visual_indexes": [0, 1], "fullatt_block_indexes": [1], "global_attn_indexes": [1]},
}
"""Values of the keys of configurations of towers, and of models around them."""
TILES = ("llava_next", "llava_next_video", "llava_onevision")
MUSES = ("muse_glimmer", "muse_spark")
TEXT: dict[str, dict[str, Any]] = {
    "step3p7": {
        **{"layer_types": ["full_attention"] * 2, "mlp_layer_types": ["dense", "sparse"]},
        "num_hidden_layers": 2,
    },
    "qwen4_exp": {
        **{"indexer_budget": 16, "indexer_compress_ratio": 4, "indexer_n_heads": 2},
        **{"indexer_kv_heads": 1, "indexer_head_dim": 8},
    },
    "ernie4_5_vl_moe": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
    },
    "diffusion_gemma": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16},
    **{name: {"layer_types": ["sliding_attention", *["full_attention"] * 2]} for name in MUSES},
    **{name: {"word_embed_proj_dim": HIDDEN} for name in ("blip-2", "instructblip")},
}
"""By name: what a text configuration needs besides."""
TOWERS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"hidden_size": HIDDEN},
    **{name: {"patch_size": 8} for name in TILES},
    "vipllava": {"num_hidden_layers": 12},
    "gemma4_unified": {"patch_size": 2},
    "muse_spark": {"hidden_sizes": [16] * 4, "depths": [1] * 4},
}
"""By name: what a tower needs besides, of the keys that it has."""
WHOLE: dict[str, dict[str, Any]] = {
    **{name: {"mm_tokens_per_image": 4} for name in ("gemma3", "shieldgemma2")},
    "paligemma": {"projection_dim": HIDDEN, "hidden_size": HIDDEN},
    "llava": {"image_seq_length": 16},
    **{name: {"image_grid_pinpoints": [[SIDE, 2 * SIDE], [2 * SIDE, SIDE]]} for name in TILES},
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "ovis2": {"hidden_size": HIDDEN, "visual_indicator_token_ids": [70, 71, 72, 73, 74]},
    **{name: {"out_hidden_size": 64} for name in MUSES},
    **{name: {"vocabulary_map": {"<image>": PLACE}} for name in ("chameleon", "emu3")},
}
"""By name: what the configuration around both needs."""
SQUARE = ("kimi_k25", "paddleocr_vl")
"""Models whose patches are squares, and no rows of numbers."""
ROWS_OF = ("idefics2", "idefics3", "smolvlm", "granite_docling")
"""Models whose pictures are in rows of as many, of which some are empty."""
STAMPED = ("qwen3_vl", "qwen3_vl_moe", "cosmos3_edge")
"""Models that count positions of each frame of a video."""
EIGHT = (
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "gemma3", "paligemma", "llava", "llava_next"),
    *("llava_onevision", "mistral3", "internvl", "glm4v", "idefics3", "smolvlm"),
)
"""The families that every test of equality goes over."""


def config_of(name: str) -> Any:
    """The tiny configuration of a name."""
    kind = CONFIG_MAPPING[name]
    own = kind()
    text = own.get_text_config()
    values = {key: size for key, size in SIZES.items() if _has(text, key)} | _layers(text)
    values |= {key: 0.0 for key in vars(text) if "drop" in key}
    wide = {key: x for key, x in vars(text).items() if isinstance(x, tuple | list)}
    values |= {key: [values[key]] * len(x) for key, x in wide.items() if isinstance(values.get(key), int)}
    if "_heterogeneity_spec" in vars(text):
        values["per_layer_config"] = None
    rope = getattr(text, "rope_parameters", None) or {}
    modeling = importlib.import_module(type(text).__module__.replace(".configuration_", ".modeling_"))
    if "rope_theta" in rope and "mrope_section" in inspect.getsource(modeling):
        values["rope_parameters"] = {**rope, "mrope_section": [2, 1, 1], "partial_rotary_factor": 1.0}
    values |= PARTICULAR.get(text.model_type, {}) | TEXT.get(name, {})
    if text is own:
        towers = {key: x for key, x in _seeing(own).items() if key in own.sub_configs}
        return kind(**values, **towers, **WHOLE.get(name, {}))
    places = {key: token for key, token in PLACES.items() if hasattr(own, key)}
    parts = _seeing(own)
    for key, of in own.sub_configs.items():
        part = getattr(own, key) or (of() if key == "vision_config" else None)
        if part is text:
            parts[key] = {**text.to_dict(), **values}
        elif part is not None:
            more = {key: x for key, x in TOWERS.get(name, {}).items() if key in vars(part)}
            parts[key] = {**part.to_dict(), **_seeing(part), **more}
    return kind(**{**parts, **places, **WHOLE.get(name, {}), "tie_word_embeddings": False})


def _seeing(tower: Any) -> dict[str, Any]:
    """The sizes of a tower, none larger than it was; of a tuple of numbers each is as small."""
    there = {key: x for key, x in vars(tower).items() if x is not None}
    sizes = {key: size for key, size in TOWER.items() if key in there}
    for key, x in there.items():
        if "drop" in key and isinstance(x, float):
            sizes[key] = 0.0
        if key in sizes and isinstance(sizes[key], int):
            sizes[key] = [sizes[key]] * len(x) if isinstance(x, list | tuple) else min(sizes[key], x)
        if key in tower.sub_configs:
            sizes[key] = {**x.to_dict(), **_seeing(x)}
    if "layer_types" in there:
        sizes["layer_types"] = [*dict.fromkeys(there["layer_types"])]
        sizes["num_hidden_layers"] = len(sizes["layer_types"])
    elif "depths" in there:
        del sizes["num_hidden_layers"]
    return sizes


def model_of(name: str) -> Any:
    """The tiny model of a name, with the same random weights on every rank."""
    torch.manual_seed(2)
    model = getattr(transformers, CLASSES[name])._from_config(config_of(name), attn_implementation="eager")
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.2) if p.dim() > 1 else p.add_(torch.randn_like(p) * 0.1)
    return model.train()


def pictures(model: Any, grids: list[tuple[int, int, int]], kind: str = "image") -> dict[str, Tensor]:
    """The columns of images or videos, by the names of what makes features of them.

    A grid is (frames, rows of patches, columns), where sizes may differ.
    """
    names = {*inspect.signature(maker(model, kind)).parameters}
    random = partial(torch.randn, generator=torch.Generator().manual_seed(3))
    values = "pixel_values_videos" if kind == "video" else "pixel_values"
    if kind == "video" and f"{kind}_grid_thw" not in names:
        return {values: random(len(grids), 2, 3, SIDE, SIDE)}
    of = _of_patches if names & {f"{kind}_grid_thw", "image_grid_hw", "target_sizes"} else _of_squares
    of = _of_padded if names & {"spatial_shapes", "image_position_ids"} else of
    pixels, others = of(model, torch.tensor(grids), names, random)
    return {values: pixels, **{key.replace("image", kind): x for key, x in others.items()}}


def _of_patches(model: Any, grid: Tensor, names: set[str], random: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The patches of all images, one after another, and a table of sizes."""
    tower, patches = model.config.vision_config, int(grid.prod(-1).sum())
    if "image_grid_hw" in names:
        return random(patches, 3 * PATCH**2), {"image_grid_hw": grid[:, 1:]}
    if "target_sizes" in names:
        sizes = torch.full((len(grid), 2), 4)
        return random(1, 3, PATCH, int(sizes.prod(-1).sum()) * PATCH), {"target_sizes": sizes}
    others = {"image_grid_thw": grid}
    if "image_merge_sizes" in names:
        others["image_merge_sizes"] = torch.full((len(grid),), 2)
    if "video_grid_thw" in names and "second_per_grid_ts" in inspect.signature(model.forward).parameters:
        others["second_per_grid_ts"] = torch.arange(1.0, len(grid) + 1)
    if model.config.model_type in SQUARE:
        return random(patches, 3, PATCH, PATCH), others
    frames = getattr(tower, "temporal_patch_size", getattr(tower, "patch_temporal", 1))
    return random(patches, 3 * frames * PATCH**2), others


def _of_padded(model: Any, grid: Tensor, names: set[str], random: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """As many patches for each image, of which the last are padding."""
    counts, wide = grid.prod(-1), grid[:, 2:]
    at = torch.arange(int(counts.max()))
    there = at < counts[:, None]
    pixels = random(*there.shape, 3 * PATCH**2) * there[..., None]
    if "spatial_shapes" in names:
        return pixels, {"pixel_attention_mask": there.long(), "spatial_shapes": grid[:, 1:]}
    places = torch.stack([at % wide, at // wide], -1)
    return pixels, {"image_position_ids": places.masked_fill(~there[..., None], -1)}


def _of_squares(model: Any, grid: Tensor, names: set[str], random: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Images of one size, or tiles of such, or of sizes that a table has."""
    count, name = len(grid), model.config.model_type
    if hasattr(model.config, "image_grid_pinpoints"):
        sizes = torch.tensor([[SIDE, 2 * SIDE], [2 * SIDE, SIDE]])[torch.arange(count) % 2]
        return random(count, 3, 3, SIDE, SIDE), {"image_sizes": sizes}
    if "image_sizes" in names and model.config.vision_config.model_type == "pixtral":
        sizes = grid[:, 1:] * PATCH
        return random(count, 3, *sizes.amax(0).tolist()), {"image_sizes": sizes}
    others = {}
    if "high_res_pixel_values" in names:
        others["high_res_pixel_values"] = random(count, 3, SIDE, SIDE)
    if "qformer_input_ids" in names:
        others["qformer_input_ids"] = torch.full((count, 5), 3)
    if name == "granite_docling":
        others["pixel_attention_mask"] = torch.ones(1, count, dtype=torch.bool)
    rows = (1, count) if name in ROWS_OF else (count,)
    return random(*rows, 3, SIDE, SIDE), others


def maker(model: Any, kind: str) -> Any:
    """What makes features of images or videos: the method of the innermost module that has one."""
    name = f"get_{kind}_features"
    return getattr([model, *(m for m in model.modules() if hasattr(m, name))][-1], name)


def batch_of(
    model: Any,
    rows: list[list[int]],
    tokens: int,
    images: dict[str, Tensor],
    films: dict[str, Tensor] | None = None,
    of_films: tuple[list[int], ...] = (),
) -> dict[str, Tensor]:
    """A batch [rows, tokens] with images at the tokens that `rows` name, in order; labels of text alone.

    As many places follow each other as an image has features. Between frames of videos (`films`, at the
    tokens `of_films`) is a token of text, where the model counts positions of each frame.
    """
    name = model.config.model_type
    draw = torch.Generator().manual_seed(4)
    ids = torch.randint(3, LAST, (len(rows), tokens), generator=draw)
    types = torch.zeros_like(ids)
    for number, (kind, columns, starts_of) in enumerate(
        (("image", images, rows), ("video", films or {}, of_films)), 1
    ):
        counts = features_of(model, columns, kind, sum(map(len, starts_of))) if columns else []
        frames = (
            columns["video_grid_thw"][:, 0].tolist()
            if name in STAMPED and "video_grid_thw" in columns
            else [1] * len(counts)
        )
        for row, starts in enumerate(starts_of):
            for at in starts:
                count, parts = counts.pop(0), frames.pop(0)
                part = count // parts
                assert at + count + parts <= tokens
                for first in range(at, at + parts * (part + 1), part + 1):
                    types[row, first : first + part] = number
        assert not counts
    seen = types > 0
    ids[types == 1], ids[types == 2] = PLACE, VIDEO
    labels = ids.masked_fill(seen | (torch.rand(ids.shape, generator=draw) < 0.2), -100)
    batch = {"input_ids": ids, "labels": labels, **images, **(films or {})}
    for column in ("token_type_ids", "mm_token_type_ids"):
        if column in inspect.signature(model.forward).parameters:
            batch[column] = types if name != "paligemma" else (~seen).long()
    if name in ROWS_OF and images:
        values, most = images["pixel_values"][0], max(map(len, rows))
        padded = values.new_zeros(len(rows), most, *values.shape[1:])
        for row, starts in enumerate(rows):
            padded[row, : len(starts)], values = values[: len(starts)], values[len(starts) :]
        batch["pixel_values"] = padded
        if name == "granite_docling":
            batch["pixel_attention_mask"] = padded.flatten(2).any(-1)
    return batch


def features_of(model: Any, columns: dict[str, Tensor], kind: str, count: int) -> list[int]:
    """How many features each of `count` images or videos has."""
    with torch.no_grad():
        inputs = {key: x for key, x in columns.items() if key != "second_per_grid_ts"}
        out = maker(model, kind)(**inputs, return_dict=True)
    features = out.last_hidden_state if out.pooler_output is None else out.pooler_output
    if not isinstance(features, Tensor) and len(features) == count:
        return [len(x) for x in features]
    if not isinstance(features, Tensor) or features.dim() > 2:
        features = torch.cat([x.flatten(0, -2) for x in features])
    return [len(features) // count] * count
