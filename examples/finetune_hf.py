"""Trains or fine-tunes a causal LM of transformers on long texts, over CP groups, by DeepSpeed's JSON.

    python examples/finetune_hf.py --config ds.json --data FILE_OR_FOLDER [--model FOLDER]     (make finetune)

Without --model a small Llama is built from its config, and a token is a byte; with it, weights, config and
tokenizer come from that folder (a config alone: weights are random). Started alone it starts --processes
ranks here; under torchrun or Slurm (finetune.slurm) it is one of theirs. It leaves metrics.jsonl, loss.png
and a checkpoint in --out, from which a second run resumes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from alone import TakenError, alone_in

from burst_plan.words import tokens

HERE = Path(__file__).resolve().parent
BYTES = 256
EXCLUDED = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
SMALL = {
    "vocab_size": BYTES + 1,
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "initializer_range": 0.1,  # 1 / sqrt(hidden_size)
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
    "bos_token_id": BYTES,
    "eos_token_id": BYTES,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


def parser_of(description: str) -> argparse.ArgumentParser:
    """The arguments that finetune_fsdp.py has, too."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--data", type=Path, default=Path(sysconfig.get_path("stdlib")), help="text file, or folder of text"
    )
    parser.add_argument("--pattern", default="*.py", help="which files of a folder")
    parser.add_argument("--model", type=Path, help="folder of config and weights; default a small Llama")
    parser.add_argument("--tokens", type=length, default=2048, help="of a sample, such as 4096, 128K or 1M")
    parser.add_argument("--steps", type=int, default=160, help="of the optimizer, in all")
    parser.add_argument("--save-every", type=int, default=40, metavar="STEPS")
    parser.add_argument("--out", type=Path, default=Path("runs/finetune"))
    parser.add_argument("--processes", type=int, default=4, help="ranks to start here")
    parser.add_argument("--goal", type=float, help="fail unless the mean loss of the last 20 steps is below")
    return parser


def arguments_of(argv: list[str]) -> argparse.Namespace:
    parser = parser_of(__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, required=True, help="DeepSpeed's JSON, with burst_attention")
    return parser.parse_args(argv)


def length(text: str) -> int:
    try:
        return tokens(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def files_of(path: Path, pattern: str) -> list[Path]:
    """A file, or the files of a folder in the order of their names."""
    if path.is_file():
        return [path]
    files = [file for file in sorted(path.rglob(pattern)) if file.is_file()]
    return [file for file in files if EXCLUDED.isdisjoint(file.relative_to(path).parts)]


def texts(path: Path, pattern: str) -> Iterator[str]:
    return (file.read_text(errors="replace") for file in files_of(path, pattern))


def bytes_of(text: str) -> torch.Tensor:
    """A token for each byte."""
    return torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8)


class Samples(torch.utils.data.Dataset[dict[str, Any]]):
    """Texts as samples of `tokens` tokens; position_ids restart with each text.

    The last sample of a data set is shorter: any length will do.
    """

    def __init__(self, documents: Iterator[torch.Tensor], tokens: int, end: int) -> None:
        parts = [torch.cat([document.to(torch.int32), torch.tensor([end])]) for document in documents]
        self.ids, self.tokens = torch.cat(parts), tokens
        self.positions = torch.cat([torch.arange(len(part), dtype=torch.int32) for part in parts])

    def __len__(self) -> int:
        return -(-len(self.ids) // self.tokens)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index >= len(self):
            raise IndexError(index)
        part = slice(index * self.tokens, (index + 1) * self.tokens)
        positions = self.positions[part].long()
        # A text that was cut begins again at 0.
        positions = torch.minimum(positions, torch.arange(len(positions)))
        return {"input_ids": self.ids[part].long(), "position_ids": positions}


def model_and_samples(arguments: argparse.Namespace) -> tuple[Any, Samples]:
    """The model in float32 on every rank, and its data."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig

    torch.manual_seed(1234)
    found = texts(arguments.data, arguments.pattern)
    if arguments.model is None:
        config = LlamaConfig(**SMALL, max_position_embeddings=arguments.tokens)
        model = AutoModelForCausalLM.from_config(config)
        return model, Samples(map(bytes_of, found), arguments.tokens, BYTES)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    if any(arguments.model.glob("*.safetensors")) or any(arguments.model.glob("*.bin")):
        model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    else:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(arguments.model))
    tokens = (torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in found)
    return model, Samples(tokens, arguments.tokens, tokenizer.eos_token_id)


def batches(loader: Any, skip: int) -> Iterator[dict[str, Any]]:
    """Batches of all epochs, each shuffled anew, without the first `skip`: as if they had been taken."""
    for epoch in itertools.count():
        loader.set_epoch(epoch)
        for batch in loader:
            if skip:
                skip -= 1
                continue
            yield batch


def train(arguments: argparse.Namespace) -> int:
    """On every rank: 0, or 1 if the goal was not reached."""
    import deepspeed

    import burst_mcore.deepspeed as burst

    rank = int(os.environ["RANK"])
    if rank:  # rank 0 says it for all
        deepspeed.utils.logger.setLevel(logging.ERROR)
        logging.getLogger("burst_mcore").setLevel(logging.ERROR)
    model, samples = model_and_samples(arguments)
    engine, _, loader, _ = burst.initialize(model=model, config=arguments.config, training_data=samples)
    checkpoint = arguments.out / "checkpoint"
    done = 0
    if (checkpoint / "latest").exists():
        _, client = engine.load_checkpoint(str(checkpoint))
        done = client["step"]
    if done >= arguments.steps:
        if rank == 0:
            print(f"all {done} steps are done: ask for more (--steps), or remove {arguments.out}")
        return 0
    losses = []
    with (arguments.out / "metrics.jsonl").open("a") as metrics:
        for row in steps_of(engine, loader, done, arguments.steps):
            losses.append(row["loss"])
            if rank == 0:
                metrics.write(json.dumps(row) + "\n")
                metrics.flush()
            if row["step"] % arguments.save_every == 0 or row["step"] == arguments.steps:
                engine.save_checkpoint(str(checkpoint), client_state={"step": row["step"]})
    return report(arguments, losses[-20:]) if rank == 0 else 0


def steps_of(engine: Any, loader: Any, done: int, end: int) -> Iterator[dict[str, Any]]:
    """Train from step `done` to `end`: after each, its figures over all ranks."""
    from tqdm import tqdm

    gas, rank = engine.gradient_accumulation_steps(), torch.distributed.get_rank()
    stream = batches(loader, done * gas)
    last = time.monotonic()
    with tqdm(total=end, initial=done, unit="step", disable=rank > 0, dynamic_ncols=True) as bar:
        for step in range(done + 1, end + 1):
            total, tokens = torch.zeros(()), 0
            for _ in range(gas):
                batch = next(stream)
                loss = engine(**batch).loss
                engine.backward(loss)
                engine.step()
                total += loss.detach().cpu() / gas
                tokens += batch["input_ids"].numel()
            figures = torch.tensor([total.item() / torch.distributed.get_world_size(), tokens])
            _sum_over_ranks(figures, engine.device)
            now = time.monotonic()
            seconds, last = now - last, now
            row = {
                "step": step,
                "loss": figures[0].item(),
                "grad_norm": float(engine.get_global_grad_norm() or 0.0),
                "tokens": int(figures[1]),
                "seconds": seconds,
            }
            bar.set_postfix_str(
                f"loss {row['loss']:.3f}, {row['tokens'] / seconds:,.0f} tokens/s", refresh=False
            )
            bar.update()
            yield row


def report(arguments: argparse.Namespace, losses: list[float]) -> int:
    """Say what came out; 1 if the goal was not reached."""
    plot(arguments.out)
    print(f"loss of the last {len(losses)} steps: {mean(losses):.3f} nats a token")
    print(f"metrics, curve, checkpoint: {arguments.out}/metrics.jsonl, loss.png, checkpoint")
    return missed(arguments.goal, losses)


def missed(goal: float | None, losses: list[float]) -> int:
    """1, and a line that says so, if the mean loss is not below the goal."""
    if goal is None or not losses or mean(losses) < goal:
        return 0
    print(f"goal missed: the loss should have fallen below {goal}, it is {mean(losses):.3f}", file=sys.stderr)
    return 1


def losses_of(folder: Path) -> dict[int, float]:
    """The loss of every step, by its number; of a step that was run again, the last."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows}


def _sum_over_ranks(figures: torch.Tensor, device: Any) -> None:
    """Over all ranks, in place."""
    there = figures.to(device)
    torch.distributed.all_reduce(there)
    figures.copy_(there)


def plot(folder: Path) -> None:
    """Draw the loss of every step."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it warns of a home that it cannot write to
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps, losses = map(list, zip(*losses_of(folder).items(), strict=True))
    smooth = [mean(losses[max(0, i - 9) : i + 1]) for i in range(len(losses))]
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(steps, losses, linewidth=0.8, alpha=0.4, label="each step")
    axes.plot(steps, smooth, linewidth=1.8, label="mean of the last 10")
    axes.set(xlabel="step", ylabel="nats a token", title="Training loss")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(folder / "loss.png", dpi=120)


def run(
    arguments: argparse.Namespace, train: Callable[[argparse.Namespace], int], script: str, argv: list[str]
) -> int:
    """Train as one of torchrun's ranks, or start the ranks here and look at the goal."""
    if not files_of(arguments.data, arguments.pattern):
        sys.exit(f"{arguments.data} has no file {arguments.pattern}: give --data or --pattern")
    arguments.out.mkdir(parents=True, exist_ok=True)
    if "RANK" in os.environ:
        try:
            return train(arguments)
        finally:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
    threads = max(1, (os.cpu_count() or 1) // arguments.processes)
    path = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
    quiet = {"PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    if not torch.cuda.is_available():
        quiet["DS_ACCELERATOR"] = "cpu"  # which DeepSpeed would find out too, with a warning on every rank
    environment = {"OMP_NUM_THREADS": str(threads), **quiet, **os.environ, "PYTHONPATH": path}
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(arguments.processes)]
    # The goal is checked here: to an exit status of a rank torchrun would add a page.
    ours = [sys.executable, *start, script, *argv, "--goal", "inf"]
    try:
        with alone_in(arguments.out):
            status = subprocess.run(ours, env=environment, check=False).returncode
    except TakenError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit("interrupted: run again to resume from the last checkpoint, if there is one")
    return status or missed(arguments.goal, list(losses_of(arguments.out).values())[-20:])


if __name__ == "__main__":
    sys.exit(run(arguments_of(sys.argv[1:]), train, __file__, sys.argv[1:]))
