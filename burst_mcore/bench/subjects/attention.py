"""One attention layer, forward and backward: each method's CPU seconds beside the bare kernel's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from burst_mcore.bench import gate
from burst_mcore.bench.core import Derived, Method, Stage, Subject, Table, Trial, World, over
from burst_mcore.bench.methods.attention import Attention, RingCase


@dataclass(frozen=True, kw_only=True)
class AttentionCase(RingCase):
    """Attention that the bare kernel can also do in one call."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (reason := gate.refusal(self)) is not None:
            raise ValueError(reason)


def ring_trial(case: RingCase, world: World, method: Method) -> Trial:
    """Return a method of the kind "attention", behind the gate."""
    built: Attention = method.build(case, world)
    *local, dout = map(built.shard, case.tensors())

    def step() -> None:
        q, k, v = (x.detach().requires_grad_() for x in local)
        built.attend(q, k, v).backward(dout)

    def check() -> Mapping[str, float]:
        short = gate.gate_problem(case, world.size)
        assert isinstance(short, RingCase)
        return {"error": gate.error(short, method.build(short, world), world)}

    return Trial({"": step}, check=check, bound=gate.BOUND)


def on_first(world: World, run: Callable[[], object]) -> Trial:
    """Return a unit on rank 0 while the others wait asleep, so that it has a core to itself."""

    def step() -> None:
        if world.rank == 0:
            run()

    return Trial({"": step})


def _stage(case: AttentionCase, world: World) -> Stage:
    tensors: tuple[Tensor, ...] = case.tensors()
    alone = gate.bare_kernel(case)
    kernel = on_first(world, lambda: alone(*tensors))
    return Stage(lambda method: ring_trial(case, world, method), {"kernel": kernel})


def _derive(case: AttentionCase, table: Table) -> Derived:
    for method in dict.fromkeys(method for method, _ in table):
        yield method, "cpu / kernel", over(table, (method, "cpu"), ("kernel", "cpu"))


def _cases(device: str) -> Mapping[str, AttentionCase]:
    return {f"{n} rank{'s' if n > 1 else ''}": AttentionCase(ranks=n) for n in (1, 4)}


SUBJECT = Subject(
    name="attention",
    about="Forward and backward of one attention layer over gloo; errors are multiples of the bare kernel's.",
    case=AttentionCase,
    cases=_cases,
    stage=_stage,
    kind="attention",
    default=("burst", "all-gather", "deepspeed-ulysses"),
    derive=_derive,
)
