"""transformers' Trainer over CP groups, held to the plain Trainer in one process."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from causal_lms import THREE_STEPS, hybrid_of
from engines import SMALL, dataset, model_of, quiet, worst
from ranks import processes

import burst_mcore.deepspeed as burst
from burst_mcore.transformers.data.batches import collated
from burst_mcore.transformers.errors import RefusedError

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


def forget():
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


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


def log_of(trainer, name):
    return log_of_history(trainer.state.log_history, name)


def log_of_history(history, name):
    return [entry[name] for entry in history if name in entry]


def accuracy(predicted):
    """Of the next token, with unshifted labels as the plain Trainer hands them over."""
    said, labels = np.argmax(predicted.predictions[:, :-1], -1), predicted.label_ids[:, 1:]
    return {
        "accuracy": float((said == labels)[labels != -100].mean()),
        "shape": predicted.predictions.shape[1],
    }


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


def of_shifted(self, model, inputs, return_outputs=False, **options):
    """The same of shifted labels, where ranks share the sequence."""
    if self.args.deepspeed is None:
        return of_labels(self, model, inputs)
    labels = inputs.pop("shift_labels")
    logits = model(**inputs).logits.flatten(0, 1)
    total = torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")
    return burst.whole_loss(total, (labels != -100).sum())


def of_shards(self, model, inputs, return_outputs=False, **options):
    """The same of each rank's logits alone."""
    if self.args.deepspeed is None:
        return of_labels(self, model, inputs)
    (part,) = burst.shard_loader(iter([inputs]), model)
    assert part["input_ids"].numel() < inputs["input_ids"].numel()
    return of_shifted(self, model, part)


def penalised(self, model, inputs, **options):
    """The model's loss, and a penalty on weights that is as large."""
    from transformers import Trainer

    loss = Trainer.compute_loss(self, model, inputs, **options)
    return loss + 0.1 * sum(p.square().sum() for p in model.parameters() if p.dim() > 1)


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
    **options,
):
    """(losses, norms, weights, evaluations) of a Trainer; own: its methods that are not the Trainer's."""
    from transformers import Trainer

    made = model()  # before ZeRO-3 is asked for, which would shard its parameters as they are made
    trainer = type("Trainer", (Trainer,), dict(own))(
        made, arguments_of(folder, sp, **options), train_dataset=data, eval_dataset=evaluated,
        data_collator=data_collator, compute_metrics=metrics,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    if evaluated is not None:
        trainer.evaluate()
    if metrics is not None:
        said = trainer.predict(evaluated)
        trainer.state.log_history.append({"predicted": (said.predictions, said.label_ids)})
    found = log_of(trainer, "loss"), log_of(trainer, "grad_norm"), weights(trainer), trainer.state.log_history
    if sp is not None:
        trainer.model_wrapped.destroy()
        forget()
    return found


def plain(rank, size, calls):
    quiet()
    return [trained(**call) for call in calls]


def _compiles(self, *_):
    raise AssertionError(f"DeepSpeed compiles {self.name}")


def sharded(rank, size, sp, calls):
    from deepspeed.ops.op_builder import OpBuilder

    quiet()
    OpBuilder.jit_load = _compiles
    burst.replace_ulysses()
    return [trained(sp=sp, **{**call, "folder": f"{call['folder']}/{rank}"}) for call in calls]


def _alike(found, want, *, count=3):
    losses, norms, parameters, _ = found
    assert len(losses) == count
    assert losses == pytest.approx(want[0], rel=1e-5)
    assert norms == pytest.approx(want[1], rel=1e-5)
    assert worst(parameters, want[2]) < 1e-6
    unlike = worst(parameters, dict(model_of().named_parameters()))
    assert unlike > 1e-3  # it was trained


def _compare(sp, size, calls, folder):
    """Each call on CP groups beside the same with as many more micro-batches in one process."""
    replicas = size // sp
    alone = []
    for call in calls:
        options = dict(call)
        options["gradient_accumulation_steps"] = call.get("gradient_accumulation_steps", 1) * replicas
        alone.append({**options, "sp": None, "folder": f"{folder}/plain"})
    (want,) = processes(1, plain, alone)
    every = processes(size, sharded, sp, [{**call, "folder": f"{folder}/sp"} for call in calls])
    return [(found, want) for found in every]


UNEQUAL = dataset(12, tokens=40)
ROWS = [{name: x[: 20 + 3 * i] for name, x in row.items()} for i, row in enumerate(dataset(12, tokens=60))]


CASES = [
    {"data": UNEQUAL},
    {"data": UNEQUAL, "gradient_accumulation_steps": 2, "stage": 3},
    {"data": ROWS, "per_device_train_batch_size": 2, "section": {"fused_loss": False}},
    {"data": UNEQUAL, "gradient_accumulation_steps": 3, "average_tokens_across_devices": False},
]


@pytest.mark.parametrize(
    ("sp", "size", "cases"),
    [
        (2, 2, CASES),
        *(pytest.param(*more, marks=pytest.mark.slow) for more in ((2, 4, CASES[:2]), (4, 4, CASES))),
    ],
    ids=["SP2", "DP2xSP2", "SP4"],
)
def test_tokens_are_averaged_as_without_groups(sp, size, cases, tmp_path):
    for found, want in _compare(sp, size, cases, tmp_path):
        for ours, theirs in zip(found, want, strict=True):
            _alike(ours, theirs)


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
    "loss of shifted labels": {"data": UNEQUAL, "own": [("compute_loss", of_shifted)]},
    "loss of shards": {"data": UNEQUAL, "own": [("compute_loss", of_shards)]},
    "loss of logits, ZeRO-3": {"data": UNEQUAL, "own": [("compute_loss", own_compute_loss)], "stage": 3},
    "a penalty": {"data": UNEQUAL, "own": [("compute_loss", penalised)]},
    "flattened rows": {
        "data": ROWS, "data_collator": _flattened, "per_device_train_batch_size": 2,
        "include_num_input_tokens_seen": "all",
    },
    "a hybrid": {
        "data": ROWS, "model": hybrid_of, "per_device_train_batch_size": 2, "evaluated": ROWS[:3],
        "section": {"layout": "zigzag"},
    },
    "offload": {
        "data": UNEQUAL, "optim": "adamw_torch", "learning_rate": 1e-3,
        "zero": {"offload_optimizer": {"device": "cpu"}},
    },
    "equal labels": {"data": [{"input_ids": r["input_ids"], "labels": r["input_ids"]} for r in UNEQUAL]},
}  # fmt: skip


LATER = ("loss of logits, ZeRO-3", "equal labels")
"""Each differs little from another."""


@pytest.mark.parametrize(
    "names",
    [[name for name in OTHERS if name not in LATER], pytest.param(LATER, marks=pytest.mark.slow)],
    ids=["few", "others"],
)
def test_schedules_adapters_and_flattened_rows(names, tmp_path):
    for found, want in _compare(2, 2, [OTHERS[name] for name in names], tmp_path):
        for name, ours, theirs in zip(names, found, want, strict=True):
            assert ours[0] and ours[0] == pytest.approx(theirs[0], rel=1e-5), name
            assert ours[1] == pytest.approx(theirs[1], rel=1e-5), name
            assert worst(ours[2], theirs[2]) < 1e-6, name
            for key in ("learning_rate", "epoch", "num_input_tokens_seen"):
                assert log_of_history(ours[3], key) == log_of_history(theirs[3], key), (name, key)
            operations = [log_of_history(x[3], "total_flos") for x in (ours, theirs)]
            assert operations[0] == pytest.approx(operations[1], rel=1e-6), name
            evaluations = [log_of_history(x[3], "eval_loss") for x in (ours, theirs)]
            assert evaluations[0] == pytest.approx(evaluations[1], rel=1e-5), name
            assert len(evaluations[0]) == ("evaluated" in OTHERS[name])
        if names[0] == "two epochs, linear schedule":
            assert len(want[0][0]) == 12 and want[0][3][-2]["epoch"] == 2


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


EVALUATED = [
    {
        "data": UNEQUAL,
        "evaluated": ROWS[:5],
        "eval_strategy": "steps",
        "eval_steps": 2,
        "eval_on_start": True,
    },
    {"data": UNEQUAL, "evaluated": LABELLED[:7], "metrics": accuracy, "per_device_eval_batch_size": 2},
    {"data": UNEQUAL, "evaluated": ROWS[:7], "metrics": accuracy, "section": {"fused_loss": False}},
]


@pytest.mark.parametrize(
    ("sp", "size"), [(2, 2), pytest.param(2, 4, marks=pytest.mark.slow)], ids=["SP2", "DP2xSP2"]
)
def test_evaluation(sp, size, tmp_path):
    cases = EVALUATED if size == sp else EVALUATED[2:]
    for found, want in _compare(sp, size, cases, tmp_path):
        for ours, theirs in zip(found, want, strict=True):
            _alike(ours, theirs)
            entries = [[e for e in log if "eval_loss" in e] for log in (ours[3], theirs[3])]
            assert len(entries[0]) == len(entries[1]) > 0
            for mine, own in zip(*entries, strict=True):
                assert mine["eval_loss"] == pytest.approx(own["eval_loss"], rel=1e-5)
                assert mine.get("eval_accuracy") == own.get("eval_accuracy")
                assert mine.get("eval_shape") == own.get("eval_shape")
            for mine, own in zip(*(log_of_history(x[3], "predicted") for x in (ours, theirs)), strict=True):
                for row, (said, told) in enumerate(
                    zip(mine[0], own[0], strict=True)
                ):  # in the dataset's order
                    tokens = min(len(ROWS[row]["input_ids"]), LENGTHS[row])
                    assert np.abs(said[:tokens] - told[:tokens]).max() < 1e-4
                assert (mine[1] == own[1]).all()


SHORT = [(5, 3), (7, 2), (1, 2), (7, 2, "drop_last"), (5, 3, "drop_last"), (5, 2, "uneven")]
"""(rows, rows of a batch): the last batch is not full, or there is no other; what is asked of it."""
EVERY_LENGTH = [(rows, batch) for rows in (1, 2, 3, 4, 5, 8, 9) for batch in (1, 2, 3, 4)]


def evaluated(folder, sp, cells, **options):
    """[(metrics, predictions, labels, loss of `evaluate`)] of a Trainer for each cell."""
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
    if sp is not None:
        trainer.model_wrapped.destroy()
        forget()
    return found


def _evaluated_alone(rank, size, *call):
    quiet()
    return evaluated(*call, learning_rate=0.0)


def _evaluated_by_groups(rank, size, folder, *call):
    quiet()
    burst.replace_ulysses()
    return evaluated(f"{folder}/{rank}", *call, learning_rate=0.0)


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
    (want,) = processes(1, _evaluated_alone, str(tmp_path), None, cells)
    for found in processes(size, _evaluated_by_groups, str(tmp_path), 2, cells):
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


def _refused(rank, size, folder):
    from transformers import Trainer

    quiet()
    burst.replace_ulysses()
    found = []
    for options in ({"label_smoothing_factor": 0.1}, {}):
        model = model_of()
        own = None if options else (lambda outputs, labels, num_items_in_batch: outputs.loss)
        trainer = Trainer(
            model, arguments_of(folder, 2, stage=3, **options), train_dataset=UNEQUAL, data_collator=collated,
            eval_dataset=UNEQUAL[:2], compute_loss_func=own,
        )  # fmt: skip
        for does in (trainer.evaluate, trainer.train):
            try:
                does()
            except RefusedError as error:
                found.append(str(error))
        forget()
    for unlike, rows in (("split_batches", ROWS[:3]), ("dispatch_batches", Stream(UNEQUAL[:3]))):
        model = model_of()
        arguments = arguments_of(
            folder, 2, stage=3, per_device_eval_batch_size=2,
            accelerator_config={unlike: unlike == "split_batches"},
        )  # fmt: skip
        try:
            Trainer(model, arguments, eval_dataset=rows, data_collator=collated).evaluate()
        except RefusedError as error:
            found.append(str(error))
        forget()
    return found


def test_what_a_trainer_is_refused(tmp_path):
    """With two groups: one group's evaluation is that of one process, whatever Accelerate is told."""
    for found in processes(4, _refused, str(tmp_path)):
        assert len(found) == 6
        assert all("label_smoothing_factor" in said for said in found[:2])
        assert all("compute_loss_func" in said for said in found[2:4])
        assert "Accelerate's split_batches" in found[4]
        assert "Accelerate's dispatch_batches=False for a streamed dataset" in found[5]


def _unlabelled(rank, size, folder):
    from transformers import Trainer

    quiet()
    burst.replace_ulysses()
    arguments = arguments_of(folder, size, section={"fused_loss": False})
    trainer = Trainer(model_of(), arguments, train_dataset=UNEQUAL, data_collator=collated)
    trainer.train()
    unlabelled = [{"input_ids": row["input_ids"]} for row in ROWS[:3]]
    return trainer.predict(unlabelled).predictions.shape


def test_data_without_labels_is_predicted(tmp_path):
    for shape in processes(2, _unlabelled, str(tmp_path)):
        assert shape == (3, len(ROWS[2]["input_ids"]), 61)


# Of one length, as Accelerate needs; its last load, of 4 rows, is split as 2 and 2, and evaluated as 3 and 1.
STREAMED = {"data": Stream(UNEQUAL), "evaluated": Stream(UNEQUAL[:4]), "per_device_eval_batch_size": 3}
OF_FOUR = {"data": Stream(UNEQUAL), "evaluated": Stream(UNEQUAL[:10]), "per_device_eval_batch_size": 2}


@pytest.mark.parametrize(
    ("size", "call"),
    [(2, STREAMED), pytest.param(4, OF_FOUR, marks=pytest.mark.slow)],
    ids=["SP2", "DP2xSP2"],
)
def test_streamed_datasets(size, call, tmp_path):
    for found, want in _compare(2, size, [call], tmp_path):
        _alike(found[0], want[0])
        losses = [log_of_history(x[0][3], "eval_loss")[-1] for x in (found, want)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)


class Counted(Stream):
    """A stream that knows its length."""

    def __len__(self):
        return len(self.rows)


ENDS = [(9, 1, False), (9, 1, True), (9, 2, False), (1, 1, False), (11, 2, True), (10, 2, True)]
"""(rows of a stream, rows of a batch, drop_last): not all groups have a batch of the last load."""
OF_LENGTHS = [(5, 1, False), (5, 1, True)]
"""The same, of batches that have one more token each; one process a group, Accelerate fails to cut them."""


def _streamed(rank, size, ends, longer=0):
    """Of a rank's prepared loader of each stream: rows of two training epochs, of a resumed one, lengths."""
    from accelerate import Accelerator, PartialState
    from accelerate.utils import DeepSpeedPlugin

    quiet()
    grouped, of_streams = size == 4, []
    if grouped:
        burst.replace_ulysses()
    for count, batch, drop in ends:
        PartialState(cpu=True)
        rows = [
            {"input_ids": torch.arange(3, 15 + longer * i), "row": torch.tensor([i])} for i in range(count)
        ]
        options = {"cpu": True}
        if grouped:
            config = {**sections(), "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
            plugin = DeepSpeedPlugin(hf_ds_config=config)
            options = {"deepspeed_plugin": plugin, "parallelism_config": parallelism(2)}
        accelerator = Accelerator(**options)
        collate = torch.utils.data.default_collate
        loader, counted = (
            accelerator.prepare_data_loader(
                torch.utils.data.DataLoader(kind(rows), batch_size=batch, drop_last=drop, collate_fn=collate)
            )
            for kind in (Stream, Counted)
        )
        epochs = [[b["row"].flatten().tolist() for b in each] for each in (loader, loader, counted)]
        rest = [b["row"].flatten().tolist() for b in accelerator.skip_first_batches(loader, 1)]
        assert len(counted) == len(epochs[2])
        of_streams.append((epochs, rest))
        forget()
    return of_streams


@pytest.mark.slow
def test_the_end_of_a_stream_is_sharded_as_to_one_process_a_group():
    want = processes(2, _streamed, ENDS)
    for rank, found in enumerate(processes(4, _streamed, ENDS)):
        for end, ours, theirs in zip(ENDS, found, want[rank // 2], strict=True):
            assert ours == theirs, end


@pytest.mark.slow
def test_the_end_of_a_stream_of_several_lengths():
    whole = [[[0], [2]], [[1], [3]]]
    for rank, found in enumerate(processes(4, _streamed, OF_LENGTHS, 1)):
        dropped = whole[rank // 2]
        filled = [*dropped, [4] if rank < 2 else [0]]  # the second group has the first batch again
        assert found == [([rows] * 3, rows[1:]) for rows in (filled, dropped)]


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
    found = []
    for steps, checkpoint, gas in resumes:
        here = f"{folder}/{steps}"
        options = {"max_steps": steps, "save_steps": checkpoint, "gradient_accumulation_steps": gas}
        whole = trained(here, sp, **RESUMED, **options)
        again = trained(here, sp, **RESUMED, **options, resume=f"{here}/checkpoint-{checkpoint}")
        found.append((steps, checkpoint, whole, again))
    return found


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
    for found in processes(size, _resumed, sp, str(tmp_path), resumes):
        for steps, checkpoint, whole, again in found:
            rest = steps - checkpoint
            assert (
                whole[0][-rest:] == again[0][-rest:] and len(again[0]) == steps
            )  # the log is in the checkpoint
            assert worst(again[2], whole[2]) == 0, (steps, checkpoint)
