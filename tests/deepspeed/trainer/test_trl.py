"""TRL's SFT, DPO and KTO over CP groups, held to the same in one process."""

import pytest
from engines import model_of, quiet, worst
from ranks import on_ranks, processes
from test_trainer import _runs, arguments_of, weights
from trainers import accuracy, forget, preferences, texts, tokenizer, trl_trained

import burst_mcore.deepspeed as burst
from burst_mcore.transformers.errors import UnsupportedError

trl = pytest.importorskip("trl")
assert trl.SFTTrainer  # whose file is imported here once: ranks are forked


def trained(kind, folder, sp, *, lora=False, hybrid=False, compute_metrics=None, **options):
    """(figures, weights) of TRL's trainer of a kind."""
    config = getattr(trl, f"{kind}Config")
    options = {"max_length": 48, "bf16": False, **options}
    others = {} if compute_metrics is None else {"compute_metrics": compute_metrics}
    figures, trainer = trl_trained(
        kind, lambda: arguments_of(folder, sp, kind=config, **options), lora=lora, hybrid=hybrid, **others
    )
    parameters = weights(trainer)
    if sp is not None:
        trainer.model_wrapped.destroy()
        forget()
    return figures, parameters


ROWS = {"per_device_train_batch_size": 2}


CASES = {
    "SFT": ("SFT", {"gradient_accumulation_steps": 2}),
    "SFT, rows padded": ("SFT", {**ROWS, "stage": 3, "per_device_eval_batch_size": 2}),
    "SFT, packed": ("SFT", {"packing": True, "eval_packing": True, "per_device_eval_batch_size": 2}),
    "SFT, padding-free, LoRA": ("SFT", {"padding_free": True, "max_length": None, "lora": True, **ROWS}),
    "SFT, a hybrid": ("SFT", {"hybrid": True, "section": {"layout": "zigzag"}}),
    "DPO": ("DPO", {"gradient_accumulation_steps": 2}),
    "DPO, rows padded": ("DPO", {**ROWS, "beta": 0.5, "per_device_eval_batch_size": 3}),
    "DPO, LoRA": ("DPO", {"lora": True}),
    "KTO": ("KTO", {**ROWS, "per_device_eval_batch_size": 2}),
}


PREDICTED = {**ROWS, "compute_metrics": accuracy, "per_device_eval_batch_size": 2}


def _predicted(rank, size, want, folder, caplog):
    quiet()
    burst.replace_ulysses()
    found, _ = trained("SFT", f"{folder}/{rank}", size, **PREDICTED)
    assert len(want) == 4 and found["evaluation"] == pytest.approx(want, rel=1e-5)
    told = [line for line in caplog.messages if line.startswith("burst_mcore")]
    assert len(told) == (rank == 0)
    assert all("the loss is left to TRL's fused head" in line for line in told)


def test_predictions_are_of_whole_sequences_and_the_log_says_whose_loss_it_is(tmp_path, caplog):
    call = {"kind": "SFT", "folder": str(tmp_path), **PREDICTED}
    (((want, _),),) = processes(1, _runs, trained, None, [call])
    caplog.set_level("INFO", logger="burst_mcore")
    processes(2, _predicted, want["evaluation"], str(tmp_path), caplog)


@on_ranks(2)
def test_other_trainers_are_refused_by_their_names(rank, size, tmp_path):
    from datasets import Dataset
    from trl.experimental.cpo import CPOConfig, CPOTrainer
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    quiet()
    burst.replace_ulysses()
    for kind, config, rows, options in (
        (type("Mine", (CPOTrainer,), {}), CPOConfig, preferences(2), {}),
        (
            GKDTrainer,
            GKDConfig,
            texts(2),
            {"teacher_model": model_of()},
        ),  # a subclass of one that is supported
    ):
        options["args"] = arguments_of(
            str(tmp_path / str(rank)), size, kind=config, bf16=False, max_length=48
        )
        words = rf"unsupported \(trainer\): {kind.__name__} is not supported.*SFTTrainer"
        with pytest.raises(UnsupportedError, match=words):
            kind(model_of(), train_dataset=Dataset.from_list(rows), processing_class=tokenizer(), **options)
        forget()


FEW = ("SFT, packed", "SFT, a hybrid", "SFT, padding-free, LoRA", "DPO, rows padded", "KTO")


@pytest.mark.parametrize(
    "names",
    [FEW, pytest.param([name for name in CASES if name not in FEW], marks=pytest.mark.slow)],
    ids=["few", "others"],
)
def test_trl(names, tmp_path):
    folder = str(tmp_path)
    calls = [{"kind": kind, "folder": folder, **options} for kind, options in map(CASES.get, names)]
    (want,) = processes(1, _runs, trained, None, calls)
    for found in processes(2, _runs, trained, 2, calls):
        for name, (ours, parameters), (theirs, true) in zip(names, found, want, strict=True):
            for key, values in theirs.items():
                assert values and ours[key] == pytest.approx(values, rel=1e-4, abs=1e-6), (name, key)
            assert worst(parameters, true) < 1e-6, name
