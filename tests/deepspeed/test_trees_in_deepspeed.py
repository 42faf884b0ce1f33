"""A group of rollouts as a tree, through DeepSpeed's loader and engine, beside rows of one process."""

import pytest
import torch
from engines import config_of, model_of, start, trained, worst
from ranks import processes
from torch.nn.functional import cross_entropy

from burst_mcore.rollouts import fold

VOCABULARY = 61


def rollouts():
    """Two turns that share labels, and a rollout of another prompt."""
    draw = torch.Generator().manual_seed(5)
    a, b, first, *last = (torch.randint(3, VOCABULARY, (n,), generator=draw) for n in (11, 7, 9, 8, 5, 12))
    rows = [torch.cat(x) for x in ([a, first, last[0]], [a, first, last[1]], [b, last[2]])]
    labelled = [torch.arange(len(row)) >= start for row, start in zip(rows, (11, 11, 7), strict=True)]
    return rows, labelled, [1.0, -0.5, 2.0]


def apart():
    """(loss, gradients, parameters after a step) of one process with a row for each rollout."""
    model, losses = model_of(), []
    for row, label, weight in zip(*rollouts(), strict=True):
        logits = model(input_ids=row[None], use_cache=False).logits[0, :-1]
        losses.append(weight * cross_entropy(logits, row[1:], reduction="none")[label[1:]])
    loss = torch.cat(losses).mean()
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return loss.item(), gradients, {name: p.detach() for name, p in model.named_parameters()}


def folded(rank, size, stage, section):
    batches = (fold(*rollouts()).batch for _ in range(1))
    engine, loader = start(config_of(stage, size, **section), batches)
    (loss,), gradients, _, parameters = trained(engine, loader, 1)
    return loss, gradients, parameters


@pytest.mark.parametrize(
    ("stage", "section"),
    [(3, {"layout": "striped"}), pytest.param(1, {"fused_loss": False}, marks=pytest.mark.slow)],
)
def test_a_step_on_a_tree_is_that_of_weighted_rows(stage, section):
    want, gradients, parameters = apart()
    for loss, mine, stepped in processes(2, folded, stage, section):
        assert loss == pytest.approx(want, rel=1e-5)
        assert worst(mine, gradients) < 4e-6
        assert worst(stepped, parameters) < 1e-6
