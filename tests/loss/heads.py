"""Small LM heads for tests, and the fused loss beside plain PyTorch."""

import torch
from plain_loss import linear_cross_entropy

from burst_mcore.loss import fused_linear_cross_entropy

D, V = 16, 53


def draw(dtype=torch.float64, tokens=(3, 13), d=D, v=V, bias=False, seed=0):
    """(hidden, weight, labels with ignored ones, bias), as leaves."""
    make = torch.Generator().manual_seed(seed)
    hidden = torch.randn(*tokens, d, generator=make, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(v, d, generator=make, dtype=torch.float64).to(dtype).requires_grad_()
    labels = torch.randint(0, v, tokens, generator=make)
    labels.flatten()[::5] = -100
    b = torch.randn(v, generator=make, dtype=torch.float64).to(dtype).requires_grad_() if bias else None
    return hidden, weight, labels, b


def both(tensors, upstream=None, fused=None, **options):
    """[(ours, the reference's)] of the loss and all gradients."""
    hidden, weight, labels, bias = tensors
    leaves = [x for x in (hidden, weight, bias) if x is not None]
    found = []
    for function, more in ((fused_linear_cross_entropy, fused or {}), (linear_cross_entropy, {})):
        loss = function(hidden, weight, labels, bias=bias, **options, **more)
        found.append((loss, *torch.autograd.grad(loss, leaves, upstream)))
    return list(zip(*found, strict=True))


def distance(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-300)).item()
