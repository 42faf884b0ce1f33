"""Training with pictures on DeepSpeed, FSDP2, DDP and TRL, held to one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from equal import GRIDS, TOKENS
from families import PATCH, PLACE, SIDE, batch_of, model_of
from loops import assert_alike, whole_weights
from ranks import processes
from test_accelerate import fsdp_arguments, start_fsdp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from trainers import logged, tokenizer, words

from burst_mcore.torch import parallelize, replace_context_parallel

STEPS, RATE = 2, 0.05


def batches(model: Any, replica: int = 0) -> list[dict[str, Tensor]]:
    """A row with two images, then one without the smallest: each replica begins with another."""
    two = batch_of(model, TOKENS, {"image": (GRIDS, [[3, 25, 55]])})
    one = batch_of(model, TOKENS - 6, {"image": (GRIDS[2:], [[9]])})
    return [two, one] if replica == 0 else [one, two]


def one_process(name: str, replicas: int = 1) -> tuple[list[float], dict[str, Tensor]]:
    """(losses, weights) after all steps."""
    model = model_of(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    for step in range(STEPS):
        each = [model(**batches(model, r)[step], use_cache=False).loss for r in range(replicas)]
        loss = torch.stack(each).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses, {key: p.detach().clone() for key, p in model.named_parameters()}


def trained(rank: int, size: int, name: str, way: str | int) -> tuple[list[float], dict[str, Tensor]]:
    """The same over CP groups of two ranks; way: "fsdp", "ddp", or a stage of ZeRO on DeepSpeed."""
    model = model_of(name)
    rows = batches(model, rank // 2)
    if isinstance(way, int):
        import deepspeed
        from engines import config_of, start

        from burst_mcore.deepspeed import shard_loader

        config = config_of(way, 2) | {"optimizer": {"type": "SGD", "params": {"lr": RATE}}}
        engine, _ = start(config, model=model)
        losses = _steps(
            shard_loader(DataLoader(rows, batch_size=None), engine), engine, engine.backward, engine
        )
        get = deepspeed.utils.safe_get_full_fp32_param
        return losses, {key: get(p) if way else p.detach() for key, p in engine.module.named_parameters()}
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "cp"))
    cp = parallelize(model, mesh["cp"])
    wrapped = DistributedDataParallel(model) if way == "ddp" else model
    if way == "fsdp":
        both = mesh["dp", "cp"]._flatten("dp_cp")
        towers = [m for m in model.modules() if type(m).__name__.endswith(("VisionBlock", "EncoderLayer"))]
        for layer in [*model.get_decoder().layers, *towers, model]:
            fully_shard(layer, mesh=both)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    return _steps(cp.loader(rows), wrapped, Tensor.backward, optimizer), whole_weights(model)


def _steps(loader: Any, model: Any, backward: Any, optimizer: Any) -> list[float]:
    """The losses of a training, each the mean over all ranks."""
    losses = []
    for batch in loader:
        loss = model(**batch).loss
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_of(loss))
    return losses


def mean_of(loss: Tensor) -> float:
    whole = loss.detach().clone()
    dist.all_reduce(whole)
    return float(whole) / dist.get_world_size()


def processor() -> Any:
    """Words w3, w4, ... are tokens 3, 4, ...; an image becomes 4 x 4 patches."""
    from transformers import CLIPImageProcessorPil, LlavaProcessor

    text = tokenizer(PLACE)
    text.add_special_tokens({"additional_special_tokens": ["<image>"]})
    assert text.convert_tokens_to_ids("<image>") == PLACE
    side = {"height": SIDE, "width": SIDE}
    images = CLIPImageProcessorPil(size=side, crop_size=side)
    return LlavaProcessor(
        images, text, patch_size=PATCH, vision_feature_select_strategy="default", image_token="<image>",
        num_additional_image_tokens=1,
    )  # fmt: skip


def samples(count: int) -> list[dict[str, Any]]:
    """Two images a row, of unequal sizes, between words."""
    from PIL import Image

    draw = torch.Generator().manual_seed(5)

    def image(high: int, wide: int) -> Any:
        pixels = torch.randint(0, 256, (high, wide, 3), generator=draw, dtype=torch.uint8)
        return Image.fromarray(pixels.numpy())

    return [
        {
            "text": f"{words(5, draw)} <image> {words(9 + 4 * (i % 3), draw)} <image> {words(7, draw)}",
            "images": [image(16, 16 + 8 * (i % 2)), image(24, 16)],
        }
        for i in range(count)
    ]


def by_trainer(
    rank: int, size: int, folder: str, kind: str, way: str
) -> tuple[list[float], dict[str, Tensor]]:
    """(losses, weights) of TRL's SFTTrainer or the Trainer: of one process ("alone"), or over a CP group."""
    from datasets import Dataset
    from transformers import Trainer
    from trl import SFTConfig, SFTTrainer
    from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

    options: dict[str, Any] = {"kind": SFTConfig, "bf16": False, "max_length": None} if kind == "SFT" else {}
    model = model_of("llava")  # before the arguments, by which ZeRO-3 shards parameters as they are made
    if way == "deepspeed":
        from engines import quiet
        from test_trainer import arguments_of, weights

        from burst_mcore.deepspeed import replace_ulysses

        quiet()
        replace_ulysses()
        arguments = arguments_of(folder, size, stage=3, **options)
    else:
        if way == "fsdp":
            start_fsdp(rank)
            replace_context_parallel()
        layers = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer", "CLIPEncoderLayer"]}
        arguments = fsdp_arguments(folder, size if way == "fsdp" else None, fsdp_config=layers, **options)
    data = {"train_dataset": Dataset.from_list(samples(6)), "eval_dataset": Dataset.from_list(samples(3))}
    if kind == "SFT":
        trainer = SFTTrainer(model, arguments, **data, processing_class=processor())
    else:
        collator = DataCollatorForVisionLanguageModeling(processor())
        trainer = Trainer(model, arguments, **data, data_collator=collator)
    trainer.train()
    losses = [*logged(trainer, "loss")["loss"], trainer.evaluate()["eval_loss"]]
    if way == "deepspeed":
        return losses, weights(trainer)
    return losses, whole_weights(trainer.accelerator.unwrap_model(trainer.model))


def check(found, want):
    assert_alike(found, want, 1e-5, 1e-6)


@pytest.mark.parametrize("way", [0, 1, 2, 3, "fsdp", "ddp"])
def test_loops(way):
    pytest.importorskip("engines" if isinstance(way, int) else "torch")
    want = one_process("qwen3_vl")
    check(processes(2, trained, "qwen3_vl", way), want)


@pytest.mark.parametrize("way", [3, "fsdp"])
def test_loops_on_two_groups(way):
    pytest.importorskip("engines" if isinstance(way, int) else "torch")
    want = one_process("gemma3", 2)
    check(processes(4, trained, "gemma3", way), want)


@pytest.mark.parametrize(
    ("kind", "way"),
    [("SFT", "deepspeed"), ("SFT", "fsdp"), pytest.param("Trainer", "fsdp", marks=pytest.mark.slow)],
)
def test_trainers_with_two_images_a_row(tmp_path, kind, way):
    pytest.importorskip("engines" if way == "deepspeed" else "accelerate")
    assert pytest.importorskip("trl").SFTTrainer
    (want,) = processes(1, by_trainer, str(tmp_path), kind, "alone")
    check(processes(2, by_trainer, str(tmp_path), kind, way), want)
