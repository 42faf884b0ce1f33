"""The data classes of the bench: a subject measures methods on cases, in trials with timed steps."""

from __future__ import annotations

import contextlib
import math
import statistics
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from typing import Any, ClassVar, Self, TypeVar

import torch.distributed as dist

from burst_mcore.attention.schedule.heads import why_not_heads
from burst_plan.words import tokens

T = TypeVar("T")
ALL = "all cases"
"""The case of figures that follow from several cases."""
TimedStep = Callable[[], object]
"""A step to time. A mapping that it returns has further meters of the same round."""


@dataclass(frozen=True)
class World:
    """The processes that measure a case together, from the view of one of them."""

    rank: int
    size: int
    device: str = "cpu"

    @property
    def group(self) -> dist.ProcessGroup:
        assert dist.group.WORLD is not None
        return dist.group.WORLD


def nothing(case: Any, place: Any) -> None:
    """Build nothing, or need nothing."""


def ready(built: T, case: Any, world: World) -> T:
    """Return a method that is the same for all cases: partial(ready, built) builds it."""
    return built


@dataclass(frozen=True)
class Method:
    """A method to compare. Processes get it pickled: its functions are importable by name."""

    name: str
    build: Callable[[Any, World], Any] = nothing
    """(case, world) -> the method, ready to be called, in the form that its kind has. Collective."""
    needs: Callable[[Any, str], str | None] = nothing
    """(case, device) -> the missing requirement there, as text; None if there is none."""
    ours: bool = True
    """A failure is an error of the run, not a result."""
    row: Mapping[str, Any] = field(default_factory=dict)
    """Its fields in a row of measurements, for `burst-mcore plan --against`; empty: no row."""


METHODS: dict[tuple[str, str], Method] = {}
"""All methods to compare, by the kind of their task, and by name."""


def add(kind: str, *methods: Method) -> None:
    """Register methods for every subject of a kind."""
    METHODS.update({(kind, method.name): method for method in methods})


def of_kind(kind: str) -> list[Method]:
    """Return the methods of a kind."""
    return [method for (key, _), method in METHODS.items() if key == kind]


@dataclass(frozen=True)
class Trial:
    """A method, or a unit for comparison with methods, ready in this process."""

    steps: Mapping[str, TimedStep]
    """The timed steps, by the prefix of their meters; "" for a single step."""
    warm: TimedStep | None = None
    """Called once before the others: it builds everything that is built once."""
    check: Callable[[], Mapping[str, float]] = dict
    """Meters that are read once, before freed memory is kept: peak memory, and errors ("... error")."""
    bound: float = math.inf
    """A method with an error that is not at most this is wrong, and is not timed."""
    ahead: bool = False
    """Whether a GPU sleeps before the steps, so that it need not wait for the host."""


@dataclass(frozen=True)
class Stage:
    """The preparation of one process for a case."""

    trial: Callable[[Method], Trial]
    units: Mapping[str, Trial] = field(default_factory=dict)
    """Units that are timed in turn with the methods, by name."""
    facts: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """Figures from the preparation, by (method, meter)."""
    room: int = 0
    """Bytes that the process takes from the system before the timed steps."""


class Table(dict[tuple[str, str], Sequence[float]]):
    """The samples of one case by (method, meter), one for each round."""

    @property
    def methods(self) -> list[str]:
        """Methods and units, in order."""
        return list(dict.fromkeys(method for method, _ in self))

    def column(self, meter: str) -> dict[str, Sequence[float]]:
        return {method: samples for (method, name), samples in self.items() if name == meter}

    def medians(self, meter: str) -> dict[str, float]:
        return {method: statistics.median(samples) for method, samples in self.column(meter).items()}

    def over(self, figure: tuple[str, str], unit: tuple[str, str]) -> list[float]:
        """Return the ratios of two figures, round by round; none if one of them was not measured."""
        return [a / b for a, b in zip(self.get(figure, ()), self.get(unit, ()), strict=False)]

    def fastest(self, methods: Collection[str]) -> str | None:
        """Return the method with the least wall seconds; None if no method was timed."""
        medians = {method: wall for method, wall in self.medians("wall").items() if method in methods}
        return min(medians, key=medians.__getitem__, default=None)


Derived = Iterable[tuple[str, str, Sequence[float]]]
"""(method, meter, samples) of figures that are computed from others."""


@dataclass(frozen=True)
class Bar:
    """A value that the median of a figure must reach."""

    claim: str
    method: str
    meter: str
    bound: float | None = None
    """The bound; None: the figure is recorded, and not judged."""
    at_most: bool = True
    case: str = ""
    value: float = math.nan
    """The measured value on the case; NaN before the measurement."""
    predicted: float | None = None
    """The prediction before a measurement, if there is one."""

    @property
    def reached(self) -> bool:
        if self.bound is None:
            return True
        return self.value <= self.bound if self.at_most else self.value >= self.bound

    @property
    def must_be(self) -> str:
        """The bound as text; "" if there is none."""
        return "" if self.bound is None else f"{'<=' if self.at_most else '>='} {self.bound:.4g}"


@typing.dataclass_transform(frozen_default=True, kw_only_default=True)
@dataclass(frozen=True, kw_only=True)
class Case:
    """One measurement. A subject is a subclass: its name, its cases, and the work of a process on a case.

    The docstring of a subject is its description in tables and files. A subclass is a data class, as this one
    is. Fields can be given as text. Integer fields are at least 1, unless 0 is their default.
    """

    subject: ClassVar[str]
    """The name: `burst-mcore bench NAME`."""
    kind: ClassVar[str] = ""
    """The kind of its methods in METHODS; "" if its trials make them: see `methods`."""
    default: ClassVar[tuple[str, ...]] = ()
    """Methods that are measured on CPUs by default; all if empty, and on GPUs."""
    devices: ClassVar[tuple[str, ...]] = ("cpu",)
    joined: ClassVar[bool] = False
    """Whether torchrun may start the ranks; on GPUs it must."""
    repeats: ClassVar[int] = 3
    emulated: ClassVar[bool] = False
    """Whether ranks are on an emulated cluster: a case has its ranks, `where`, and `rates`."""
    beside: ClassVar[str | None] = None
    """A unit; each method has its own processes, where only this unit runs in turn with it."""
    clearly: ClassVar[float] = math.inf
    """A step that takes this many times as long as the fastest in the first round is not timed again."""
    overall: ClassVar[tuple[Bar, ...]] = ()
    """Bars of the summary."""

    ranks: int = 1
    """Processes that share the work."""
    threads: int = 1
    """Threads of torch, in each process."""
    processes: int = 1
    """Fresh sets of processes, one after another: they differ by more than rounds do."""
    rounds: int = 1
    """Timed rounds for each of --repeats."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)

    def __post_init__(self) -> None:
        for each in fields(self):
            value, legal = getattr(self, each.name), each.metadata.get("legal")
            if legal and value not in legal:
                words = ", ".join(map(str, legal))
                raise ValueError(f"{each.name} must be one of {words}, got {value!r}")
            if not legal and type(value) is int and value < (each.default != 0):
                raise ValueError(f"{each.name} must be at least 1, got {value}")

    @classmethod
    def about(cls) -> str:
        return " ".join((cls.__doc__ or "").split())

    @classmethod
    def named(cls, device: str) -> Mapping[str, Self]:
        """Return the cases that are measured by default: the case with all defaults, unless overridden."""
        return {cls.subject: cls()}

    def methods(self) -> Sequence[Method]:
        """Return all methods that the case can measure."""
        return of_kind(self.kind) if self.kind else [Method("burst")]

    def prepare(self, world: World) -> Stage:
        """Prepare a process to measure the case."""
        raise NotImplementedError

    def derive(self, table: Table) -> Derived:
        """Yield the figures that are computed from the case's measurements."""
        return ()

    @classmethod
    def summary(cls, tables: Mapping[str, Table]) -> Derived:
        """Yield the figures of all cases together, from the tables of the cases."""
        return ()

    def bars(self, device: str) -> Sequence[Bar]:
        return ()


def one_of(default: Any, legal: Iterable[Any]) -> Any:
    """Return a field of a case with a fixed set of legal values."""
    return field(default=default, metadata={"legal": tuple(legal)})


def in_words(kind: type[T], text: str, **fixed: Any) -> T:
    """Return an object of a data class from a text such as "seq=4096; mask=causal & window:64".

    Raises a ValueError for unknown fields, also those in `fixed`, and for illegal values.
    """
    hints, names = typing.get_type_hints(kind), [each.name for each in fields(kind)]  # type: ignore[arg-type]
    changes = {}
    for part in filter(None, map(str.strip, text.split(";"))):
        name, equals, value = map(str.strip, part.partition("="))
        if not equals or name not in names:
            legal = ", ".join(names)
            raise ValueError(f"unknown field {name!r} in {text!r}; legal: {legal}, as in 'ranks=2; ...'")
        if name in fixed:
            raise ValueError(f"{name} is given twice: as {fixed[name]!r}, and in {text!r}")
        changes[name] = _value(name, value, typing.get_args(hints[name]) or (hints[name],))
    return kind(**{**fixed, **changes})


READERS: dict[type, Callable[[str], Any]] = {
    bool: {"True": True, "False": False}.__getitem__,
    int: lambda text: int(text) if text.lstrip("-").isdigit() else tokens(text),
    float: float,
    str: str,
}
"""Types of a text, the strictest first."""


def _value(name: str, text: str, kinds: tuple[type, ...]) -> Any:
    for kind in (kind for kind in READERS if kind in kinds):
        with contextlib.suppress(ValueError, KeyError):
            return READERS[kind](text)
    raise ValueError(f"{name} must be {' or '.join(kind.__name__ for kind in kinds)}, got {text!r}")


def first_line(error: BaseException) -> str:
    """Return the kind of an error, and its first line."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:300]}"


def installed(name: str, case: Any, device: str, *, on_gpu: bool = False) -> str | None:
    """Return the missing package of a method, or its missing GPU; None if the machine has both."""
    return " and ".join(filter(None, ["a GPU" * (on_gpu and device != "cuda"), missing(name)])) or None


def missing(*packages: str) -> str | None:
    """Return the first package that is not installed, as text; None if all are."""
    modules = {name: name.removesuffix("-core").replace("-", "_") for name in packages}  # megatron-core's
    return next((f"the package {name}" for name, module in modules.items() if not find_spec(module)), None)


def shareable(case: Any, ranks: int) -> str | None:
    """Return the unmet requirement of our method with heads shared over this many ranks."""
    why_not = why_not_heads(case.heads, case.kv_heads, ranks)
    return None if why_not is None else f"heads that {ranks} ranks can share: {why_not}"


def shared_heads(case: Any, ranks: int) -> str | None:
    """Return the unmet requirement of a method that divides heads, and K/V heads, over this many ranks."""
    if not case.heads % ranks and not case.kv_heads % ranks:
        return None
    return f"heads and K/V heads that are multiples of {ranks}, got {case.heads} and {case.kv_heads}"
