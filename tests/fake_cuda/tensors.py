"""Tensors that say `cuda` and hold memory of the CPU; an operator on them is a launch on the current stream.

For C++ such a tensor is a wrapper on the CPU, for Python it is on `cuda:R`, R the rank. So autograd runs its
nodes in the thread that calls it, and `ranks` gives it a thread of its own, as a device has.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from .clocks import CHECKER, place
from .memory import Memory, access, any_pinned, memory_of, pin, pinned
from .streams import THREAD, Stream, current_stream, host, index_of, waits

READ_BY_HOST = (
    "_local_scalar_dense nonzero masked_select equal is_nonzero unique_dim _unique2 unique_consecutive"
).split()
"""Operators whose results the host must have before it can go on."""
MAKES_ROOM = "empty new_empty empty_like empty_strided new_empty_strided".split()
SETS = "copy_ fill_ zero_ normal_ uniform_ random_".split()
"""Operators in place that do not read what they write."""
STAND_INS: dict[str, Callable[..., Any]] = {}
"""Operators that torch has for CUDA alone, by name: functions on the CPU tensors."""
FAILS: dict[tuple[int, str], int] = {}
"""By rank and launch: how many of it succeed before one fails."""


class CudaTensor(Tensor):
    """A tensor on a device that is not there."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[attr-defined]

    values: Tensor
    rank: int

    @staticmethod
    def __new__(cls, values: Tensor, rank: int, memory: Memory | None = None) -> CudaTensor:
        made: Any = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            values.size(),
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
        )
        made.values, made.rank, made.memory = values, rank, memory
        if memory is None:
            with CHECKER.lock:
                made.memory = memory_of(values, rank, current_stream(rank).number)
        return made

    device = property(lambda self: torch.device("cuda", self.rank))
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    def get_device(self) -> int:
        return self.rank

    def data_ptr(self) -> int:
        return self.values.data_ptr()

    def untyped_storage(self) -> Any:
        return self.values.untyped_storage()

    def record_stream(self, stream: Stream) -> None:
        if self.memory is not None:
            self.memory.recorded.add(stream.number)

    def to(self, *args: Any, **options: Any) -> Any:
        device, dtype, non_blocking, copy = _asked(args, options)
        if device is None or (device.type == "cuda" and index_of(device) == self.rank):
            return super().to(dtype or self.dtype, non_blocking=non_blocking, copy=copy)
        return torch.ops.aten._to_copy(self, dtype=dtype, device=device, non_blocking=non_blocking)

    def cpu(self) -> Tensor:
        return self.to("cpu")

    def cuda(self, *args: Any, **options: Any) -> Tensor:
        return self

    def tolist(self) -> Any:
        return self.detach().cpu().tolist()

    def numpy(self, *args: Any, **options: Any) -> Any:
        raise TypeError("can't convert cuda tensor to numpy")

    def __repr__(self, *args: Any, **options: Any) -> str:
        return f"CudaTensor({list(self.shape)}, {self.dtype}, cuda:{self.rank})"

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return launch_operator(operator(function), args, kwargs or {})


def _asked(args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, Any, bool, bool]:
    """Return (device, dtype, non_blocking, copy) of the arguments of `Tensor.to`."""
    device, dtype = options.get("device"), options.get("dtype")
    flags = [options.get("non_blocking", False), options.get("copy", False)]
    rest = [x for x in args if not isinstance(x, bool)]
    for index, flag in enumerate(x for x in args if isinstance(x, bool)):
        flags[index] = flag
    for each in rest:
        if isinstance(each, torch.dtype):
            dtype = each
        elif isinstance(each, Tensor):
            device, dtype = each.device, each.dtype
        elif each is not None:
            device = each
    return None if device is None else torch.device(device), dtype, *flags


class Operator:
    """What is known of an operator of torch, looked up once."""

    def __init__(self, function: Any) -> None:
        schema = function._schema
        self.function, self.name = function, schema.name.removeprefix("aten::")
        self.stand_in = f"{self.name}.{schema.overload_name}"
        self.own = OPDEFS.get(schema.name)
        """One in Python: what it does is noted, not the operator."""
        self.is_made_of_others = function._can_decompose()
        arguments = [(i, a) for i, a in enumerate(schema.arguments) if a.alias_info is not None]
        self.writes = [(i, a.name) for i, a in arguments if a.alias_info.is_write]
        """Place and name of the arguments that it writes to."""
        self.into = any(a.kwarg_only for _, a in arguments)
        returns = [r.alias_info for r in schema.returns]
        self.views = bool(returns) and all(a is not None and not a.is_write for a in returns)

    def written(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        """Return the tensors that it writes to."""
        given = [kwargs.get(name, args[i] if i < len(args) else None) for i, name in self.writes]
        return tensors_in(given)


operator = functools.cache(Operator)


def tensors_in(arguments: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among the arguments of an operator, and in lists of these."""
    found = []
    for x in arguments:
        if isinstance(x, Tensor):
            found.append(x)
        elif isinstance(x, list | tuple):
            found += tensors_in(x)
    return found


class Cuda(TorchDispatchMode):
    """Within it, in this thread, `device="cuda"` makes such tensors, and all they do is noted."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here: torch need not look at every call

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if THREAD.in_backward and kwargs.get("device") == CPU and _of_engine():
            kwargs = {**kwargs, "device": torch.device("cuda", THREAD.device)}
        this = operator(function)
        if this.own is not None:
            with self:
                return this.own._init_fn(*args, **kwargs)
        on_host = not types and not _names_device(args, kwargs)
        if on_host and not (this.is_made_of_others and _pinned_in(args, kwargs)):
            return _on_host(this, args, kwargs)
        if this.is_made_of_others and this.name != "narrow":  # a view in any case
            with self:
                return function.decompose(*args, **kwargs)
        return launch_operator(this, args, kwargs)


CPU = torch.device("cpu")


def _names_device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether the arguments of an operator name a device that is not the host."""
    return any(isinstance(x, torch.device) and x.type == "cuda" for x in (kwargs.get("device"), *args))


def _of_engine() -> bool:
    """Return whether a derivative in C++ makes a tensor: like others, whose device there is the CPU."""
    frame: Any = sys._getframe(1)
    while frame.f_code.co_name in ("__torch_dispatch__", "decompose"):  # of the mode, and torch's
        frame = frame.f_back
    return bool(frame.f_code.co_name == "_engine_run_backward")


def launch(
    name: str, reads: Iterable[Any], writes: Iterable[Any], *, rank: int, stream: int | None = None
) -> None:
    """Note one launch on a stream, by default the current one, and the tensors that it reads and writes."""
    if (rank, name) in FAILS:
        FAILS[rank, name] -= 1
        if FAILS[rank, name] < 0:
            raise RuntimeError(f"CUDA error: {name} of rank {rank} failed")
    with CHECKER.lock:
        stream = current_stream(rank).number if stream is None else stream
        CHECKER.join(stream, CHECKER.clocks[host(rank)])
        count = CHECKER.tick(stream)
        CHECKER.launches[rank][name] += 1
        for tensors, write in ((reads, False), (writes, True)):
            for x in tensors:
                if isinstance(x, CudaTensor):
                    if x.rank != rank:
                        CHECKER.found("device", f"{name} on {rank} takes memory of {x.rank} at [{place()}]")
                    if x.memory is not None:
                        access(x.memory, x.values, stream, count, write=write, name=name)
                elif isinstance(x, Tensor) and (of_host := pinned(x)) is not None:
                    access(of_host, x, stream, count, write=write, name=name)


def as_kernel(
    name: str, function: Callable[..., Any], writes: Iterable[str | int] = ()
) -> Callable[..., Any]:
    """Return a function on host tensors as a kernel: one launch, and results on the device.

    writes: the arguments that it writes to, by name or place.
    """
    writes = set(writes)

    def kernel(*args: Any, **options: Any) -> Any:
        given = [*enumerate(args), *options.items()]
        tensors = [(key, x) for key, value in given for x in tree_leaves(value) if isinstance(x, Tensor)]
        rank = next(x.rank for _, x in tensors if isinstance(x, CudaTensor))
        _check_devices(name, [x for _, x in tensors])
        for key, x in tensors:
            assert key in writes or not isinstance(x, CudaTensor) or x.memory is not None or not x.numel()
        with on_host():
            done = function(*tree_map(values_of, args), **tree_map(values_of, options))
        made = tree_map(lambda x: CudaTensor(x, rank) if isinstance(x, Tensor) else x, done)
        written = [x for key, x in tensors if key in writes] + tree_leaves(made)
        launch(name, [x for key, x in tensors if key not in writes], written, rank=rank)
        return made

    return kernel


on_host = torch._C._DisableTorchDispatch  # type: ignore[attr-defined]
"""Within it operators, all on host tensors, are nobody's launches: the arithmetic of a stand-in."""


def values_of(x: Any) -> Any:
    """Return the host tensor with the values of a device tensor; anything else as it is."""
    return x.values if isinstance(x, CudaTensor) else x


def _values(x: Any) -> Any:
    """Return an argument of an operator with host tensors in the place of those of the device."""
    if isinstance(x, CudaTensor):
        return x.values
    return [_values(y) for y in x] if isinstance(x, list | tuple) else x


def launch_operator(this: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator of torch on the host tensors, and note what it did."""
    if this.views and isinstance(args[0], CudaTensor):
        return _view(this.function(args[0].values, *args[1:], **kwargs), args[0])
    name, given, options = this.name, tensors_in((*args, *kwargs.values())), dict(kwargs)
    ours = [x for x in given if isinstance(x, CudaTensor)]
    device = options.get("device")
    there = None if device is None else torch.device(device).type == "cuda"
    if not ours and not there:
        return _on_host(this, args, kwargs)
    rank = index_of(device) if there else ours[0].rank
    if there:
        options["device"] = CPU
    options.pop("pin_memory", None) if there is not False else None
    pin_it = options.pop("pin_memory", False)
    _note_waits(name, args, kwargs, given, rank, there)
    run = STAND_INS.get(this.stand_in) or STAND_INS.get(name) or this.function
    done = run(*map(_values, args), **{key: _values(x) for key, x in options.items()})
    written = this.written(args, kwargs)
    if there is False:
        results = pin(done) if pin_it else done
    elif written and not any(isinstance(x, CudaTensor) for x in written):  # a copy to the host
        results = done
    else:
        results = _on_device(done, {id(x.values): x for x in ours}, rank)
    if name in MAKES_ROOM:
        return results
    fresh = [
        x
        for x in tensors_in([results])
        if isinstance(x, CudaTensor)
        and not any(x is y for y in written)
        and not any(x.memory is y.memory for y in ours)
    ]
    if not (written or fresh or there is False):
        return results
    reads = [x for x in given if not any(x is y for y in written)]
    if written and name not in SETS and not this.into:
        reads += written
    launch(name, reads, written + fresh, rank=rank)
    return results


def _view(done: Any, base: CudaTensor) -> Any:
    """Return views of a tensor's values as views of the tensor."""
    if isinstance(done, Tensor):
        return CudaTensor(done, base.rank, base.memory)
    return [_view(x, base) for x in done]


def _on_device(done: Any, back: dict[int, CudaTensor], rank: int) -> Any:
    """Return the results of an operator as tensors of the device: those that it was given, or new ones."""
    if isinstance(done, Tensor):
        return back[id(done)] if id(done) in back else CudaTensor(done, rank)
    return type(done)(_on_device(x, back, rank) for x in done) if isinstance(done, list | tuple) else done


def _on_host(this: Operator, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Run an operator on host tensors alone; pinned ones may be in use by the device."""
    rank, pin_it = THREAD.rank, options.get("pin_memory", False)
    if pin_it:
        options = {**options, "pin_memory": False}
    used = [] if rank is None or this.views else _pinned_in(args, options)
    if used:
        with CHECKER.lock:
            me, written = host(rank), this.written(args, options)
            count = CHECKER.tick(me)
            for x, memory in used:
                write = any(x is y for y in written)
                access(memory, x, me, count, write=write, name=this.name)
    done = this.function(*args, **options)
    return pin(done) if pin_it else done


def _pinned_in(args: tuple[Any, ...], options: dict[str, Any]) -> list[tuple[Tensor, Memory]]:
    """Return the pinned tensors among the arguments of an operator, with their memory."""
    given = tensors_in((*args, *options.values())) if any_pinned() else []
    return [(x, memory) for x in given if (memory := pinned(x)) is not None]


def _note_waits(
    name: str, args: Any, kwargs: Any, given: list[Tensor], rank: int, there: bool | None
) -> None:
    """Let the host wait where the operator makes it, and report devices that do not go together."""
    if name in READ_BY_HOST:
        _waits(rank, name)
    if name in ("index", "index_put_", "_index_put_impl_", "index_put"):
        indices = [x for x in args[1] if isinstance(x, Tensor)]
        filled = name != "index" and isinstance(args[2], Tensor) and args[2].numel() == 1
        if any(x.dtype in (torch.bool, torch.uint8) for x in indices) and not filled:
            _waits(rank, f"{name} by a mask")
        if any(not isinstance(x, CudaTensor) for x in indices):
            _waits(rank, f"{name} by an index of the host")
    elif name == "copy_":
        to, source = args[:2]
        asked = kwargs.get("non_blocking", len(args) > 2 and args[2])
        if isinstance(to, CudaTensor) != isinstance(source, CudaTensor):
            of_host = source if isinstance(to, CudaTensor) else to
            _note_copy(of_host, asked, rank)
    elif name == "_to_copy":
        crosses = isinstance(args[0], CudaTensor) == (there is False)
        if there is not None and crosses:
            # what the host gets is new, pageable memory; what it gives may be pinned
            of_host = None if isinstance(args[0], CudaTensor) else args[0]
            _note_copy(of_host, kwargs.get("non_blocking", False), rank)
    else:
        _check_devices(name, given)


def _note_copy(of_host: Tensor | None, non_blocking: bool, rank: int) -> None:
    """Note a copy between host and device, for which the host waits unless its memory is pinned."""
    if of_host is not None and of_host.numel() == 1 and of_host.dim() == 0 and pinned(of_host) is None:
        return  # a number: it goes as an argument of the launch
    if not non_blocking:
        _waits(rank, "a blocking copy")
    elif of_host is None or pinned(of_host) is None:
        _waits(rank, "a copy of memory that is not pinned")


def _waits(rank: int, why: str) -> None:
    waits(rank, CHECKER.snapshot(current_stream(rank).number), why)


def _check_devices(name: str, given: list[Tensor]) -> None:
    for x in given:
        if type(x) is Tensor and x.dim() > 0 and x.numel() > 0:
            CHECKER.found("device", f"{name} takes a tensor of the host at [{place()}]")
