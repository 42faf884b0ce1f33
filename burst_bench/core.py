"""The words of the bench: a subject measures methods on cases, in trials of which the steps are timed."""

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
"""What is timed. If a step returns a mapping, that has further meters of the same round."""


@dataclass(frozen=True)
class World:
    """The processes that measure a case together, seen from one of them."""

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
    """One way to do what is measured. Processes get it pickled: its functions are importable by name."""

    name: str
    build: Callable[[Any, World], Any] = nothing
    """(case, world) -> the method, ready to be called, in the form that its kind has. Collective."""
    needs: Callable[[Any, str], str | None] = nothing
    """(case, device) -> what the method lacks there, in words; None if nothing."""
    ours: bool = True
    """A failure is an error of the run, not a result."""
    row: Mapping[str, Any] = field(default_factory=dict)
    """Its fields in a row of measurements, as `burst-mcore plan --against` reads them; empty: no row."""


METHODS: dict[tuple[str, str], Method] = {}
"""Everything that is compared, by the kind of thing that a method does, and its name."""


def add(kind: str, *methods: Method) -> None:
    """Let every subject of a kind measure these methods."""
    METHODS.update({(kind, method.name): method for method in methods})


def of_kind(kind: str) -> list[Method]:
    """Return the methods of a kind."""
    return [method for (own, _), method in METHODS.items() if own == kind]


@dataclass(frozen=True)
class Trial:
    """A method, or a unit beside which methods are measured, ready in this process."""

    steps: Mapping[str, TimedStep]
    """What is timed, by the word that goes before its meters; "" for a single step."""
    warm: TimedStep | None = None
    """Called once before all else: what is made once is made."""
    memory: Callable[[], Mapping[str, float]] = dict
    """Meters that are read once, while freed memory still goes back to the system."""
    check: Callable[[], Mapping[str, float]] = dict
    """The gate: errors by meter ("... error"), and what they were found over."""
    bound: float = math.inf
    """A method with an error that is not at most this is wrong, and is not timed."""
    ahead: bool = False
    """A GPU sleeps before the steps, so that it need not wait for the host."""


@dataclass(frozen=True)
class Stage:
    """All that one process prepares to measure a case."""

    trial: Callable[[Method], Trial]
    units: Mapping[str, Trial] = field(default_factory=dict)
    """Timed in turn with the methods, by name."""
    facts: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """Figures that preparing gave, by (method, meter)."""
    room: int = 0
    """Bytes that the process takes from the system before anything is timed."""


class Table(dict[tuple[str, str], Sequence[float]]):
    """The samples of one case by (method, meter), one for each round."""

    @property
    def methods(self) -> list[str]:
        """Methods and units, in their order."""
        return list(dict.fromkeys(method for method, _ in self))

    def column(self, meter: str) -> dict[str, Sequence[float]]:
        return {method: samples for (method, name), samples in self.items() if name == meter}

    def medians(self, meter: str) -> dict[str, float]:
        return {method: statistics.median(samples) for method, samples in self.column(meter).items()}

    def over(self, figure: tuple[str, str], unit: tuple[str, str]) -> list[float]:
        """Return ratios of two figures, round by round; none where one was not measured."""
        return [a / b for a, b in zip(self.get(figure, ()), self.get(unit, ()), strict=False)]

    def fastest(self, methods: Collection[str]) -> str | None:
        """Return which of the methods takes the least wall seconds; None if none was timed."""
        medians = {method: wall for method, wall in self.medians("wall").items() if method in methods}
        return min(medians, key=medians.__getitem__, default=None)


Derived = Iterable[tuple[str, str, Sequence[float]]]
"""(method, meter, samples) of figures that follow from others."""


@dataclass(frozen=True)
class Bar:
    """A value that the median of a figure must reach."""

    claim: str
    method: str
    meter: str
    bound: float | None
    """None: the figure is noted, and not judged."""
    at_most: bool = True
    case: str = ""
    value: float = math.nan
    """What was measured on the case; NaN where nothing was yet."""
    predicted: float | None = None
    """What was expected before a measurement, where somebody said so."""

    @property
    def reached(self) -> bool:
        if self.bound is None:
            return True
        return self.value <= self.bound if self.at_most else self.value >= self.bound

    @property
    def must_be(self) -> str:
        """The bound in words; "" if there is none."""
        return "" if self.bound is None else f"{'<=' if self.at_most else '>='} {self.bound:.4g}"


@typing.dataclass_transform(frozen_default=True, kw_only_default=True)
@dataclass(frozen=True, kw_only=True)
class Case:
    """One measurement. A subject is a subclass: its name, its cases, and the work of a process on a case.

    The docstring of a subject is what its tables and files say of it. A subclass is a data class as this one
    is. Fields can be given in words. Those that are integers are at least 1, unless 0 is their default.
    """

    subject: ClassVar[str]
    """The name: `burst-mcore bench NAME`."""
    kind: ClassVar[str] = ""
    """Of its methods in METHODS; "" if its trials make them: see `methods`."""
    default: ClassVar[tuple[str, ...]] = ()
    """Methods that are measured on CPUs where none is asked for; all if empty, and on GPUs."""
    devices: ClassVar[tuple[str, ...]] = ("cpu",)
    joined: ClassVar[bool] = False
    """torchrun may start the ranks; on GPUs it must."""
    repeats: ClassVar[int] = 3
    emulated: ClassVar[bool] = False
    """Ranks are on an emulated cluster: a case has its ranks, `where`, and `rates`."""
    options: ClassVar[tuple[str, ...]] = ()
    """Fields that have an option of the command line, such as --cluster: all cases get what was given."""
    beside: ClassVar[str | None] = None
    """Each method has processes of its own, where only this one runs in turn with it."""
    clearly: ClassVar[float] = math.inf
    """A step that takes so many times as long as the fastest in the first round is not timed again."""
    overall: ClassVar[tuple[Bar, ...]] = ()
    """Bars of the summary."""
    curve: ClassVar[tuple[str, str] | None] = None
    """Meters of which a picture shows the second against the first."""

    ranks: int = 1
    """Processes that share the work."""
    threads: int = 1
    """Of torch, in each process."""
    processes: int = 1
    """Fresh sets of processes, one after another: one differs from the next by more than rounds do."""
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
        """Return the cases that are measured where none is asked for: by default that of all defaults."""
        return {cls.subject: cls()}

    def methods(self) -> Sequence[Method]:
        """Return all that the case can measure."""
        return of_kind(self.kind) if self.kind else [Method("burst")]

    def prepare(self, world: World) -> Stage:
        """Prepare a process to measure the case."""
        raise NotImplementedError

    def derive(self, table: Table) -> Derived:
        """Yield the figures that follow from those of the case."""
        return ()

    @classmethod
    def summary(cls, tables: Mapping[str, Table]) -> Derived:
        """Yield figures of all cases together, by the tables of the cases."""
        return ()

    def bars(self, device: str) -> Sequence[Bar]:
        return ()


def one_of(default: Any, legal: Iterable[Any]) -> Any:
    """Return a field of a case that has one of these values."""
    return field(default=default, metadata={"legal": tuple(legal)})


def in_words(kind: type[T], text: str, **fixed: Any) -> T:
    """Return an object of a data class from a text such as "seq=4096; mask=causal & window:64".

    Raises a ValueError for fields that are unknown, in `fixed` as well, or not of a legal value.
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
"""What a word may be, the strictest first."""


def _value(name: str, text: str, kinds: tuple[type, ...]) -> Any:
    for kind in (kind for kind in READERS if kind in kinds):
        with contextlib.suppress(ValueError, KeyError):
            return READERS[kind](text)
    raise ValueError(f"{name} must be {' or '.join(kind.__name__ for kind in kinds)}, got {text!r}")


def first_line(error: BaseException) -> str:
    """Return the kind of an error, and its first line."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:300]}"


def installed(name: str, case: Any, device: str, *, on_gpu: bool = False) -> str | None:
    """Return the need of a method for a package, and for a GPU; None if this machine meets the need."""
    return " and ".join(filter(None, ["a GPU" * (on_gpu and device != "cuda"), missing(name)])) or None


def missing(*packages: str) -> str | None:
    """Return the first package that is not installed, in words; None if all are."""
    modules = {name: name.removesuffix("-core").replace("-", "_") for name in packages}  # megatron-core's
    return next((f"the package {name}" for name, module in modules.items() if not find_spec(module)), None)


def shareable(case: Any, ranks: int) -> str | None:
    """Return the need of a method of ours whose heads so many ranks share."""
    why_not = why_not_heads(case.heads, case.kv_heads, ranks)
    return None if why_not is None else f"heads that {ranks} ranks can share: {why_not}"


def shared_heads(case: Any, ranks: int) -> str | None:
    """Return the need of a method that shards heads, and K/V heads, evenly over so many ranks."""
    if not case.heads % ranks and not case.kv_heads % ranks:
        return None
    return f"heads and K/V heads that are multiples of {ranks}, got {case.heads} and {case.kv_heads}"
