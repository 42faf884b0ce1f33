"""The Trainer with ParallelismConfig(cp_size=2) and FSDP2, held to the Trainer of one process."""

import os
from functools import partial

import pytest
import recipes
import torch
import torch.distributed as dist
from causal_lms import THREE_STEPS, VOCABULARY, dataset, hybrid_of, model_of, worst
from loops import whole_weights
from ranks import processes
from trainers import accuracy, forget, logged, tokenizer, trl_trained, words

from burst_mcore.torch import UnsupportedError, parallelize, replace_context_parallel
from burst_mcore.transformers.data.batches import collated

pytest.importorskip("accelerate")

CP = 2
GROUP = 4
"""Rollouts of a prompt."""


def _have_fsdp_on_cpus():
    """Accelerate takes FSDP for GPUs alone: here its state says FSDP, and all else is its own."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    own = AcceleratorState.__init__

    def __init__(self, *args, fsdp_plugin=None, **kwargs):  # noqa: N807
        own(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP  # as its own does

    AcceleratorState.__init__ = __init__


def start_fsdp(rank):
    """Let this rank be one of Accelerate's under FSDP."""
    os.environ.update(LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
    _have_fsdp_on_cpus()
    forget()


def _alike(found, wanted, bar):
    """Hold (figures, weights) of each rank to those of one process."""
    want, theirs = wanted
    for said, weights in found:
        for name, values in want.items():
            part = said[name][: len(values)] if isinstance(values, list) else said[name]
            assert part == pytest.approx(values, rel=2e-4, abs=1e-6), name
        assert worst(weights, theirs) < bar


def fsdp_arguments(folder, cp, kind=None, fsdp_config=(), **options):
    """Arguments of a trainer over CP groups on FSDP2; of one process with cp None."""
    from accelerate.parallelism_config import ParallelismConfig
    from transformers import TrainingArguments

    if cp is not None:
        os.environ["ACCELERATE_USE_FSDP"] = "true"
        world = dist.get_world_size()
        sizes = {"dp_shard_size": world // cp} if world > cp else {}
        options |= {
            "fsdp": True,
            "fsdp_config": {"version": 2, "state_dict_type": "SHARDED_STATE_DICT", **dict(fsdp_config)},
            "parallelism_config": ParallelismConfig(cp_size=cp, **sizes),
        }
    return (kind or TrainingArguments)(**{"output_dir": folder, **THREE_STEPS, **options})


def _in_halves(samples):
    """Two rows of a batch for each sample."""
    halves = [{name: x[at : at + 18] for name, x in each.items()} for each in samples for at in (0, 18)]
    return collated(halves)


def _trained(
    folder, cp, data, *, metrics=None, resumed=False, ends=(), halves=False, hybrid=False, **options
):
    """(figures by name, weights).

    ends: (rows, rows of a batch) of further evaluations; halves: whether one more has two rows a sample.
    """
    from transformers import Trainer

    folder, model = f"{folder}/{cp}", hybrid_of() if hybrid else model_of()
    trainer = Trainer(
        model, fsdp_arguments(folder, cp, **options), train_dataset=data, eval_dataset=data[:3],
        data_collator=collated, compute_metrics=metrics,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2" if resumed else None)
    evaluated = trainer.evaluate()
    found = logged(trainer, "loss", "grad_norm", "num_input_tokens_seen")
    found |= {name: evaluated[name] for name in ("eval_loss", "eval_accuracy") if name in evaluated}
    for rows, batch in ends:
        trainer.args.per_device_eval_batch_size = batch
        evaluated = trainer.evaluate(data[:rows])
        found[f"{rows} by {batch}"] = evaluated["eval_loss"], evaluated["eval_accuracy"]
    if halves:
        trainer.data_collator, trainer.args.per_device_eval_batch_size = _in_halves, 4
        found["halves"] = trainer.evaluate(data[3:8])["eval_loss"]
    return found, whole_weights(trainer.accelerator.unwrap_model(trainer.model))


def _of_ranks(rank, size, folder, cases):
    start_fsdp(rank)
    found = []
    for options in cases:
        forget()
        replace_context_parallel(config={"layout": "zigzag" if "hybrid" in options else "striped"})
        found.append(_trained(folder, CP, **options))
    forget()
    with pytest.raises(UnsupportedError, match=r"\(loss\): label_smoothing_factor is not supported"):
        _trained(folder, CP, **cases[0], label_smoothing_factor=0.1)
    return found


def _held(folder, ranks, *cases):
    replicas = ranks // CP
    wanted = []
    for options in cases:
        forget()
        more = {"per_device_train_batch_size": replicas} if replicas > 1 else {}
        wanted.append(_trained(folder, None, **{**options, **more}))
    for found, want in zip(
        zip(*processes(ranks, _of_ranks, folder, cases), strict=True), wanted, strict=True
    ):
        _alike(found, want, 2e-6)


def test_a_trainer(tmp_path):
    options = {"gradient_accumulation_steps": 2, "include_num_input_tokens_seen": "all"}
    whole = {"data": dataset(8, tokens=37), "metrics": accuracy, "halves": True, **options}
    _held(str(tmp_path), 2, whole, {"data": dataset(3), "hybrid": True})


def _trl(folder, cp, kind, hybrid=False, **options):
    """(figures, weights) of TRL's trainer of a kind."""
    import trl

    options = {"max_length": 48, "bf16": False, **options}
    made = partial(fsdp_arguments, folder, cp, getattr(trl, f"{kind}Config"), **options)
    figures, trainer = trl_trained(kind, made, hybrid=hybrid)
    assert getattr(trainer.args, "packing", False) == options.get("packing", False)
    del figures["num_tokens"]
    return figures, whole_weights(trainer.accelerator.unwrap_model(trainer.model))


def _trl_of_ranks(rank, size, folder, kind, options):
    start_fsdp(rank)
    replace_context_parallel()
    return _trl(folder, CP, kind, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "ranks", "options"),
    [
        ("SFT", 2, {"gradient_accumulation_steps": 2}),
        ("SFT", 2, {"per_device_train_batch_size": 2, "padding_free": True, "max_length": None}),
        ("SFT", 2, {"packing": True, "eval_packing": True, "per_device_eval_batch_size": 2}),
        ("SFT", 2, {"hybrid": True}),
        ("SFT", 4, {"per_device_eval_batch_size": 2}),
        ("DPO", 2, {"per_device_train_batch_size": 2}),
    ],
)
def test_trl(tmp_path, kind, ranks, options):
    assert pytest.importorskip("trl").SFTTrainer  # whose file is imported here once: ranks are forked
    forget()
    more = {"per_device_train_batch_size": ranks // CP} if ranks > CP else {}
    want, theirs = _trl(str(tmp_path / "one"), None, kind, **{**options, **more})
    if ranks > CP:  # TRL's mean over replicas counts one that has no row of the last load
        del want["evaluation"][1:]
    _alike(processes(ranks, _trl_of_ranks, str(tmp_path), kind, options), (want, theirs), 3e-6)


def _without_a_norm(rank, size):
    from accelerate.utils import fsdp_utils
    from trl.trainer.utils import add_fused_lm_head

    model = model_of()
    add_fused_lm_head(model)
    parallelize(model, dist.group.WORLD, reduction="mean")
    del model.model.norm
    replace_context_parallel()
    with pytest.raises(UnsupportedError) as refused:
        fsdp_utils._find_final_norm(model)
    return str(refused.value)


def test_trls_head_without_a_norm_before_it_is_refused():
    pytest.importorskip("trl")
    for said in processes(2, _without_a_norm):
        assert "LlamaForCausalLM has no last norm, with which FSDP2 gathers the LM head for TRL" in said


def _first_of_a_sequence():
    return not dist.is_initialized() or dist.get_rank() % CP == 0


def _rewards(completion_ids, **_):
    """A number each; ranks of a sequence but the first judge otherwise, as a model might."""
    found = [sum(ids) / 100 % 3 for ids in completion_ids]
    return found if _first_of_a_sequence() else found[::-1]


def _rollouts(prompts, trainer):
    """Completions of lengths of their own; ranks of a sequence but the first get others, as of a server."""
    ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
    found = []
    for i, prompt in enumerate(ids):
        draw = torch.Generator().manual_seed(sum(prompt) + i % GROUP if _first_of_a_sequence() else 99)
        found.append(torch.randint(3, VOCABULARY, (7 + 3 * (i % GROUP),), generator=draw).tolist())
    return {"prompt_ids": ids, "completion_ids": found, "logprobs": None}


def _grpo(folder, cp, **options):
    """(figures of TRL's GRPO by name, weights)."""
    import trl
    from datasets import Dataset

    settings = {
        **THREE_STEPS, "output_dir": folder, "bf16": False, "num_generations": GROUP, "beta": 0.04,
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_completion_length": 12,
        "per_device_eval_batch_size": GROUP, "eval_strategy": "epoch",
    }  # fmt: skip
    if cp is not None:
        os.environ["ACCELERATE_USE_FSDP"] = "true"
        settings |= {"fsdp": True, "fsdp_config": {"version": 2, "state_dict_type": "SHARDED_STATE_DICT"}}
    draw = torch.Generator().manual_seed(5)
    lengths = [11 + 4 * (i % 3) for i in range(8)]
    model, kind = model_of(), trl.GRPOTrainer
    model.config._name_or_path = f"{folder}/reference"
    args = trl.GRPOConfig(**{**settings, **options})
    if cp is not None:
        names = recipes.run("class SequenceGRPOTrainer")
        args, kind = names["over_sequences"](args, cp), names["SequenceGRPOTrainer"]
    trainer = kind(
        model, _rewards, args=args, processing_class=tokenizer(),
        train_dataset=Dataset.from_list([{"prompt": words(n, draw)} for n in lengths]),
        eval_dataset=Dataset.from_list([{"prompt": words(n, draw)} for n in lengths]),
        rollout_func=_rollouts,
    )  # fmt: skip
    trainer.train()
    figures = logged(trainer, "loss", "grad_norm", "kl", "entropy", "reward")
    evaluated = trainer.evaluate()
    figures |= {name: evaluated[name] for name in ("eval_loss", "eval_reward")}
    return figures, whole_weights(trainer.accelerator.unwrap_model(trainer.model))


def _grpo_of_ranks(rank, size, folder, options):
    start_fsdp(rank)
    odd = {"scale_rewards": "batch"}, {"top_entropy_quantile": 0.5}, {"per_device_train_batch_size": 3}
    for more in odd if size == CP else ():
        with pytest.raises(ValueError, match="would count a row once for each rank|must hold whole groups"):
            _grpo(folder, CP, **{**options, **more})
        forget()
    return _grpo(folder, CP, **options)


@pytest.mark.parametrize(
    ("ranks", "options"),
    [(2, {"num_iterations": 2, "max_steps": 4}), pytest.param(4, {}, marks=pytest.mark.slow)],
)
def test_grpo_of_the_page_of_recipes(tmp_path, ranks, options):
    assert pytest.importorskip("trl").SFTTrainer  # whose file is imported here once: ranks are forked
    forget()
    replicas = ranks // CP
    more = {"per_device_train_batch_size": 2 * replicas, "per_device_eval_batch_size": GROUP * replicas}
    model_of().save_pretrained(tmp_path / "reference")
    want, theirs = _grpo(str(tmp_path), None, **{**options, **more})
    for name in ("kl", "entropy") if ranks > CP else ():  # TRL's means of micro-batches, whose rows differ
        del want[name]
    _alike(processes(ranks, _grpo_of_ranks, str(tmp_path), options), (want, theirs), 1e-6)
