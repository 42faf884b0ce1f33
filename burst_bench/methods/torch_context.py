"""torch's own context_parallel, whose table of operators has those of GPUs: the two of CPUs join it here.

Within it, a call of scaled_dot_product_attention runs a template of torch's with the operator that the call
chose. What a template sends, when, and how it merges is torch's on both devices. On a GPU this was never run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from burst_bench.core import World
from burst_bench.methods.sharded import AttendedBy

FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
TRAVELS = {"ring": "alltoall", "gather": "allgather"}
"""How keys and values travel, by our word: hop by hop, or all of them at once, which is torch's default."""


def templates() -> Any:
    """Return torch's module of templates, whose table has the operators of CPUs from now on."""
    from torch.distributed.tensor.experimental._context_parallel import _attention

    module: Any = _attention
    module.custom_ops.update(dict.fromkeys((FORWARD, BACKWARD), _on_cpu))
    return module


def choose(travels: str, balanced: bool = True) -> None:
    """Set the options of all templates: how keys travel, and whether the sequence is dealt zigzag."""
    templates().set_rotate_method(TRAVELS[travels])
    templates()._cp_options.enable_load_balance = balanced


def _on_cpu(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Run the template of an operator of CPUs, as torch's table does for those of GPUs."""
    from torch.distributed.tensor import DTensor

    names = (argument.name for argument in operator._schema.arguments)
    given = dict(zip(names, args, strict=False))  # callers leave out arguments at the end that have defaults
    query, causal = given["query"], given.get("is_causal", False)
    local: list[Any] = [x.to_local() for x in args if isinstance(x, DTensor)]
    mesh, run = query.device_mesh, templates()._templated_ring_attention
    if operator is BACKWARD:
        run, local = templates()._templated_ring_attention_backward, [local[0], "grad_out", *local[1:]]
    results = run(mesh.get_group(), 2, operator, *local, is_causal=causal, dropout_p=0.0, **kwargs)
    return tuple(DTensor.from_local(x, mesh, query.placements, run_check=False) for x in results)


class Causal(nn.Module):
    """The call that torch's context parallelism is put around."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=True)


def parallel_attention(world: World, travels: str, causal: bool) -> AttendedBy:
    """Return attention of zigzag shards, or contiguous ones without a mask, by torch's style for modules."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import parallelize_module

    style = templates()._ContextParallel(2, templates()._ContextParallel.AttentionType.SDPA)
    module = parallelize_module(Causal(causal), DeviceMesh.from_group(world.group, world.device), style)
    templates()._enable_context_parallel_dispatcher()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        choose(travels, balanced=causal)  # methods alternate; a backward follows its forward
        out: Tensor = module(*(x.transpose(1, 2) for x in (q, k, v)))
        return out.transpose(1, 2)

    return attend
