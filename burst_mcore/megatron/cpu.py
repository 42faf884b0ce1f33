"""Megatron without a GPU: patches for unmodified megatron.core and megatron.training on CPU and gloo.

For tests, teaching and debugging. No patch changes a result: allocations on a CUDA device are on the CPU,
streams and events are inert, the CUDA generator is the CPU generator, compiled functions run eagerly. Checked
with Megatron-Core 0.16.1 and 0.19.2. Each patch can go when Megatron asks for the device.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import os
import shlex
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.data.dataloader import _BaseDataLoaderIter

from burst_mcore.layout import Layout, positions
from burst_mcore.wrap import around, wrap, wrap_everywhere

logger = logging.getLogger(__name__)

CPU_ARGUMENTS = shlex.split(
    "--distributed-backend gloo --transformer-impl local --use-cpu-initialization "
    "--no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion "
    "--no-rope-fusion --no-gradient-accumulation-fusion --no-persist-layer-norm"
)
"""The flags for Megatron's trainer on a CPU, known to every version named above."""


@functools.cache
def enable() -> None:
    """Make megatron.core usable in this process without CUDA, permanently. Idempotent.

    Call it in the thread that trains. Raises RuntimeError if CUDA is available: a GPU must not be hidden.
    """
    if torch.cuda.is_available():
        raise RuntimeError("CPU support for Megatron refuses to start: CUDA is available, run on the GPU")
    for name, value in _CUDA.items():
        setattr(torch.cuda, name, value)
    torch.cuda.random.get_rng_state = _CUDA["get_rng_state"]
    # torch's own takes no other class of streams.
    torch.Tensor.record_stream = _returns(None)  # type: ignore[method-assign]
    wrap(torch.autograd, "_engine_run_backward", _within_mode)
    wrap(torch.distributed, "barrier", _without_devices)
    wrap(_BaseDataLoaderIter, "__init__", _leaving_rng)
    _MODE.__enter__()  # type: ignore[no-untyped-call]
    torch.compiler.set_stance("force_eager")  # jit_fuser is torch.compile, which needs a compiler for nothing
    _patch_core()
    if os.environ.get("RANK", "0") == "0":
        logger.warning("burst_mcore: CPU support is on: Megatron's CUDA calls run on the CPU")


def _patch_core() -> None:
    from megatron.core import utils
    from megatron.core.extensions.transformer_engine import HAVE_TE
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    # It defers to the start of CUDA, through functions that are imported by name.
    random._set_cuda_rng_state = _CUDA["set_rng_state"]
    # Splits of the all-to-all dispatcher of experts must be no tensors.
    token_dispatcher.maybe_move_tensor_to_cpu = _moved_already
    # Resuming a DistributedOptimizer over torch's Adam (no Transformer Engine, no Apex) fails on any device:
    # it asks a fresh Adam for its step; then it loads into views of leaves that require a gradient (float32),
    # takes the step of the fresh Adam or none, and lets all parameters share one step, which grows by their
    # number. Each can go when state_dict, load_parameter_state_* and load_state_dict of that class allow it.
    wrap(DistributedOptimizer, "sharded_state_dict", _with_state_to_load_into)
    wrap(DistributedOptimizer, "_set_main_param_and_optimizer_states", _loading_torch_state)
    with contextlib.suppress(ImportError):  # from 0.19 on
        from megatron.core.models.hybrid import hybrid_block

        if not HAVE_TE:  # HybridStack names TransformerEngine's norm itself, whatever its spec says
            hybrid_block.TENorm = WrappedTorchNorm
    if getattr(utils, "tex", 0) is None:  # asked for how packed documents are sharded, from 0.19 on
        utils.tex = SimpleNamespace(thd_get_partitioned_indices=_rows_of_documents)


@functools.cache
def enable_training() -> None:
    """Patch megatron.training, after `enable()`. Call it before `megatron.training.pretrain`."""
    enable()
    # Megatron asserts this variable under tensor and context parallelism on GPUs before Blackwell.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    from megatron.core.datasets import utils
    from megatron.training import initialize

    wrap_everywhere(initialize, "initialize_megatron", _without_cuda_check)
    # Runs the fused functions on random numbers, which CUDA takes from a generator that initialises nothing
    # under --use-cpu-initialization. Here it is the same one: weights would depend on sequence and CP size.
    initialize._warmup_jit_function = _returns(None)
    wrap(utils, "compile_helpers", _unless_compiled)
    if hasattr(initialize, "fused_kernels"):  # up to 0.16
        initialize.fused_kernels.load = _returns(None)  # asks nvcc for its version


class _CudaMeansCpu(TorchFunctionMode):
    """A mode that replaces every CUDA device in a call of torch by the CPU.

    torch.autograd runs Python backwards, and recomputed forwards in them, outside its caller's modes:
    `_within_mode` enters this mode again.
    """

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if kwargs.get("device") is not None:
            kwargs["device"] = _to_cpu(kwargs["device"])
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if func is torch.Tensor.to:
            args = (args[0], *map(_to_cpu, args[1:]))
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(result, str):  # Megatron's optimizers compare names
            return result.replace("torch.", "torch.cuda.", 1)
        return result


def _to_cpu(value: Any) -> Any:
    """Return `value`, or the CPU for a CUDA device: "cuda:1", torch.device("cuda"), 1."""
    is_cuda = isinstance(value, str | torch.device) and str(value).split(":")[0] == "cuda"
    return torch.device("cpu") if type(value) is int or is_cuda else value


_MODE = _CudaMeansCpu()


class _Stream(torch.cpu.Stream):
    """A stream without pending work."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: _Event | None = None) -> _Event:  # type: ignore[override]
        return event or _Event()

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, 0


class _Event(torch.cpu.Event):
    """An event that is complete."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...


def _returns(value: Any) -> Callable[..., Any]:
    """Return a new function that returns a value: torch.compile takes no function for two of torch's."""
    return lambda *args, **kwargs: value


_CUDA: dict[str, Any] = {
    "current_device": _returns(torch.device("cpu")),
    "device_count": _returns(1),  # to Megatron 0 means: no model parallel groups, no seed
    # Where DeepSpeed was imported (PYTORCH_NVML_BASED_CUDA_CHECK), torch takes a count above 0 for an answer.
    "is_available": _returns(False),
    "set_device": _returns(None),
    "get_device_properties": _returns(SimpleNamespace(major=0, minor=0, total_memory=0)),
    "get_device_capability": _returns((0, 0)),
    # Asynchrony: everything is done when a call returns.
    "Stream": _Stream,
    "Event": _Event,
    "stream": contextlib.nullcontext,
    "current_stream": _returns(_Stream()),
    "default_stream": _returns(_Stream()),
    "synchronize": _returns(None),
    "is_current_stream_capturing": _returns(False),
    # Random numbers: torch queues CUDA seeds until CUDA starts, which would be never.
    "get_rng_state": lambda device=None: torch.get_rng_state(),
    "set_rng_state": lambda new_state, device=None, graph_safe=False: torch.set_rng_state(new_state),
    "manual_seed": torch.default_generator.manual_seed,
    # Memory statistics: torch's other ones are 0 without CUDA already.
    "memory_stats": _returns(defaultdict(int)),
    "reset_peak_memory_stats": _returns(None),
}
"""Replacements of names in torch.cuda."""


@around
def _within_mode(original: Callable, *args: Any, **kwargs: Any) -> Any:
    """Wrap torch's backward, see _CudaMeansCpu. Can go when torch keeps modes within backward."""
    with _MODE:
        return original(*args, **kwargs)


@around
def _leaving_rng(original: Callable, *args: Any, **kwargs: Any) -> Any:
    """Wrap a loader's iterator, which draws a seed: on the first tensor parallel rank alone.

    Dropout, the CUDA generator's business, would then differ between ranks that must agree.
    """
    state = torch.get_rng_state()
    result = original(*args, **kwargs)
    torch.set_rng_state(state)
    return result


@around
def _with_state_to_load_into(
    original: Callable, self: Any, model_sharded_state_dict: Any, is_loading: bool = False, **kwargs: Any
) -> Any:
    """Wrap `DistributedOptimizer.sharded_state_dict` to initialise a fresh torch optimizer first."""
    if is_loading and not self.optimizer.state:
        self._init_optimizer_states_with_dummy_values()
    return original(self, model_sharded_state_dict, is_loading, **kwargs)


@around
def _loading_torch_state(
    original: Callable, self: Any, model_param: torch.Tensor, tensors: dict[str, Any]
) -> None:
    """Wrap `DistributedOptimizer._set_main_param_and_optimizer_states` for the state of torch's Adam."""
    group, order = self.model_param_group_index_map[model_param]
    state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
    state["step"] = state["step"].clone()
    with torch.no_grad():
        original(self, model_param, {**tensors, "step": state["step"]})


def _without_cuda_check(original: Callable) -> Callable:
    """Set Megatron's option for data processing without CUDA, which only skips an assertion."""
    return functools.partial(original, allow_no_cuda=True)


@around
def _unless_compiled(original: Callable) -> None:
    """Wrap `compile_helpers` to skip an existing module: wheels have the module, without the Makefile."""
    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
        original()


def _moved_already(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Replace `maybe_move_tensor_to_cpu`, which converts only tensors on a GPU."""
    return tensor.detach().numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _rows_of_documents(cu_seqlens: torch.Tensor, tokens: int, size: int, rank: int) -> torch.Tensor:
    """Return the tokens of a rank with each document sharded zigzag."""
    ends = torch.cat([cu_seqlens.long(), torch.tensor([tokens])]).unique()
    layout = Layout("zigzag-documents", ends=tuple(ends.tolist()))
    return positions(tokens, rank=rank, size=size, layout=layout)


@around
def _without_devices(original: Callable, *args: Any, device_ids: Any = None, **kwargs: Any) -> Any:
    """Wrap `torch.distributed.barrier`: Megatron names the current device, which is no number here."""
    return original(*args, **kwargs)
