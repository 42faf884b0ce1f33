"""Losses of other packages as baselines: exact where they run; as kernels of ours they are refused."""

import importlib.machinery
import importlib.util
import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from plain_loss import linear_cross_entropy
from ranks import processes

from burst_bench.core import World, of_kind
from burst_bench.subjects import loss
from burst_bench.subjects.loss import HeadCase

HEADS = {method.name: method for method in of_kind("heads")}
CASE = HeadCase(tokens=39, hidden=16, vocabulary=53, threads=1, masked=0.2)


class LigerFusedLinearCrossEntropyLoss:
    """The module of liger-kernel 0.8.5, by our reference."""

    def __init__(
        self, ce_weight=None, ignore_index=-100, lse_square_scale=0.0, label_smoothing=0.0, reduction="mean",
        softcap=None, return_z_loss=False, accum_dtype=None, use_token_scaling=False,
        return_token_accuracy=False, return_predicted_tokens=False,
    ):  # fmt: skip
        self.ignore_index, self.reduction = ignore_index, reduction

    def __call__(self, lin_weight, _input, target, bias=None):
        assert bias is None
        return linear_cross_entropy(
            _input, lin_weight, target, ignore_index=self.ignore_index, reduction=self.reduction
        )


def cce(
    e, c, targets, ignore_index=-100, softcap=None, reduction="mean", shift=False, filter_eps="high",
    impl="cce",
):  # fmt: skip
    """linear_cross_entropy of cut-cross-entropy 25.1.1, by our reference."""
    return linear_cross_entropy(e, c, targets, ignore_index=ignore_index, reduction=reduction)


STAND_INS = {
    "liger": (
        "liger_kernel.transformers",
        "LigerFusedLinearCrossEntropyLoss",
        LigerFusedLinearCrossEntropyLoss,
    ),
    "cce": ("cut_cross_entropy", "linear_cross_entropy", cce),
}


@pytest.mark.parametrize("name", STAND_INS)
def test_packages_are_called_as_their_signatures_want(name, monkeypatch):
    module, function, stand_in = STAND_INS[name]
    parts = module.split(".")
    for i in range(1, len(parts) + 1):
        made = ModuleType(".".join(parts[:i]))
        made.__spec__ = importlib.machinery.ModuleSpec(made.__name__, None)
        monkeypatch.setitem(sys.modules, made.__name__, made)
    setattr(sys.modules[module], function, stand_in)
    assert HEADS[name].needs(CASE, "cuda") is None
    assert HEADS[name].needs(CASE, "cpu") == "a GPU"
    for errors in processes(1, _errors, name):
        assert max(errors["loss error"], errors["d_hidden error"], errors["d_weight error"]) < 1e-6


def _errors(rank, size, name):
    return loss.errors(HEADS[name].build(CASE, World(0, 1)).loss, CASE, "cpu")


def test_liger_in_tritons_interpreter():
    """Its own code, where it is installed."""
    pytest.importorskip("liger_kernel")
    assert (
        max(processes(1, _errors, "liger")[0][f"{x} error"] for x in ("loss", "d_hidden", "d_weight")) < 1e-5
    )


@pytest.mark.parametrize("name", STAND_INS)
def test_a_package_that_is_not_here_is_a_reason(name):
    module = STAND_INS[name][0].split(".")[0]
    if importlib.util.find_spec(module) is not None:
        pytest.skip(f"{module} is here")
    assert HEADS[name].needs(CASE, "cuda") == f"the package {module.replace('_', '-')}"
    assert HEADS[name].needs(CASE, "cpu").startswith("a GPU and the package")


def _torchs_calls(rank, size):
    """Shapes that torch's own is called with, as a baseline and while ours runs."""
    calls, own = [], torch.nn.functional.linear_cross_entropy

    def counted(hidden, weight, *given, **options):
        calls.append((tuple(hidden.shape), options["ignore_index"]))
        return own(hidden, weight, *given, **options)

    torch.nn.functional.linear_cross_entropy = counted
    tensors = replace(CASE, masked=0.0).tensors("cpu")
    found = []
    for name in ("torch", "burst"):
        loss.step(HEADS[name].build(CASE, World(0, 1)).loss, *tensors)
        found.append(list(calls))
    return found


@pytest.mark.skipif(
    not hasattr(torch.nn.functional, "linear_cross_entropy"), reason="torch has it from 2.13 on"
)
def test_it_is_torchs_own_that_runs_and_only_as_a_baseline():
    baseline, ours = processes(1, _torchs_calls)[0]
    assert baseline == ours == [((39, 16), -100)]
