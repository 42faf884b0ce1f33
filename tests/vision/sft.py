"""TRL's SFT on pictures: a tiny LLaVA with its processor, over CP groups and in one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from families import LAST, PATCH, PLACE, SIDE, model_of

NAMES = {"<pad>": 0, "<bos>": 1, "<eos>": 2, "<image>": PLACE}


def processor() -> Any:
    """Words w3, w4, ... are tokens 3, 4, ...; an image becomes 4 x 4 patches."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import CLIPImageProcessorPil, LlavaProcessor, PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel(NAMES | {f"w{i}": i for i in range(3, LAST)}, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>",
        additional_special_tokens=["<image>"], model_max_length=512,
    )  # fmt: skip
    side = {"height": SIDE, "width": SIDE}
    images = CLIPImageProcessorPil(size=side, crop_size=side)
    return LlavaProcessor(
        images, words, patch_size=PATCH, vision_feature_select_strategy="default", image_token="<image>",
        num_additional_image_tokens=1,
    )  # fmt: skip


def samples(count: int) -> list[dict[str, Any]]:
    """Two images a row, of unequal sizes, between words."""
    from PIL import Image

    draw = torch.Generator().manual_seed(5)

    def words(n: int) -> str:
        return " ".join(f"w{i}" for i in torch.randint(3, LAST, (n,), generator=draw).tolist())

    def image(high: int, wide: int) -> Any:
        pixels = torch.randint(0, 256, (high, wide, 3), generator=draw, dtype=torch.uint8)
        return Image.fromarray(pixels.numpy())

    return [
        {
            "text": f"{words(5)} <image> {words(9 + 4 * (i % 3))} <image> {words(7)}",
            "images": [image(16, 16 + 8 * (i % 2)), image(24, 16)],
        }
        for i in range(count)
    ]


def trained(folder: str, how: str, sp: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """(losses, weights) of TRL's SFTTrainer: over CP groups on DeepSpeed if how is "sp"."""
    from causal_lms import THREE_STEPS
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    options: dict[str, Any] = {**THREE_STEPS, "bf16": False, "max_length": None, "output_dir": folder}
    if how == "sp":
        from test_trainer import parallelism, sections

        options |= {"deepspeed": sections(3), "parallelism_config": parallelism(sp)}
    trainer = SFTTrainer(
        model_of("llava"), SFTConfig(**options), train_dataset=Dataset.from_list(samples(6)),
        eval_dataset=Dataset.from_list(samples(3)), processing_class=processor(),
    )  # fmt: skip
    trainer.train()
    found = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    found.append(trainer.evaluate()["eval_loss"])
    return found, weights(trainer)


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    named = dict(trainer.accelerator.unwrap_model(trainer.model).named_parameters())
    if trainer.is_deepspeed_enabled:
        import deepspeed

        return {name: deepspeed.utils.safe_get_full_fp32_param(p).clone() for name, p in named.items()}
    return {
        k: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for k, p in named.items()
    }


def over_ranks(rank: int, size: int, how: str, folder: str) -> Any:
    torch.use_deterministic_algorithms(False)
    if how == "sp":
        from engines import quiet

        import burst_mcore.deepspeed as burst

        quiet()
        burst.replace_ulysses()
    return trained(folder, how, dist.get_world_size() if how != "alone" else 1)
