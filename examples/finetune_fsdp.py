"""Trains or fine-tunes a causal LM of transformers on long texts by FSDP2, in a loop by hand, over DP x CP.

    python examples/finetune_fsdp.py --cp 2 --data FILE_OR_FOLDER [--model FOLDER]     (make finetune)

The job is that of finetune_hf.py, without DeepSpeed: burst_mcore.torch.parallelize shards sequences over --cp
ranks. It leaves metrics.jsonl, loss.png and distributed checkpoints in --out, a folder for each saved step. A
second run resumes from the last of them that is whole, at another --cp too.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from finetune_hf import batches, model_and_samples, parser_of, report, run
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

from burst_mcore.torch import parallelize
from burst_mcore.transformers.data.batches import collated

WARMUP = 10


def arguments_of(argv: list[str]) -> argparse.Namespace:
    parser = parser_of(__doc__.splitlines()[0])
    parser.add_argument("--cp", type=int, default=2, help="ranks that share a sequence")
    parser.add_argument("--lr", type=float, default=3e-3)
    arguments = parser.parse_args(argv)
    ranks = int(os.environ.get("WORLD_SIZE", arguments.processes))
    if arguments.cp < 1 or ranks % arguments.cp:
        parser.error(f"--cp must divide the number of ranks, {ranks}, got {arguments.cp}")
    return arguments


def train(arguments: argparse.Namespace) -> int:
    """On every rank: 0, or 1 if the goal was not reached."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    replicas = int(os.environ["WORLD_SIZE"]) // arguments.cp
    mesh = init_device_mesh(kind, (replicas, arguments.cp), mesh_dim_names=("dp", "cp"))
    if dist.get_rank():  # rank 0 says it for all
        logging.getLogger("burst_mcore").setLevel(logging.ERROR)
    model, samples = model_and_samples(arguments)
    model.to(kind)
    cp = parallelize(model, mesh["cp"], config={"layout": "striped"}, checkpointing="segment")
    both = mesh["dp", "cp"]._flatten("dp_cp")
    for layer in model.model.layers:
        fully_shard(layer, mesh=both)
    fully_shard(model, mesh=both)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, betas=(0.9, 0.95), weight_decay=0.0)
    sampler: Any = DistributedSampler(samples, num_replicas=replicas, rank=mesh.get_local_rank("dp"))
    loader = cp.loader(DataLoader(samples, batch_size=1, sampler=sampler, collate_fn=collated))
    checkpoint = arguments.out / "checkpoint"
    done = load(checkpoint, model, optimizer)
    if done >= arguments.steps:
        if dist.get_rank() == 0:
            print(f"all {done} steps are done: ask for more (--steps), or remove {arguments.out}")
        return 0
    losses = []
    with (arguments.out / "metrics.jsonl").open("a") as metrics:
        for row in steps_of(model, optimizer, batches(loader, done), done, arguments):
            losses.append(row["loss"])
            if dist.get_rank() == 0:
                metrics.write(json.dumps(row) + "\n")
                metrics.flush()
            if row["step"] % arguments.save_every == 0 or row["step"] == arguments.steps:
                save(checkpoint, model, optimizer, row["step"])
    return report(arguments, losses[-20:]) if dist.get_rank() == 0 else 0


def steps_of(
    model: Any, optimizer: Any, stream: Iterator[dict[str, Any]], done: int, arguments: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Train from step `done` to the last: after each, its figures over all ranks."""
    from tqdm import tqdm

    end, last, rank = arguments.steps, time.monotonic(), dist.get_rank()
    with tqdm(total=end, initial=done, unit="step", disable=rank > 0, dynamic_ncols=True) as bar:
        for step in range(done + 1, end + 1):
            for group in optimizer.param_groups:
                group["lr"] = arguments.lr * rate(step, end)
            batch = next(stream)
            loss = model(**batch).loss  # of the whole sequence
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            figures = torch.tensor([loss.item(), batch["input_ids"].numel()], device=loss.device)
            dist.all_reduce(figures)
            now = time.monotonic()
            seconds, last = now - last, now
            row = {
                "step": step,
                "loss": figures[0].item() / dist.get_world_size(),
                "grad_norm": norm.full_tensor().item(),
                "tokens": int(figures[1]),
                "seconds": seconds,
            }
            bar.set_postfix_str(
                f"loss {row['loss']:.3f}, {row['tokens'] / seconds:,.0f} tokens/s", refresh=False
            )
            bar.update()
            yield row


def rate(step: int, end: int) -> float:
    """The share of the learning rate: it rises for WARMUP steps, and falls by a cosine."""
    return min(step / WARMUP, 1.0) * (0.5 + 0.5 * math.cos(math.pi * min(step / end, 1.0)))


def save(path: Path, model: Any, optimizer: Any, step: int) -> None:
    """Write the checkpoint of a step into a folder of its own, each rank its shards."""
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "step": step}
    dcp.save(state, checkpoint_id=str(path / f"step_{step}"))


def load(path: Path, model: Any, optimizer: Any) -> int:
    """Read the last whole checkpoint, if there is one, in shards of today's mesh; return its step."""
    whole = [*path.glob("step_*/.metadata")]  # which torch writes last: a run may end while it saves
    if not whole:
        return 0
    last = max((file.parent for file in whole), key=lambda folder: int(folder.name.removeprefix("step_")))
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "step": 0}
    dcp.load(state, checkpoint_id=str(last))
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    return int(state["step"])


if __name__ == "__main__":
    sys.exit(run(arguments_of(sys.argv[1:]), train, __file__, sys.argv[1:]))
