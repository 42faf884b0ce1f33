"""transformers' Trainer over CP groups, held to the plain Trainer in one process."""

import json
import re
from pathlib import Path

import forked
import numpy as np
import pytest
import torch
import torch.distributed as dist
from causal_lms import THREE_STEPS, hybrid_of
from engines import SMALL, dataset, model_of, quiet, worst
from ranks import on_ranks, processes
from trainers import accuracy, forget, logged, texts, tokenizer

import burst_mcore.deepspeed as burst
from burst_mcore.transformers.data.batches import collated
from burst_mcore.transformers.errors import UnsupportedError

pytest.importorskip("accelerate")


def sections(stage=2, zero=(), **section):
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": stage, **SMALL, **dict(zero)},
        "zero_allow_untested_optimizer": True,
        "burst_attention": {"layout": "striped", **section},
    }


def parallelism(sp):
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils import DeepSpeedSequenceParallelConfig

    world = dist.get_world_size()
    dp = {"dp_shard_size": world // sp} if world > sp else {}
    return ParallelismConfig(
        sp_backend="deepspeed", sp_size=sp, sp_handler=DeepSpeedSequenceParallelConfig(), **dp
    )


def arguments_of(folder, sp, *, kind=None, stage=2, zero=(), section=None, **options):
    """TrainingArguments: with sp None those of plain training in one process."""
    from transformers import TrainingArguments

    if sp is not None:
        options["deepspeed"] = sections(stage, zero, **(section or {}))
        options["parallelism_config"] = parallelism(sp)
    return (kind or TrainingArguments)(**{"output_dir": folder, **THREE_STEPS, **options})


def weights(trainer):
    import deepspeed

    named = trainer.accelerator.unwrap_model(trainer.model).named_parameters()
    get = deepspeed.utils.safe_get_full_fp32_param
    found = {name: (get(p), p) for name, p in named}
    return {name: (p if full is None else full).detach().clone() for name, (full, p) in found.items()}


def log_of(history, name):
    return [entry[name] for entry in history if name in entry]


def with_lora():
    """The small model with random adapters, as PEFT makes it."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return get_peft_model(model_of(), lora)


def own_compute_loss(self, model, inputs, return_outputs=False, **_):
    """A loss of logits, in one process and over shards."""
    shifted, labels = inputs.pop("shift_labels", None), inputs.pop("labels", None)
    labels = labels[:, 1:] if shifted is None else shifted
    outputs = model(**inputs)
    logits = outputs.logits[:, : labels.shape[1]].flatten(0, 1)
    total = torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")
    count = (labels != -100).sum()
    loss = total / count if shifted is None else burst.whole_loss(total, count)
    return (loss, outputs) if return_outputs else loss


def of_labels(self, model, inputs, return_outputs=False, **_):
    """A loss as one process makes it, of whole logits and labels that are not shifted."""
    labels = inputs.pop("labels")
    logits = model(**inputs).logits
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def of_logits(outputs, labels, num_items_in_batch=None):
    """The same, as the Trainer calls a function."""
    logits, labels = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    total = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
    return total / ((labels != -100).sum() if num_items_in_batch is None else num_items_in_batch)


def of_shards(self, model, inputs, return_outputs=False, **options):
    """The same, of a shard that the loss itself asks for."""
    if self.args.deepspeed is None:
        return of_labels(self, model, inputs)
    (part,) = burst.shard_loader(iter([inputs]), model)
    assert part["input_ids"].numel() < inputs["input_ids"].numel()
    return own_compute_loss(self, model, part)


def trained(
    folder,
    sp,
    data,
    *,
    evaluated=None,
    metrics=None,
    resume=None,
    data_collator=collated,
    model=model_of,
    own=(),
    loss_func=None,
    **options,
):
    """(losses, norms, weights, evaluations) of a Trainer; own: its methods that are not the Trainer's."""
    from transformers import Trainer

    made = model()  # before ZeRO-3 is asked for, which would shard its parameters as they are made
    trainer = type("Trainer", (Trainer,), dict(own))(
        made, arguments_of(folder, sp, **options), train_dataset=data, eval_dataset=evaluated,
        data_collator=data_collator, compute_metrics=metrics, compute_loss_func=loss_func,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    if evaluated is not None:
        trainer.evaluate()
    figures = logged(trainer, "loss", "grad_norm")
    found = figures["loss"], figures["grad_norm"], weights(trainer), trainer.state.log_history
    if sp is not None:
        trainer.model_wrapped.destroy()
        forget()
    return found


def _compiles(self, *_):
    raise AssertionError(f"DeepSpeed compiles {self.name}")


def _runs(rank, size, run, sp, calls):
    """What `run` finds for each of `calls`: over CP groups, each rank in a folder of its own, or alone."""
    from deepspeed.ops.op_builder import OpBuilder

    quiet()
    if sp is not None:
        OpBuilder.jit_load = _compiles
        burst.replace_ulysses()
    return [run(**{**call, "sp": sp, "folder": f"{call['folder']}/{sp}/{rank}"}) for call in calls]


def _hold(sp, size, cases, folder):
    """Hold each case on CP groups to the same with as many more micro-batches in one process."""
    replicas = size // sp
    alone = [{**case, "folder": folder} for case in cases.values()]
    for case in alone:
        case["gradient_accumulation_steps"] = case.get("gradient_accumulation_steps", 1) * replicas
    (want,) = processes(1, _runs, trained, None, alone)
    every = processes(size, _runs, trained, sp, [{**case, "folder": folder} for case in cases.values()])
    for found in every:
        for name, ours, theirs in zip(cases, found, want, strict=True):
            assert ours[0] and ours[0] == pytest.approx(theirs[0], rel=1e-5), name
            assert ours[1] == pytest.approx(theirs[1], rel=1e-5), name
            assert worst(ours[2], theirs[2]) < 1e-6, name
            for key in ("learning_rate", "epoch", "num_input_tokens_seen"):
                assert log_of(ours[3], key) == log_of(theirs[3], key), (name, key)
            for key in ("eval_loss", "eval_accuracy", "eval_shape"):
                mine, own = (log_of(x[3], key) for x in (ours, theirs))
                assert mine == pytest.approx(own, rel=1e-5), (name, key)
                wanted = "metrics" if key != "eval_loss" else "evaluated"
                assert bool(own) == (wanted in cases[name]), (name, key)
            if replicas == 1:
                operations = [log_of(x[3], "total_flos") for x in (ours, theirs)]
                assert operations[0] == pytest.approx(operations[1], rel=1e-6), name
    return want


UNEQUAL = dataset(12, tokens=40)
ROWS = [{name: x[: 20 + 3 * i] for name, x in row.items()} for i, row in enumerate(dataset(12, tokens=60))]


CASES = {
    "a batch a step": {"data": UNEQUAL},
    "accumulation, ZeRO-3": {"data": UNEQUAL, "gradient_accumulation_steps": 2, "stage": 3},
    "rows": {"data": ROWS, "per_device_train_batch_size": 2, "section": {"fused_loss": False}},
    "means of devices": {
        "data": UNEQUAL, "gradient_accumulation_steps": 3, "average_tokens_across_devices": False,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("sp", "size"),
    [(2, 2), *(pytest.param(*more, marks=pytest.mark.slow) for more in ((2, 4), (4, 4)))],
    ids=["SP2", "DP2xSP2", "SP4"],
)
def test_tokens_are_averaged_as_without_groups(sp, size, tmp_path):
    cases = {name: CASES[name] for name in list(CASES)[: 2 if size > sp else None]}
    for losses, _, parameters, _ in _hold(sp, size, cases, str(tmp_path)):
        assert len(losses) == 3
        assert worst(parameters, dict(model_of().named_parameters())) > 1e-3  # it was trained


def _flattened(rows):
    from transformers import DataCollatorWithFlattening

    return DataCollatorWithFlattening()([{k: x.tolist() for k, x in row.items()} for row in rows])


OTHERS = {
    "two epochs, linear schedule": {
        "data": UNEQUAL[:11], "max_steps": -1, "num_train_epochs": 2, "gradient_accumulation_steps": 2,
        "lr_scheduler_type": "linear",
    },
    "LoRA, gradient checkpointing": {
        "data": ROWS, "model": with_lora, "include_num_input_tokens_seen": "non_padding",
        "per_device_train_batch_size": 2, "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
    },
    "loss of logits": {
        "data": UNEQUAL, "own": [("compute_loss", own_compute_loss)], "evaluated": UNEQUAL[:5],
    },
    "loss of labels": {"data": UNEQUAL, "own": [("compute_loss", of_labels)]},
    "a loss function": {"data": UNEQUAL, "loss_func": of_logits, "evaluated": UNEQUAL[:3]},
    "loss of shards": {"data": UNEQUAL, "own": [("compute_loss", of_shards)]},
    "flattened rows": {
        "data": ROWS, "data_collator": _flattened, "per_device_train_batch_size": 2,
        "include_num_input_tokens_seen": "all",
    },
    "a hybrid": {
        "data": ROWS, "model": hybrid_of, "per_device_train_batch_size": 2, "evaluated": ROWS[:3],
        "section": {"layout": "zigzag"},
    },
    "evaluated in training": {
        "data": UNEQUAL, "evaluated": ROWS[:5], "eval_strategy": "steps", "eval_steps": 2,
        "eval_on_start": True,
    },
    "metrics, loss of the model": {
        "data": UNEQUAL, "evaluated": ROWS[:7], "metrics": accuracy, "section": {"fused_loss": False},
    },
}  # fmt: skip


def test_schedules_adapters_losses_and_evaluations(tmp_path):
    want = _hold(2, 2, OTHERS, str(tmp_path))
    losses, _, _, log = want[[*OTHERS].index("two epochs, linear schedule")]
    assert len(losses) == 12 and log[-2]["epoch"] == 2


LENGTHS = (41, 17, 33, 23, 37, 29, 21, 25, 31)
LABELLED = [
    {
        "input_ids": row["input_ids"][:n],
        "labels": row["input_ids"][:n].clone().index_fill_(0, torch.arange(i), -100),
    }
    for i, (n, row) in enumerate(zip(LENGTHS, dataset(9, tokens=41), strict=True))
]
"""Rows with different numbers of labels. The first is the longest, and its loss is seen where it does not
belong."""


SHORT = [(5, 3), (7, 2), (1, 2), (7, 2, "drop_last"), (5, 3, "drop_last"), (5, 2, "uneven")]
"""(rows, rows of a batch): the last batch is not full, or there is no other; what is asked of it."""
EVERY_LENGTH = [(rows, batch) for rows in (1, 2, 3, 4, 5, 8, 9) for batch in (1, 2, 3, 4)]


def evaluated(folder, sp, cells, **options):
    """[(metrics, predictions, labels, loss of `evaluate`)] by cell, and logits of rows without labels."""
    from transformers import Trainer

    trainer = Trainer(
        model_of(), arguments_of(folder, sp, max_steps=1, **options), train_dataset=LABELLED,
        data_collator=collated, compute_metrics=accuracy,
    )  # fmt: skip
    trainer.train()
    found = []
    for rows, batch, *asked in cells:
        trainer.args.per_device_eval_batch_size = batch
        trainer.args.dataloader_drop_last = "drop_last" in asked
        trainer.accelerator.even_batches = "uneven" not in asked
        said = trainer.predict(LABELLED[:rows], metric_key_prefix="eval")
        trainer.compute_metrics = None
        alone = trainer.evaluate(LABELLED[:rows])
        trainer.compute_metrics = accuracy
        found.append((said.metrics, said.predictions, said.label_ids, alone["eval_loss"]))
    trainer.compute_metrics = None
    unlabelled = trainer.predict([{"input_ids": row["input_ids"]} for row in LABELLED[:3]]).predictions
    if sp is not None:
        trainer.model_wrapped.destroy()
        forget()
    return found, unlabelled


@pytest.mark.parametrize(
    ("size", "cells"),
    [
        (2, SHORT),
        pytest.param(2, EVERY_LENGTH, marks=pytest.mark.slow),
        pytest.param(4, EVERY_LENGTH, marks=pytest.mark.slow),
    ],
    ids=["SP2", "SP2, every length", "DP2xSP2"],
)
def test_a_last_batch_that_is_not_full(size, cells, tmp_path):
    call = {"folder": str(tmp_path), "cells": cells, "learning_rate": 0.0}
    (((want, logits),),) = processes(1, _runs, evaluated, None, [call])
    for ((found, unlabelled),) in processes(size, _runs, evaluated, 2, [call]):
        assert unlabelled.shape == logits.shape
        for cell, ours, theirs in zip(cells, found, want, strict=True):
            for name in ("eval_loss", "eval_accuracy", "eval_shape"):
                assert ours[0][name] == pytest.approx(theirs[0][name], rel=1e-5), (cell, name)
            assert ours[3] == pytest.approx(theirs[3], rel=1e-5), cell
            assert ours[1].shape == theirs[1].shape and (ours[2] == theirs[2]).all(), cell
            for n, said, told in zip(LENGTHS, ours[1], theirs[1], strict=False):
                assert np.abs(said[:n] - told[:n]).max() < 1e-4, cell


class Stream(torch.utils.data.IterableDataset):
    """A dataset without a length."""

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        yield from self.rows


@on_ranks(4)
def test_what_a_trainer_is_refused(rank, size, tmp_path):
    from transformers import Trainer

    quiet()
    burst.replace_ulysses()

    def attempt(words, does, **options):
        model = model_of()
        trainer = Trainer(
            model, arguments_of(str(tmp_path), 2, stage=3, **options), train_dataset=UNEQUAL,
            data_collator=collated, eval_dataset=UNEQUAL[:2],
        )  # fmt: skip
        with pytest.raises(UnsupportedError, match=words):
            getattr(trainer, does)()
        forget()

    for does in ("evaluate", "train"):
        attempt("label_smoothing_factor", does, label_smoothing_factor=0.1)


# Of one length, as Accelerate needs; its last load, of 4 rows, is split as 2 and 2, and evaluated as 3 and 1.
STREAMED = {"data": Stream(UNEQUAL), "evaluated": Stream(UNEQUAL[:4]), "per_device_eval_batch_size": 3}
OF_FOUR = {"data": Stream(UNEQUAL), "evaluated": Stream(UNEQUAL[:10]), "per_device_eval_batch_size": 2}


@pytest.mark.parametrize(
    ("size", "call"),
    [(2, STREAMED), pytest.param(4, OF_FOUR, marks=pytest.mark.slow)],
    ids=["SP2", "DP2xSP2"],
)
def test_streamed_datasets(size, call, tmp_path):
    _hold(2, size, {"streamed": call}, str(tmp_path))


RESUMED = {"data": dataset(20), "save_strategy": "steps", "save_only_model": False}
RESUMES = [
    # (steps, the checkpoint, accumulation): within a load of Accelerate's, between loads, in the second epoch
    (5, 3, 1),
    (6, 4, 2),
    (14, 13, 2),
]


def _resumed(rank, size, sp, folder, resumes):
    """Some steps at once, and the same from a checkpoint in the middle of an epoch."""
    quiet()
    burst.replace_ulysses()
    for steps, checkpoint, gas in resumes:
        here, rest = f"{folder}/{steps}", steps - checkpoint
        options = {"max_steps": steps, "save_steps": checkpoint, "gradient_accumulation_steps": gas}
        whole = trained(here, sp, **RESUMED, **options)
        again = trained(here, sp, **RESUMED, **options, resume=f"{here}/checkpoint-{checkpoint}")
        assert whole[0][-rest:] == again[0][-rest:] and len(again[0]) == steps  # the log is in the checkpoint
        assert worst(again[2], whole[2]) == 0, (steps, checkpoint)


@pytest.mark.parametrize(
    ("sp", "size", "resumes"),
    [
        (2, 2, [RESUMES[0], RESUMES[2]]),
        pytest.param(2, 2, [RESUMES[1]], marks=pytest.mark.slow),
        pytest.param(2, 4, [(4, 3, 1), (6, 4, 2)], marks=pytest.mark.slow),
    ],
    ids=["SP2", "SP2, between loads", "DP2xSP2"],
)
def test_resume_in_the_middle_of_an_epoch(sp, size, resumes, tmp_path):
    processes(size, _resumed, sp, str(tmp_path), resumes)


def _examples():
    """By the folder that each writes: the scripts of trainer.md, with what it says to add without GPUs."""
    page = (Path(__file__).parents[3] / "docs" / "frameworks" / "trainer.md").read_text()
    plain, with_trl = page.split("```\n")[1:4:2]
    before, trainer, after = re.fullmatch(r"(.*^)(args = .*)(^trainer\.train.*)", plain, re.M | re.S).groups()
    added = dict(re.findall(r"without GPUs: `(\w+)\(\.\.\., (.*?)\)`", page))
    for folder, lines in {"runs/plain": trainer, "runs/sft": with_trl}.items():
        (kind,) = re.findall(r"^args = (\w+)", lines, re.MULTILINE)
        sharing = "parallelism_config=sharing"
        yield folder, before + lines.replace(sharing, f"{sharing}, {added[kind]}") + after


@pytest.mark.parametrize(("folder", "example"), list(_examples()), ids=["Trainer", "SFTTrainer"])
def test_the_examples_of_the_manual_train_without_gpus(folder, example, tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM

    for package in re.findall(r"^from (trl|datasets) import", example, re.MULTILINE):
        pytest.importorskip(package)
    config = re.search(r"^# ds\.json: (\{.*?)^from", example, re.MULTILINE | re.DOTALL)[1].replace("#", "")
    script, model = tmp_path / "train.py", tmp_path / "path" / "to" / "model"
    script.write_text(example)
    (tmp_path / "ds.json").write_text(json.dumps(json.loads(config)))
    (tmp_path / "texts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in texts(4)))
    (tmp_path / "texts.txt").write_text("".join(f"{row['text']}\n" for row in texts(4)))
    for each in (model_of(), tokenizer()):
        each.save_pretrained(model)
    monkeypatch.chdir(tmp_path)
    well, _, errors = forked.run(tmp_path, script, ranks=2)
    assert well, errors[-3000:]
    kind = AutoModelForCausalLM
    before, after = (dict(kind.from_pretrained(x).named_parameters()) for x in (model, folder))
    assert {*before} == {*after} and worst(after, before) > 1e-6
