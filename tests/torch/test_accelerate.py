"""The Trainer with ParallelismConfig(cp_size=2) and FSDP2, held to the Trainer of one process."""

import os

import numpy as np
import pytest
import recipes
import torch
import torch.distributed as dist
from causal_lms import THREE_STEPS, VOCABULARY, dataset, hybrid_of, model_of, worst
from loops import whole_weights
from ranks import processes
from trl_data import preferences, texts, tokenizer, words

from burst_mcore.torch import RefusedError, replace_context_parallel, restore_context_parallel
from burst_mcore.transformers.data.batches import collated

pytest.importorskip("accelerate")

CP = 2
GROUP = 4
"""Rollouts of a prompt."""
ENDS = [(5, 2), (7, 2), (1, 2), (6, 2), (5, 4), (3, 4)]
"""(rows, rows of a batch) of evaluations: replicas have another number of the last rows, or none."""


def _forget():
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


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


def _arguments(folder, cp, kind=None, **options):
    from accelerate.parallelism_config import ParallelismConfig
    from transformers import TrainingArguments

    if cp is not None:
        os.environ["ACCELERATE_USE_FSDP"] = "true"
        world = dist.get_world_size()
        sizes = {"dp_shard_size": world // cp} if world > cp else {}
        options |= {
            "fsdp": True,
            "fsdp_config": {"version": 2, "state_dict_type": "SHARDED_STATE_DICT"},
            "parallelism_config": ParallelismConfig(cp_size=cp, **sizes),
        }
    return (kind or TrainingArguments)(**{"output_dir": folder, **THREE_STEPS, **options})


def _accuracy(predicted):
    said, labels = np.argmax(predicted.predictions[:, :-1], -1), predicted.label_ids[:, 1:]
    return {"accuracy": float((said == labels)[labels != -100].mean())}


def _by_name(history, *names):
    return {name: [entry[name] for entry in history if name in entry] for name in names}


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
        model, _arguments(folder, cp, **options), train_dataset=data, eval_dataset=data[:3],
        data_collator=collated, compute_metrics=metrics,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2" if resumed else None)
    evaluated = trainer.evaluate()
    history = trainer.state.log_history
    found = _by_name(history, "loss", "grad_norm", "num_input_tokens_seen")
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
    os.environ.update(LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
    _have_fsdp_on_cpus()
    found = []
    for options in cases:
        _forget()
        replace_context_parallel(config={"layout": "zigzag" if "hybrid" in options else "striped"})
        found.append(_trained(folder, CP, **options))
    _forget()
    with pytest.raises(RefusedError, match=r"\(loss\): label_smoothing_factor is not served"):
        _trained(folder, CP, **cases[0], label_smoothing_factor=0.1)
    return found


def _held(folder, ranks, *cases):
    replicas = ranks // CP
    wanted = []
    for options in cases:
        _forget()
        more = {"per_device_train_batch_size": replicas} if replicas > 1 else {}
        wanted.append(_trained(folder, None, **{**options, **more}))
    for found in processes(ranks, _of_ranks, folder, cases):
        for (said, weights), (want, theirs) in zip(found, wanted, strict=True):
            for name, values in want.items():
                assert said[name] == pytest.approx(values, rel=2e-4), name
            assert worst(weights, theirs) < 2e-6


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"layout": "striped"}, "unexpected keyword argument 'layout'"),
        ({"config": {"lay_out": "striped"}}, r"refused \(config\): .*lay_out"),
        ({"loss": "fussed"}, r"refused \(loss\): it must be one of fused, model, got 'fussed'"),
        ({"checkpointing": "some"}, r"refused \(checkpointing\): it must be one of none, full"),
    ],
)
def test_options_that_are_none(options, error):
    """They are refused by the call, and nothing is replaced."""
    from accelerate import Accelerator

    restore_context_parallel()
    own = Accelerator._prepare_cp
    with pytest.raises((TypeError, RefusedError), match=error):
        replace_context_parallel(**options)
    assert Accelerator._prepare_cp is own


def test_a_trainer(tmp_path):
    options = {"gradient_accumulation_steps": 2, "include_num_input_tokens_seen": "all"}
    whole = {"data": dataset(8, tokens=37), "metrics": _accuracy, "halves": True, **options}
    _held(str(tmp_path), 2, whole, {"data": dataset(3), "hybrid": True})


@pytest.mark.slow
def test_more_of_a_trainer(tmp_path):
    data = dataset(12, tokens=37)
    unequal = [{name: x[: 37 - i] for name, x in sample.items()} for i, sample in enumerate(data)]
    _held(
        str(tmp_path),
        2,
        {"data": unequal, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2},
        {"data": data, "average_tokens_across_devices": False},
    )
    shorter = [{name: x[: 37 - 2 * i] for name, x in sample.items()} for i, sample in enumerate(data)]
    _held(
        str(tmp_path),
        4,
        {"data": data},
        {"data": shorter, "eval_strategy": "steps", "eval_steps": 1, "metrics": _accuracy, "ends": ENDS},
    )  # replicas have other numbers of labels, and each step but the first comes after an evaluation


def _trl(folder, cp, kind, hybrid=False, **options):
    """(losses and a metric of training, those of an evaluation), weights."""
    import trl
    from datasets import Dataset

    config, trainer_of = getattr(trl, f"{kind}Config"), getattr(trl, f"{kind}Trainer")
    make, metric = (texts, "mean_token_accuracy") if kind == "SFT" else (preferences, "rewards/margins")
    model, others = hybrid_of() if hybrid else model_of(), {}
    if kind == "DPO":
        others["ref_model"] = model_of()
        with torch.no_grad():
            model.lm_head.weight.mul_(1.1)  # not the reference's, or every margin would be 0 at first
    trainer = trainer_of(
        model, args=_arguments(folder, cp, config, bf16=False, **{"max_length": 48, **options}),
        train_dataset=Dataset.from_list(make(24)), eval_dataset=Dataset.from_list(make(5)),
        processing_class=tokenizer(), **others,
    )  # fmt: skip
    assert getattr(trainer.args, "packing", False) == options.get("packing", False)
    trainer.train()
    evaluated = trainer.evaluate()
    history = trainer.state.log_history
    found = _by_name(history, "loss", "grad_norm", metric)
    found |= {name: evaluated[name] for name in ("eval_loss", f"eval_{metric}")}
    return found, whole_weights(trainer.accelerator.unwrap_model(trainer.model))


def _trl_of_ranks(rank, size, folder, kind, options):
    os.environ.update(LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT="29512")
    _have_fsdp_on_cpus()
    replace_context_parallel()
    _forget()
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
    pytest.importorskip("trl")
    pytest.importorskip("datasets")
    _forget()
    more = {"per_device_train_batch_size": ranks // CP} if ranks > CP else {}
    want, theirs = _trl(str(tmp_path / "one"), None, kind, **{**options, **more})
    if ranks > CP:  # TRL's mean over replicas counts one that has no row of the last load
        del want["eval_mean_token_accuracy"]
    for said, weights in processes(ranks, _trl_of_ranks, str(tmp_path), kind, options):
        for name, values in want.items():
            assert said[name] == pytest.approx(values, rel=2e-4, abs=1e-6), name
        assert worst(weights, theirs) < 3e-6


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


def _grpo(folder, cp, generates=False, **options):
    """(figures of TRL's GRPO by name, weights); prompts have one length where transformers generates."""
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
    lengths = [11 if generates else 11 + 4 * (i % 3) for i in range(8)]
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
        rollout_func=None if generates else _rollouts,
    )  # fmt: skip
    trainer.train()
    figures = _by_name(trainer.state.log_history, "loss", "grad_norm", "kl", "entropy", "reward")
    evaluated = trainer.evaluate()
    figures |= {name: evaluated[name] for name in ("eval_loss", "eval_reward")}
    return figures, whole_weights(trainer.accelerator.unwrap_model(trainer.model))


def _grpo_of_ranks(rank, size, folder, options):
    os.environ.update(LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT="29513")
    _have_fsdp_on_cpus()
    _forget()
    odd = {"scale_rewards": "batch"}, {"top_entropy_quantile": 0.5}, {"per_device_train_batch_size": 3}
    for more in odd if size == CP else ():
        with pytest.raises(ValueError, match="would count a row once for each rank|must hold whole groups"):
            _grpo(folder, CP, **{**options, **more})
        _forget()
    return _grpo(folder, CP, **options)


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, {"num_iterations": 2, "max_steps": 4}),
        pytest.param(2, {"generates": True, "loss_type": "grpo"}, marks=pytest.mark.slow),
        pytest.param(4, {}, marks=pytest.mark.slow),
    ],
)
def test_grpo_of_the_page_of_recipes(tmp_path, ranks, options):
    pytest.importorskip("trl")
    pytest.importorskip("datasets")
    _forget()
    replicas = ranks // CP
    more = {"per_device_train_batch_size": 2 * replicas, "per_device_eval_batch_size": GROUP * replicas}
    model_of().save_pretrained(tmp_path / "reference")
    want, theirs = _grpo(str(tmp_path), None, **{**options, **more})
    for name in ("kl", "entropy") if ranks > CP else ():  # TRL's means of micro-batches, whose rows differ
        del want[name]
    for said, weights in processes(ranks, _grpo_of_ranks, str(tmp_path), options):
        for name, values in want.items():
            assert said[name] == pytest.approx(values, rel=2e-4, abs=1e-6), name
        assert worst(weights, theirs) < 1e-6


@pytest.mark.slow
def test_a_run_that_goes_on(tmp_path):
    saved = {"data": dataset(8, tokens=37), "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    _held(str(tmp_path), 2, saved, {**saved, "resumed": True})
