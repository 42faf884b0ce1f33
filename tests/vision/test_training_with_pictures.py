"""Training with pictures on DeepSpeed, FSDP2, DDP and TRL, held to one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from equal import GRIDS, TOKENS
from families import PATCH, PLACE, SIDE, batch_of, model_of, pictures
from loops import assert_alike, whole_weights
from ranks import processes
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from trainers import tokenizer, words

from burst_mcore.torch import parallelize

STEPS, RATE = 2, 0.05


def batches(model: Any, replica: int = 0) -> list[dict[str, Tensor]]:
    """A row with two images, then one without the smallest: each replica begins with another."""
    whole = pictures(model, GRIDS)
    two = batch_of(model, [[3, 25, 55]], TOKENS, whole)
    one = batch_of(model, [[9]], TOKENS - 6, pictures(model, GRIDS[2:]))
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


def on_deepspeed(rank: int, size: int, name: str, stage: int) -> Any:
    """The same on an engine of `initialize`, two ranks a CP group."""
    import deepspeed
    from engines import config_of, start

    from burst_mcore.deepspeed import shard_loader

    torch.use_deterministic_algorithms(False)
    model = model_of(name)
    rows = DataLoader(batches(model, rank // 2), batch_size=None)
    config = config_of(stage, 2) | {"optimizer": {"type": "SGD", "params": {"lr": RATE}}}
    engine, _ = start(config, model=model)
    losses = []
    for batch in shard_loader(rows, engine):
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(mean_of(loss))
    get = deepspeed.utils.safe_get_full_fp32_param
    return losses, {key: get(p) if stage else p.detach() for key, p in engine.module.named_parameters()}


def by_hand(rank: int, size: int, name: str, wrapper: str) -> Any:
    """The same in a loop under FSDP2 or DDP."""
    torch.use_deterministic_algorithms(False)
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "cp"))
    model = wrapped = model_of(name)
    rows = batches(model, rank // 2)
    cp = parallelize(model, mesh["cp"])
    if wrapper == "ddp":
        wrapped = DistributedDataParallel(model)
    else:
        both = mesh["dp", "cp"]._flatten("dp_cp")
        towers = [m for m in model.modules() if type(m).__name__.endswith(("VisionBlock", "EncoderLayer"))]
        for layer in [*model.get_decoder().layers, *towers, model]:
            fully_shard(layer, mesh=both)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    for batch in cp.loader(rows):
        loss = wrapped(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_of(loss))
    return losses, whole_weights(model)


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


def by_trl(rank: int, size: int, folder: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """(losses, weights) of TRL's SFTTrainer: of one process, or over a CP group on DeepSpeed."""
    from datasets import Dataset
    from engines import quiet
    from test_trainer import arguments_of, weights
    from trl import SFTConfig, SFTTrainer

    import burst_mcore.deepspeed as burst

    torch.use_deterministic_algorithms(False)
    if size > 1:
        quiet()
        burst.replace_ulysses()
    model = model_of("llava")  # before the arguments, by which ZeRO-3 shards parameters as they are made
    own = {"kind": SFTConfig, "stage": 3, "bf16": False, "max_length": None}
    arguments = arguments_of(folder, size if size > 1 else None, **own)
    trainer = SFTTrainer(
        model, arguments, train_dataset=Dataset.from_list(samples(6)),
        eval_dataset=Dataset.from_list(samples(3)), processing_class=processor(),
    )  # fmt: skip
    trainer.train()
    found = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return [*found, trainer.evaluate()["eval_loss"]], weights(trainer)


def check(found, want):
    assert_alike(found, want, 1e-5, 1e-6)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_deepspeed(stage):
    pytest.importorskip("deepspeed")
    check(processes(2, on_deepspeed, "qwen3_vl", stage), one_process("qwen3_vl"))


def test_deepspeed_on_two_groups():
    pytest.importorskip("deepspeed")
    check(processes(4, on_deepspeed, "gemma3", 3), one_process("gemma3", 2))


@pytest.mark.parametrize("wrapper", ["fsdp", "ddp"])
def test_loops_by_hand(wrapper):
    check(processes(2, by_hand, "qwen3_vl", wrapper), one_process("qwen3_vl"))


def test_a_loop_on_two_groups():
    check(processes(4, by_hand, "gemma3", "fsdp"), one_process("gemma3", 2))


def test_trl_with_two_images_a_row(tmp_path):
    pytest.importorskip("deepspeed")
    pytest.importorskip("trl")
    (want,) = processes(1, by_trl, str(tmp_path))
    check(processes(2, by_trl, str(tmp_path)), want)
