"""A group of rollouts as a tree, through DeepSpeed's loader and engine, beside rows of one process."""

import pytest
from engines import config_of, start, trained
from loops import assert_alike
from ranks import processes
from test_rollouts import stepped_apart, turns

from burst_mcore.rollouts import fold


def folded(rank, size, stage, section):
    batches = (fold(*turns()).batch for _ in range(1))
    engine, loader = start(config_of(stage, size, **section), batches)
    (loss,), _, _, parameters = trained(engine, loader, 1)
    return loss, parameters


@pytest.mark.parametrize(
    ("stage", "section"),
    [(3, {"layout": "striped"}), pytest.param(1, {"fused_loss": False}, marks=pytest.mark.slow)],
)
def test_a_step_on_a_tree_is_that_of_weighted_rows(stage, section):
    assert_alike(processes(2, folded, stage, section), stepped_apart(*turns()), 1e-5, 1e-6)
