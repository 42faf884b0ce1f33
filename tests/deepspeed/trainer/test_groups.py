"""Settings that leave sequences whole though burst was asked for: a warning, or a refusal."""

import logging
import os
from types import SimpleNamespace

import pytest
from engines import model_of, quiet
from ranks import processes
from test_trainer import UNEQUAL, arguments_of, forget, parallelism, sections

import burst_mcore.deepspeed as burst
from burst_mcore.transformers.data.batches import collated
from burst_mcore.transformers.errors import RefusedError
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
    "cp, no ParallelismConfig": (("cp",), lambda: {}),
    "cp, a ParallelismConfig of 1": (("cp",), lambda: {"parallelism_config": _cp(1)}),
    "sp, DeepSpeed alone": (("sp",), lambda: {"deepspeed": sections()}),
    "both": (("sp", "cp"), lambda: {}),
    "sp_size under cp": (("cp",), lambda: {"deepspeed": sections(), "parallelism_config": parallelism(2)}),
    "cp_size under sp": (("sp",), lambda: {"deepspeed": sections(), "parallelism_config": _cp()}),
}
"""(functions that were called, arguments of the Trainer)."""


def _said(rank, size, folder):
    """By name, what the log has, and what was raised, when a Trainer trains two steps."""
    from transformers import Trainer

    lines = []

    class Note(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())

    quiet()
    logging.getLogger("burst_mcore").addHandler(Note())
    found = {}
    for name, (settings, options) in FORGOTTEN.items():
        _replace(*settings)
        lines.clear()
        os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)  # of the arguments before
        model, arguments = model_of(), arguments_of(folder, None, **{**options(), "max_steps": 2})
        raised = None
        try:
            trainer = Trainer(model, arguments, train_dataset=UNEQUAL, data_collator=collated)
            trainer.train()
            trainer.evaluate(UNEQUAL[:2])
        except RefusedError as error:
            raised = str(error)
        found[name] = [*lines], raised
        forget()
    return found


def test_a_group_that_is_not_there(tmp_path):
    """A warning comes once, on the first rank; a refusal on all."""
    for rank, found in enumerate(processes(2, _said, str(tmp_path))):
        for name, setting in (
            ("cp, no ParallelismConfig", "cp_size"),
            ("cp, a ParallelismConfig of 1", "cp_size"),
            ("sp, DeepSpeed alone", "sp_size"),
            ("both", "sp_size or cp_size"),
        ):
            variable = setting.split(" ")[0].upper()
            said = f"{WHOLE}{GIVEN}{setting}, or set ACCELERATE_USE_PARALLELISM_CONFIG=true and "
            assert found.pop(name) == ([said + f"PARALLELISM_CONFIG_{variable}"] * (rank == 0), None), name
        assert found == {
            "sp_size under cp": (
                [], f"refused (configuration): sp_size=2 needs {SP_CALL}, and {CP_CALL} was called: call the "
                "first, or write cp_size=2",
            ),
            "cp_size under sp": (
                [], f"refused (configuration): cp_size=2 needs {CP_CALL}, and {SP_CALL} was called: call the "
                "first, or write sp_size=2",
            ),
        }  # fmt: skip


@pytest.mark.parametrize(
    ("setting", "error"),
    [
        ("cp_size", "cp_size=2 needs FSDP2, and FSDP 1 was asked for: write fsdp_version 2"),
        (
            "sp_size",
            "sp_size=2 needs DeepSpeed: give the Trainer its JSON as deepspeed=, or Accelerator a De",
        ),
    ],
)
def test_another_engine(monkeypatch, setting, error):
    """By a stand-in of an Accelerator, which accepts these settings with GPUs alone."""
    monkeypatch.setitem(REPLACED, setting, True)
    sizes = SimpleNamespace(**{"sp_size": 1, "cp_size": 1, setting: 2})
    one = SimpleNamespace(parallelism_config=sizes, num_processes=2, distributed_type="FSDP", is_fsdp2=False)
    prepare = with_groups(lambda self, *args: args)
    with pytest.raises(RefusedError, match=error):
        prepare(one, "model")
    one.is_fsdp2, one.distributed_type = True, "FSDP" if setting == "cp_size" else "DEEPSPEED"
    assert prepare(one, "model") == ("model",)


def test_one_process_is_not_warned(caplog, monkeypatch):
    monkeypatch.setitem(REPLACED, "cp_size", True)
    alone = SimpleNamespace(parallelism_config=None, num_processes=1)
    assert with_groups(lambda self, *args: args)(alone, "model") == ("model",) and not caplog.records


@pytest.mark.parametrize("first", ["sp", "cp"])
def test_replacements_are_restored_in_any_order(first):
    from accelerate import Accelerator
    from transformers import Trainer

    from burst_mcore.torch import restore_context_parallel

    _replace()
    prepare = Accelerator.prepare
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
