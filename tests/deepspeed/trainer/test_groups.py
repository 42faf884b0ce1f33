"""Settings that leave sequences whole though burst was asked for: a warning, or a refusal."""

import os
import re
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from engines import model_of, quiet
from ranks import on_ranks
from test_trainer import UNEQUAL, arguments_of, parallelism, sections
from trainers import forget

import burst_mcore.deepspeed as burst
from burst_mcore.deepspeed.accelerate import groups_of
from burst_mcore.transformers.data.batches import collated
from burst_mcore.transformers.errors import UnsupportedError
from burst_mcore.transformers.trainer import REPLACED, with_groups

pytest.importorskip("accelerate")

WHOLE = "burst_mcore: no sequence is shared, each of 2 processes has its own: "
GIVEN = "give the Trainer or Accelerator a ParallelismConfig with "
SP_CALL, CP_CALL = "burst_mcore.deepspeed.replace_ulysses()", "burst_mcore.torch.replace_context_parallel()"


def _replace(*settings):
    from burst_mcore.torch import replace_context_parallel, restore_context_parallel

    restore_context_parallel()
    burst.restore_ulysses()
    for setting in settings:
        burst.replace_ulysses() if setting == "sp" else replace_context_parallel()


def _cp(size=2):
    from accelerate.parallelism_config import ParallelismConfig

    return ParallelismConfig(cp_size=size)


FORGOTTEN = {
    "both": (("sp", "cp"), lambda: {}),
    "cp, a ParallelismConfig of 1": (("cp",), lambda: {"parallelism_config": _cp(1)}),
    "sp, DeepSpeed alone": (("sp",), lambda: {"deepspeed": sections()}),
    "sp_size under cp": (("cp",), lambda: {"deepspeed": sections(), "parallelism_config": parallelism(2)}),
}
"""(functions that were called, arguments of the Trainer)."""
WARNED = {
    "both": "sp_size or cp_size",
    "cp, a ParallelismConfig of 1": "cp_size",
    "sp, DeepSpeed alone": "sp_size",
}
"""By name, the setting that a warning asks for; of the others there is a refusal."""


@on_ranks(2)
def test_a_group_that_is_not_there(rank, size, tmp_path, caplog):
    """A warning comes once, on the first rank; a refusal on all."""
    from transformers import Trainer

    quiet()
    with pytest.raises(UnsupportedError, match="sp_size=3 does not divide the 2 processes"):
        groups_of(3)
    for name, (settings, options) in FORGOTTEN.items():
        _replace(*settings)
        os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)  # of the arguments before
        model, arguments = model_of(), arguments_of(str(tmp_path), None, **{**options(), "max_steps": 2})
        setting, caplog_before = WARNED.get(name), len(caplog.records)
        words = f"sp_size=2 needs {SP_CALL}, and {CP_CALL} was called: call the first, or write cp_size=2"
        with nullcontext() if setting else pytest.raises(UnsupportedError, match=re.escape(words)):
            trainer = Trainer(model, arguments, train_dataset=UNEQUAL, data_collator=collated)
            trainer.train()
            trainer.evaluate(UNEQUAL[:2])
        said = (
            f"{WHOLE}{GIVEN}{setting}, or set ACCELERATE_USE_PARALLELISM_CONFIG=true and PARALLELISM_CONFIG_"
        )
        told = [record.getMessage() for record in caplog.records[caplog_before:]]
        told = [line for line in told if line.startswith("burst_mcore")]
        assert len(told) == (rank == 0 and setting is not None), name
        assert all(line.startswith(said) for line in told), (name, told)
        forget()


def test_another_engine(monkeypatch):
    """By a stand-in of an Accelerator, which accepts the setting with GPUs alone."""
    prepare = with_groups(lambda self, *args: args)
    monkeypatch.setitem(REPLACED, "sp_size", True)
    sizes = SimpleNamespace(sp_size=2, cp_size=1)
    one = SimpleNamespace(parallelism_config=sizes, num_processes=2, distributed_type="FSDP")
    error = "sp_size=2 needs DeepSpeed: give the Trainer its JSON as deepspeed=, or Accelerator a De"
    with pytest.raises(UnsupportedError, match=error):
        prepare(one, "model")
    one.distributed_type = "DEEPSPEED"
    assert prepare(one, "model") == ("model",)


@pytest.mark.parametrize("first", ["sp", "cp"])
def test_replacements_are_restored_in_any_order(first):
    from accelerate import Accelerator
    from transformers import Trainer

    from burst_mcore.torch import replace_context_parallel, restore_context_parallel

    _replace()
    prepare = Accelerator.prepare
    with pytest.raises(UnsupportedError, match=r"unsupported \(config\): .*lay_out"):
        replace_context_parallel(config={"lay_out": "striped"})
    assert Accelerator.prepare is prepare
    _replace("sp", "cp")
    shared = SimpleNamespace(parallelism_config=SimpleNamespace(sp_size=2, cp_size=1))
    trainer = SimpleNamespace(model=SimpleNamespace(_tp_size=1), accelerator=shared)
    assert Trainer.get_tp_size(trainer) == 2, "a method that both replace by one is replaced once"
    restores = {"sp": burst.restore_ulysses, "cp": restore_context_parallel}
    restores.pop(first)()
    assert Accelerator.prepare is not prepare and Trainer.get_tp_size(trainer) == 2
    (last,) = restores.values()
    last()
    assert Accelerator.prepare is prepare
