"""Tiny vision-language models of transformers with random weights, and batches with pictures."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as CLASSES
from zoo import SIZES, VOCABULARY, _has, _layers

PLACE, VIDEO, LAST = VOCABULARY - 4, VOCABULARY - 3, VOCABULARY - 5
"""Tokens for which features stand: of images, of videos; and the last token of text."""
HIDDEN = 32
SIDE, PATCH = 16, 4
"""Pixels of the side of an image of fixed size, and of a patch."""
TOWER = {
    **dict.fromkeys(("num_hidden_layers", "depth", "num_attention_heads", "num_heads"), 2),
    "spatial_merge_size": 2,
    **{"hidden_size": 16, "embed_dim": 16, "intermediate_size": 24, "image_size": SIDE, "patch_size": PATCH},
    **{"out_hidden_size": HIDDEN, "projection_dim": HIDDEN, "head_dim": 8, "num_position_embeddings": 64},
    **{"deepstack_visual_indexes": [0, 1], "fullatt_block_indexes": [1], "window_size": 16},
    **{"temporal_patch_size": 2, "vocab_size": VOCABULARY},
}  # fmt: skip
"""What configurations of vision towers are given of the keys that they have."""
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}}
TEXT: dict[str, dict[str, Any]] = {
    **{name: MROPE for name in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")},
    **{name: {"rope_parameters": {**MROPE["rope_parameters"], "partial_rotary_factor": 1.0}}
       for name in ("glm4v", "glm4v_moe", "glm46v", "glm_ocr")},
}  # fmt: skip
"""By name: what a text configuration needs besides."""
TOWERS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"hidden_size": HIDDEN},
    **{name: {"patch_size": 8} for name in ("llava_next", "llava_next_video", "llava_onevision")},
    "internvl": {"image_size": [SIDE, SIDE], "patch_size": [PATCH, PATCH]},
}
WHOLE: dict[str, dict[str, Any]] = {
    "gemma3": {"mm_tokens_per_image": 4},
    "paligemma": {"projection_dim": HIDDEN, "hidden_size": HIDDEN},
    "llava": {"image_seq_length": 16},
    **{name: {"image_grid_pinpoints": [[SIDE, 2 * SIDE], [2 * SIDE, SIDE]]}
       for name in ("llava_next", "llava_next_video", "llava_onevision", "granite4_vision")},
}  # fmt: skip
"""By name: what the configuration around both needs."""
TILES = ("llava_next", "llava_next_video", "llava_onevision")
EIGHT = (
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "gemma3", "paligemma", "llava", "llava_next"),
    *("llava_onevision", "mistral3", "internvl", "glm4v", "idefics3", "smolvlm"),
)
"""The families that every test of equality goes over."""


def config_of(name: str) -> Any:
    """The tiny configuration of a name."""
    kind = CONFIG_MAPPING[name]
    own = kind()
    text, tower = own.get_text_config(), own.vision_config
    given = {key: size for key, size in SIZES.items() if _has(text, key)} | _layers(text)
    given |= {key: 0.0 for key in vars(text) if "drop" in key} | TEXT.get(name, {})
    seeing = {key: size for key, size in TOWER.items() if key in vars(tower)} | TOWERS.get(name, {})
    seeing |= {key: 0.0 for key, size in vars(tower).items() if "drop" in key and isinstance(size, float)}
    places = {key: PLACE for key in ("image_token_id", "image_token_index") if hasattr(own, key)}
    places |= {key: VIDEO for key in ("video_token_id", "video_token_index") if hasattr(own, key)}
    parts = {"text_config": {**text.to_dict(), **given}, "vision_config": {**tower.to_dict(), **seeing}}
    return kind(**parts, **places, **WHOLE.get(name, {}), tie_word_embeddings=False)


def model_of(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """The tiny model of a name, with the same random weights on every rank."""
    torch.manual_seed(2)
    config = config_of(name)
    for key, value in options.items():
        setattr(config.get_text_config(), key, value)
    model = getattr(transformers, CLASSES[name])._from_config(config, attn_implementation="eager").to(dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.2) if p.dim() > 1 else p.add_(torch.randn_like(p) * 0.1)
    return model.train()


def pictures(model: Any, grids: list[tuple[int, int, int]]) -> dict[str, Tensor]:
    """The columns of images; a grid is (frames, rows of patches, columns), where sizes may differ."""
    config, name = model.config, model.config.model_type
    draw = torch.Generator().manual_seed(3)
    dtype = next(model.parameters()).dtype
    random = lambda *shape: torch.randn(*shape, generator=draw, dtype=torch.float64).to(dtype)  # noqa: E731
    count, tower = len(grids), config.vision_config
    if hasattr(tower, "temporal_patch_size"):
        entries = 3 * tower.temporal_patch_size * PATCH**2
        patches = random(sum(t * h * w for t, h, w in grids), entries)
        return {"pixel_values": patches, "image_grid_thw": torch.tensor(grids)}
    if name in TILES:
        sizes = torch.tensor([[SIDE, 2 * SIDE], [2 * SIDE, SIDE]])[torch.arange(count) % 2]
        return {"pixel_values": random(count, 3, 3, SIDE, SIDE), "image_sizes": sizes}
    if name == "mistral3":
        sizes = torch.tensor([[h * PATCH, w * PATCH] for _, h, w in grids])
        high, wide = sizes.amax(0).tolist()
        return {"pixel_values": random(count, 3, high, wide), "image_sizes": sizes}
    if name in ("idefics3", "smolvlm"):  # rows of as many pictures, of which some are empty
        return {"pixel_values": random(1, count, 3, SIDE, SIDE)}
    return {"pixel_values": random(count, 3, SIDE, SIDE)}


def batch_of(model: Any, rows: list[list[int]], tokens: int, images: dict[str, Tensor]) -> dict[str, Tensor]:
    """A batch [rows, tokens] with images at the tokens that `rows` name, in order; labels of text alone.

    As many places follow each other as an image has features.
    """
    name = model.config.model_type
    counts = features_of(model, images)
    draw = torch.Generator().manual_seed(4)
    ids = torch.randint(3, LAST, (len(rows), tokens), generator=draw)
    for row, starts in enumerate(rows):
        for at in starts:
            count = counts.pop(0)
            assert at + count < tokens
            ids[row, at : at + count] = PLACE
    assert not counts
    seen = ids == PLACE
    labels = ids.masked_fill(seen | (torch.rand(ids.shape, generator=draw) < 0.2), -100)
    batch = {"input_ids": ids, "labels": labels, **images}
    for column in ("token_type_ids", "mm_token_type_ids"):
        if column in inspect.signature(model.forward).parameters:
            batch[column] = seen.long() if name != "paligemma" else (~seen).long()
    if name in ("idefics3", "smolvlm") and images:
        values, most = images["pixel_values"][0], max(map(len, rows))
        padded = values.new_zeros(len(rows), most, *values.shape[1:])
        for row, starts in enumerate(rows):
            padded[row, : len(starts)], values = values[: len(starts)], values[len(starts) :]
        batch["pixel_values"] = padded
    return batch


def features_of(model: Any, images: dict[str, Tensor]) -> list[int]:
    """How many features each image has."""
    if not images:
        return []
    with torch.no_grad():
        found = model.get_image_features(**images, return_dict=True).pooler_output
    count = len(images.get("image_grid_thw", images["pixel_values"]))
    if isinstance(found, Tensor):
        return [found[0].shape[0]] * count if found.dim() > 2 else [len(found) // count] * count
    if model.config.model_type in ("idefics3", "smolvlm"):
        count = images["pixel_values"].shape[1]
        return [len(found[0]) // count] * count
    return [len(x) for x in found]
