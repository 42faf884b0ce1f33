"""Memory of steps of DeepSpeed's engine: predicted bytes beside those of the tensors that are alive."""

import gc
import itertools
from dataclasses import dataclass

import pytest
import torch
import transformers
from engines import config_of, in_order, start
from live import LiveBytes
from ranks import processes

import burst_mcore.deepspeed as burst
from burst_mcore.attention.runtime import buffers
from burst_plan.step.memory import ON_CPU, moments, states, total
from burst_plan.step.model import from_config
from burst_plan.step.plan import Plan

RANKS, TOKENS = 2, 1536  # few, and a small model: many CPUs multiply bfloat16 60 times slower


@dataclass(frozen=True)
class Setting:
    zero: int
    recompute: str = "none"
    fused_loss: bool = False
    kv_heads: int = 6
    vocab: int = 128

    @property
    def config(self):
        return transformers.LlamaConfig(
            hidden_size=96, num_hidden_layers=5, num_attention_heads=6, num_key_value_heads=self.kv_heads,
            intermediate_size=320, vocab_size=self.vocab, use_cache=False, max_position_embeddings=TOKENS,
        )  # fmt: skip

    @property
    def predicted(self):
        """Bytes of a rank before a step, and at the peak of its backward."""
        found = {
            name: sum(map(total, stacks))
            for name, stacks in moments(self.sizes, self.plan, TOKENS, "query", chunks=ON_CPU)
        }
        between = states(self.sizes, self.plan)
        if self.zero < 3:  # DeepSpeed lets gradients go after a step, but those of ZeRO-3
            between["gradients"] = 0
        return total(between), max(found.values())

    @property
    def gradients(self):
        return states(self.sizes, self.plan)["gradients"]

    @property
    def sizes(self):
        return from_config(self.config.to_dict(), "model")

    @property
    def plan(self):
        settings = {"zero": self.zero, "recompute": self.recompute, "fused_loss": self.fused_loss}
        return Plan(framework="deepspeed", cp=RANKS, **settings)


FAST = [
    Setting(0, kv_heads=2),
    Setting(1, recompute="full"),
    Setting(2, fused_loss=True),
    Setting(3, recompute="full", fused_loss=True, kv_heads=2),
]
EVERY = [
    Setting(*fields) for fields in itertools.product((0, 1, 2, 3), ("none", "full"), (False, True), (6, 2))
]


def _alive(but=frozenset()):
    """Tensors that are alive, but those whose storages are named."""
    gc.collect()
    tensors = [one for one in gc.get_objects() if isinstance(one, torch.Tensor) and one.device.type == "cpu"]
    return [one for one in tensors if id(one.untyped_storage()) not in but]


def _counted(rank, size, settings):
    return [_step(setting, size) for setting in settings]


def _step(setting, size):
    """Bytes of this rank before the second step, without the ring's buffers, and at the peak of the step."""
    buffers._POOL._free.clear()
    others = [one.untyped_storage() for one in _alive()]  # held, so that no storage takes the id of another
    before = {id(one) for one in others}
    model = transformers.AutoModelForCausalLM.from_config(setting.config).to(torch.bfloat16).train()
    if setting.recompute == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    small = {
        "stage3_param_persistence_threshold": 25000
    }  # shards the same matrices as 100000 in twice the width
    config = config_of(setting.zero, size, zero=small, layout="zigzag", fused_loss=setting.fused_loss) | {
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
    }
    engine, _ = start(config, model=model)
    ids = torch.randint(0, setting.vocab, (TOKENS,))
    batches = iter(burst.shard_loader(in_order([{"input_ids": ids, "labels": ids}] * 2, size), engine))
    engine.backward(engine(**next(batches)).loss)
    engine.step()
    batch = next(batches)
    pooled = sum(one.nbytes for free in buffers._POOL._free.values() for one in free)
    with LiveBytes(_alive(but=before)) as live:
        between = live.live - pooled
        engine.backward(engine(**batch).loss)
    engine.destroy()
    return between, live.peak


def _compare(settings):
    for setting, counted in zip(settings, processes(RANKS, _counted, settings)[0], strict=True):
        assert setting.predicted == pytest.approx(counted, rel=0.1), setting


def test_memory_is_that_of_the_tensors_of_an_engine():
    _compare(FAST)


@pytest.mark.slow
def test_memory_is_that_of_the_tensors_of_every_engine():
    _compare(EVERY)
