"""TRL's SFT and DPO over CP groups, held to the same in one process."""

import logging

import pytest
import torch
from causal_lms import hybrid_of
from engines import model_of, quiet, worst
from ranks import processes
from test_trainer import accuracy, arguments_of, forget, log_of, weights
from trl_data import preferences, texts, tokenizer

import burst_mcore.deepspeed as burst

pytest.importorskip("trl")
pytest.importorskip("datasets")


def _adapters(lora):
    """PEFT's configuration of random adapters, or none."""
    from peft import LoraConfig

    torch.manual_seed(3)
    return LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False) if lora else None


def sft(folder, sp, *, compute_metrics=None, lora=False, hybrid=False, **options):
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    model = hybrid_of() if hybrid else model_of()
    trainer = SFTTrainer(
        model, arguments_of(folder, sp, kind=SFTConfig, bf16=False, **{"max_length": 48, **options}),
        train_dataset=Dataset.from_list(texts(24)), eval_dataset=Dataset.from_list(texts(5)),
        processing_class=tokenizer(), compute_metrics=compute_metrics, peft_config=_adapters(lora),
    )  # fmt: skip
    return _trained(trainer, sp, "mean_token_accuracy")


def dpo(folder, sp, *, lora=False, **options):
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    model, reference = model_of(), None if lora else model_of()
    with torch.no_grad():
        model.lm_head.weight.mul_(1.1)  # not the reference's, or every margin would be 0 at first
    trainer = DPOTrainer(
        model, reference, arguments_of(folder, sp, kind=DPOConfig, bf16=False, max_length=48, **options),
        train_dataset=Dataset.from_list(preferences(24)), eval_dataset=Dataset.from_list(preferences(5)),
        processing_class=tokenizer(), peft_config=_adapters(lora),
    )  # fmt: skip
    return _trained(trainer, sp, "rewards/margins")


def kto(folder, sp, **options):
    from datasets import Dataset
    from trl import KTOConfig, KTOTrainer

    def unpaired(count):
        every = enumerate(preferences(count))
        return [{"prompt": x["prompt"], "completion": x["chosen"], "label": i % 2 == 0} for i, x in every]

    model, reference = model_of(), model_of()
    with torch.no_grad():
        model.lm_head.weight.mul_(1.1)
    arguments = arguments_of(folder, sp, kind=KTOConfig, bf16=False, max_length=48, **{**ROWS, **options})
    trainer = KTOTrainer(
        model, reference, arguments, train_dataset=Dataset.from_list(unpaired(24)),
        eval_dataset=Dataset.from_list(unpaired(5)), processing_class=tokenizer(),
    )  # fmt: skip
    return _trained(trainer, sp, "kl")


def _trained(trainer, sp, metric):
    trainer.train()
    evaluation = trainer.evaluate()
    found = {
        "loss": log_of(trainer, "loss"),
        "grad_norm": log_of(trainer, "grad_norm"),
        metric: log_of(trainer, metric),
        "num_tokens": log_of(trainer, "num_tokens"),
        "evaluation": [
            evaluation[name]
            for name in ("eval_loss", f"eval_{metric}", "eval_accuracy", "eval_shape")
            if name in evaluation
        ],
    }
    parameters = weights(trainer)
    if sp is not None:
        trainer.model_wrapped.destroy()
        forget()
    return found, parameters


ROWS = {"per_device_train_batch_size": 2}
KINDS = {"sft": sft, "dpo": dpo, "kto": kto}


def alone(rank, size, calls):
    quiet()
    return [KINDS[kind](sp=None, **call) for kind, call in calls]


def shared(rank, size, sp, calls):
    quiet()
    burst.replace_ulysses()
    return [KINDS[kind](sp=sp, **{**call, "folder": f"{call['folder']}/{rank}"}) for kind, call in calls]


CASES = {
    "SFT": ("sft", {"gradient_accumulation_steps": 2}),
    "SFT, rows padded": ("sft", {**ROWS, "stage": 3, "per_device_eval_batch_size": 2}),
    "SFT, packed": ("sft", {"packing": True, "eval_packing": True, "per_device_eval_batch_size": 2}),
    "SFT, padding-free": (
        "sft",
        {"padding_free": True, "max_length": None, **ROWS},
    ),
    "SFT, padding-free, LoRA": ("sft", {"padding_free": True, "max_length": None, "lora": True, **ROWS}),
    "SFT, a hybrid": ("sft", {"hybrid": True, "section": {"layout": "zigzag"}}),
    "DPO": ("dpo", {"gradient_accumulation_steps": 2}),
    "DPO, rows padded": ("dpo", {**ROWS, "beta": 0.5, "per_device_eval_batch_size": 3}),
    "DPO, LoRA": ("dpo", {"lora": True}),
    "KTO": ("kto", {"per_device_eval_batch_size": 2}),
}


PREDICTED = {**ROWS, "compute_metrics": accuracy, "per_device_eval_batch_size": 2}


def _predicted(rank, size, folder):
    """What SFT finds with metrics of predictions, and what the log says."""
    lines = []

    class Note(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())

    quiet()
    logging.getLogger("burst_mcore").addHandler(Note())
    burst.replace_ulysses()
    found, _ = sft(f"{folder}/{rank}", size, **PREDICTED)
    return found["evaluation"], [line for line in lines if "burst_mcore" in line]


def test_predictions_are_of_whole_sequences_and_the_log_says_whose_loss_it_is(tmp_path):
    (((want, _),),) = processes(1, alone, [("sft", {"folder": str(tmp_path), **PREDICTED})])
    (one, first), (other, second) = processes(2, _predicted, str(tmp_path))
    assert len(first) == 1 and "the loss is left to TRL's fused head" in first[0] and not second
    assert len(want["evaluation"]) == 4
    for found in (one, other):
        assert found == pytest.approx(want["evaluation"], rel=1e-5)


def _others(rank, size, folder):
    """What is said to trainers of TRL that are not served."""
    from datasets import Dataset
    from trl.experimental.cpo import CPOConfig, CPOTrainer
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    from burst_mcore.transformers.errors import RefusedError

    class Mine(CPOTrainer):
        pass

    quiet()
    burst.replace_ulysses()
    found = {}
    for kind, config, options in (
        (Mine, CPOConfig, {}),
        (GKDTrainer, GKDConfig, {"teacher_model": model_of()}),  # a subclass of one that is served
    ):
        arguments = arguments_of(f"{folder}/{rank}", size, kind=config, bf16=False, max_length=48)
        data = Dataset.from_list(preferences(2) if kind is Mine else texts(2))
        try:
            kind(model_of(), args=arguments, train_dataset=data, processing_class=tokenizer(), **options)
        except RefusedError as error:
            found[kind.__name__] = str(error)
        forget()
    return found


def test_other_trainers_are_refused_by_their_names(tmp_path):
    for found in processes(2, _others, str(tmp_path)):
        assert [*found] == ["Mine", "GKDTrainer"]
        for name, said in found.items():
            assert said.startswith(f"refused (trainer): {name} is not served") and "SFTTrainer" in said


FEW = ("SFT, packed", "SFT, a hybrid", "SFT, padding-free, LoRA", "DPO, rows padded", "KTO")


@pytest.mark.parametrize(
    "names",
    [FEW, pytest.param([name for name in CASES if name not in FEW], marks=pytest.mark.slow)],
    ids=["few", "others"],
)
def test_trl(names, tmp_path):
    calls = [(kind, {**options, "folder": str(tmp_path)}) for kind, options in map(CASES.get, names)]
    (want,) = processes(1, alone, calls)
    for found in processes(2, shared, 2, calls):
        for name, (ours, parameters), (theirs, true) in zip(names, found, want, strict=True):
            for key, values in theirs.items():
                assert values and ours[key] == pytest.approx(values, rel=1e-4, abs=1e-6), (name, key)
            assert worst(parameters, true) < 1e-6, name


@pytest.mark.slow
def test_evaluation_of_two_groups(tmp_path):
    """Of weights that stay, in last loads in which the groups have unequal numbers of rows, or none."""
    still = {"folder": str(tmp_path), "learning_rate": 0.0, "max_steps": 1}
    cases = {name: CASES[name] for name in ("SFT, rows padded", "SFT, packed", "DPO, rows padded", "KTO")}
    calls = [(kind, {**options, **still}) for kind, options in cases.values()]
    (want,) = processes(1, alone, calls)
    for found in processes(4, shared, 2, calls):
        for name, (ours, _), (theirs, _) in zip(cases, found, want, strict=True):
            assert ours["evaluation"][0] == pytest.approx(theirs["evaluation"][0], rel=1e-5), name
