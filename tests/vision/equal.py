"""Losses and gradients of vision-language models over a CP group, beside those of one process."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from families import SIDE, Media, batch_of, model_of
from torch import Tensor
from zoo import average_gradients

from burst_mcore.torch import parallelize

GRIDS = [(1, 4, 4), (1, 2, 4), (1, 4, 6)]
FILMS = [(2, 4, 4), (3, 2, 4)]
ROWS = [[3, 45], [20]]
TOKENS = 97
"""A prime: no layout divides it."""


def plain(model: Any, batch: dict[str, Any], **more: Any) -> Tensor:
    """The loss of one process, whose gradients lie in the model."""
    loss: Tensor = model(**batch, use_cache=False, **more).loss
    loss.backward()
    return loss.detach()


def shared(model: Any, batch: dict[str, Any], **options: Any) -> Tensor:
    """The loss over a CP group of all ranks, and gradients averaged over it."""
    cp = parallelize(model, dist.group.WORLD, reduction="mean", **options)
    loss: Tensor = model(**cp.shard(batch)).loss
    loss.backward()
    average_gradients(model)
    return loss.detach()


def errors(found: Any, want: Any) -> tuple[float, str]:
    """The largest error of a gradient, relative to the largest entry of its own, and where it is."""
    ours, theirs = dict(found.named_parameters()), dict(want.named_parameters())
    assert ours.keys() == theirs.keys()
    at = [(error(ours[key].grad, p.grad), key) for key, p in theirs.items() if p.requires_grad]
    return max(at, default=(0.0, "none"))


def error(found: Tensor, want: Tensor | None) -> float:
    largest = 0.0 if want is None else float(want.abs().max())
    if want is None or largest < 1e-7:
        return float(found.abs().max())
    return float((found - want).abs().max()) / largest


CASES: dict[str, Media] = {
    "plain": {"image": (GRIDS, ROWS)},
    "text": {"image": ([], [[], []])},
    "pixels": {"image": ([], [[], []])},
    "some rows": {"image": (GRIDS, [[3, 25, 55], []])},
    "videos": {"video": (FILMS, [[45], [60]])},
    "both": {"image": (GRIDS[:2], [[3], [20]]), "video": (FILMS, [[45], [60]])},
    "sound": {"audio": (GRIDS, ROWS)},
}
"""By case, the media of a batch, as `batch_of` has them; of other cases those of "plain"."""


def batch_for(model: Any, case: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The batch of a case, and that of one process: rows of a prime length.

    One process gets packed rows apart: of them transformers looks up Gemma 3's blocks at restarted positions.
    """
    batch = batch_of(model, TOKENS, CASES.get(case, CASES["plain"]))
    if case == "pixels":
        batch["pixel_values"] = torch.zeros(len(ROWS), 3, SIDE, SIDE)
    if case == "packed":
        return packed(model, batch), batch
    if case == "padded":
        mask = torch.ones_like(batch["input_ids"])
        mask[0, -17:] = 0
        mask[1, :11] = 0
        batch |= {"attention_mask": mask, "labels": batch["labels"].masked_fill(mask == 0, -100)}
        batch["labels"][1, 11] = -100  # whose token before is padding, which one process sees as a token
    return batch, batch


def packed(model: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """Two rows as one, whose positions restart; for towers with positions of several dims those of each."""
    rows, n = batch["input_ids"].shape
    batch = batch | {"labels": batch["labels"].clone()}
    at = torch.arange(n).repeat(rows)[None]
    if hasattr(model.model, "get_rope_index"):
        more = {k: batch[k] for k in ("image_grid_thw", "mm_token_type_ids") if k in batch}
        of_images, _ = model.model.get_rope_index(batch["input_ids"], **more)
        batch["position_ids"] = torch.cat([at[None], of_images.reshape(3, 1, -1)])
    else:
        batch["position_ids"] = at
    batch["labels"][:, 0] = -100
    flat = {k: x.reshape(1, -1) for k, x in batch.items() if k != "position_ids" and x.shape == (rows, n)}
    if model.config.model_type in ("idefics3", "smolvlm"):
        flat["pixel_values"] = batch["pixel_values"].flatten(0, 1)[None]
    return batch | flat


def changed(model: Any, case: str) -> Any:
    """The model of a case: with LoRA, a norm over images, recomputed layers, or towers that do not learn."""
    if case == "lora":
        import peft

        torch.manual_seed(1)
        names = r"model\.(language_model|text_model)\..*\.(q|v)_proj"
        lora = peft.LoraConfig(target_modules=names, r=4, init_lora_weights=False)
        model = peft.get_peft_model(model, lora)
    if case == "normalized":
        model.model.multi_modal_projector.act = torch.nn.BatchNorm1d(SIDE)  # over the tokens of all images
    if case == "checkpointed":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if case == "frozen":
        model.requires_grad_(False)
        model.get_decoder().requires_grad_(True)
        model.lm_head.requires_grad_(True)
    return model


def compared(
    rank: int, size: int, names: tuple[str, ...], case: str, options: dict[str, Any]
) -> dict[str, tuple[float, float, str]]:
    """By name: (error of the loss, of the gradients, where)."""
    found = {}
    for name in names:
        model = model_of(name)
        batch, apart = batch_for(model, case)
        model = changed(model, case)
        other = copy.deepcopy(model)
        loss = shared(other, batch, **options)
        want = plain(model, apart)
        found[name] = (abs(float(loss / want) - 1), *errors(other, model))
    return found
