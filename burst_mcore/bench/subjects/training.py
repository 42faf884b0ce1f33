"""A training step of DeepSpeed with one attention or another: time, bytes, memory."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from burst_mcore.bench.core import Bar, Case, Derived, Method, Stage, Table, Trial, World, one_of
from burst_mcore.bench.memory import peak_meter
from burst_mcore.bench.methods.steps import Recipe

VOCABULARY = 2048
WRONG = 1e-4
"""How far a method's first loss may be from that of the model in one process, relatively."""


@dataclass(frozen=True, kw_only=True)
class TrainingCase(Case):
    """A training step of a small Llama under DeepSpeed, beside its Ulysses; the slowest rank's."""

    subject = "training"
    kind = "steps"
    repeats = 25

    ranks: int = 4
    seq: int = 4096
    """Tokens of one sequence, over all ranks."""
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 32
    layers: int = 2
    stage: int = one_of(3, range(4))
    """The ZeRO stage."""

    @classmethod
    def named(cls, device: str) -> Mapping[str, TrainingCase]:
        """Return a case for all methods, and cases in which heads do not divide."""
        return {
            "8 heads, 4 ranks": cls(),
            "3 heads, 2 ranks": cls(ranks=2, heads=3, kv_heads=3, seq=1024),
            "1 K/V head, 4 ranks": cls(ranks=4, heads=4, kv_heads=1, seq=1024),
            "6 heads, 8 ranks": cls(ranks=8, heads=6, kv_heads=3, seq=1024),
        }

    def prepare(self, world: World) -> Stage:
        start_deepspeed()
        ids = torch.randint(3, VOCABULARY, (1, self.seq), generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            want = float(llama(self)(input_ids=ids, labels=ids).loss)

        def trial(method: Method) -> Trial:
            train = engine_step(self, method.build(self, world), method.name, {"input_ids": ids})
            first = train()

            def step() -> Mapping[str, float]:
                before = written()
                train()
                return {"written": float(written() - before)}

            return Trial(
                {"": step},
                memory=lambda: peak_meter(train, "cpu"),
                check=lambda: {"first loss": first, "loss error": abs(first / want - 1)},
                bound=WRONG,
            )

        return Stage(trial)

    def derive(self, table: Table) -> Derived:
        """Yield the ratio of every method to the faster of the two Ulysses, round by round."""
        theirs = [method for method in table.methods if method.startswith("ulysses")]
        rival = table.fastest(theirs)
        if rival is not None:
            for method in table.methods:
                yield method, "wall / ulysses", table.over((method, "wall"), (rival, "wall"))

    def bars(self, device: str) -> Sequence[Bar]:
        return [Bar("auto's step over Ulysses'", "burst auto", "wall / ulysses", 1.05)]


def start_deepspeed() -> None:
    """Make DeepSpeed ready for a CPU, quietly."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    from burst_mcore.deepspeed.ranks.cpu import prepare_cpu

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")  # of its calls
    prepare_cpu()
    deepspeed.init_distributed("gloo", verbose=False)


def llama(case: TrainingCase) -> Any:
    """Return the model, the same every time."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    width = case.heads * case.head_dim
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=case.layers,
        num_attention_heads=case.heads, num_key_value_heads=case.kv_heads, head_dim=case.head_dim,
        max_position_embeddings=case.seq, attn_implementation="sdpa",
    )  # fmt: skip
    return LlamaForCausalLM(config)


def engine_step(case: TrainingCase, recipe: Recipe, name: str, sample: dict[str, Any]) -> Callable[[], float]:
    """Run a step of an engine, and return the loss; the learning rate is 0. Collective."""
    from burst_mcore.deepspeed.engine.initialize import initialize, shard_loader
    from burst_mcore.deepspeed.engine.prepare import sequence_of

    buckets = ("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size")
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "sequence_parallel_size": case.ranks,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.0, "weight_decay": 0.0}},
        "zero_optimization": {"stage": case.stage, **dict.fromkeys(buckets, 10**6)},
        "steps_per_print": 10**9,
        "burst_attention": recipe.section,
    }
    model = llama(case)
    engine, *_ = initialize(model, config)
    if recipe.attention is not None:
        from transformers import AttentionInterface

        word = f"burst_mcore_bench_{name.split('(')[-1].strip(')')}"
        AttentionInterface.register(word, recipe.attention)
        model.set_attn_implementation(word)
        sequence_of(engine.module).trust_attention()
    (batch,) = shard_loader(iter([sample]), engine)

    def step() -> float:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return step


def written() -> int:
    """Bytes that this process has written, to sockets too."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("wchar"))
