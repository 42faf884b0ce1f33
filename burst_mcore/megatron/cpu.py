"""Megatron without a GPU: patches for unmodified megatron.core and megatron.training on CPU and gloo.

For tests, teaching and debugging. No patch changes a result: allocations on a CUDA device are on the CPU,
streams and events are inert, the CUDA generator is the CPU generator, compiled functions run eagerly. Checked
with Megatron-Core 0.16.1 and 0.19.2, and with branch dev. Each entry of the tables of patches below can go
when Megatron queries the device instead of naming CUDA.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from burst_mcore.layout import Layout, positions
from burst_mcore.wrap import around

logger = logging.getLogger(__name__)

CPU_ARGUMENTS: tuple[str, ...] = (
    *("--distributed-backend", "gloo"),
    *("--transformer-impl", "local"),
    "--use-cpu-initialization",
    "--no-masked-softmax-fusion",
    "--no-bias-gelu-fusion",
    "--no-bias-swiglu-fusion",
    "--no-bias-dropout-fusion",
    "--no-rope-fusion",
    "--no-gradient-accumulation-fusion",
    "--no-persist-layer-norm",
)
"""The flags for Megatron's trainer on a CPU, known to every version named above."""


@functools.cache
def enable() -> None:
    """Make megatron.core usable in this process without CUDA, permanently. Idempotent.

    Call it in the thread that trains. Raises RuntimeError if CUDA is available: a GPU must not be hidden.
    """
    if torch.cuda.is_available():
        raise RuntimeError(
            "CPU support for Megatron refuses to start: CUDA is available. Run on the GPU instead."
        )
    _apply(_TORCH)
    _MODE.__enter__()  # type: ignore[no-untyped-call]
    torch.compiler.set_stance("force_eager")  # jit_fuser is torch.compile, which needs a compiler for nothing
    _apply(patch for patch in _IN_SOME_VERSIONS if _exists(patch))
    _apply(_CORE)
    if os.environ.get("RANK", "0") == "0":
        logger.warning("burst_mcore: CPU support is on: Megatron's CUDA calls run on the CPU")


@functools.cache
def enable_training() -> None:
    """Patch megatron.training, after `enable()`. Call it before `megatron.training.pretrain`."""
    enable()
    # Megatron asserts this variable under tensor and context parallelism on GPUs before Blackwell.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    _apply(_TRAINING)
    if hasattr(importlib.import_module("megatron.training.initialize"), "fused_kernels"):
        _apply(_TRAINING_WITH_LEGACY)


# ---- CUDA devices are the CPU ----


class _CudaMeansCpu(TorchFunctionMode):
    """A mode that replaces every CUDA device in a call of torch by the CPU.

    torch.autograd runs Python backwards, and recomputed forwards in them, outside its caller's modes:
    `_within_mode` enters this mode again.
    """

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _TENSOR_METHODS:
            return _TENSOR_METHODS[func](func, *args, **kwargs)
        if kwargs.get("device") is not None:
            kwargs["device"] = _to_cpu(kwargs["device"])
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if func is torch.Tensor.to:
            args = (args[0], *map(_to_cpu, args[1:]))
        return func(*args, **kwargs)


def _to_cpu(value: Any) -> Any:
    """Return `value`, or the CPU for a CUDA device: "cuda:1", torch.device("cuda"), 1."""
    if type(value) is int or (isinstance(value, str) and value.split(":")[0] == "cuda"):
        return torch.device("cpu")
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    return value


def _unmoved(func: Callable, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Replace `.cuda()` and `.pin_memory()`: return the tensor itself."""
    return tensor


def _cuda_type(func: Callable, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Wrap `.type()` to return 'torch.cuda.FloatTensor', the name that Megatron's optimizers compare."""
    result = func(tensor, *args, **kwargs)
    return result.replace("torch.", "torch.cuda.", 1) if isinstance(result, str) else result


_TENSOR_METHODS: dict[Callable, Callable] = {
    torch.Tensor.cuda: _unmoved,
    torch.Tensor.pin_memory: _unmoved,
    torch.Tensor.type: _cuda_type,
}
_MODE = _CudaMeansCpu()


class _Stream(torch.cpu.Stream):
    """A stream without pending work."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, event: _Event | None = None) -> _Event:  # type: ignore[override]
        event = event or _Event()
        event.record()
        return event

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, 0


class _Event(torch.cpu.Event):
    """An event that is complete when recorded, with the host's time."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.time = 0.0

    def record(self, stream: _Stream | None = None) -> None:
        self.time = time.perf_counter()

    def elapsed_time(self, end: _Event) -> float:
        return (end.time - self.time) * 1e3


# ---- the patches ----


@dataclass(frozen=True)
class _Patch:
    """A patch: `owner.name = make(original)`. The owner is "module" or "module:class"."""

    owner: str
    name: str
    make: Callable[[Any], Any]


def _owner(patch: _Patch) -> Any:
    module, _, name = patch.owner.partition(":")
    owner = importlib.import_module(module)
    return getattr(owner, name) if name else owner


def _exists(patch: _Patch) -> bool:
    """Return whether this version of Megatron has the patched name."""
    try:
        return hasattr(_owner(patch), patch.name)
    except ModuleNotFoundError as error:
        if error.name and patch.owner.startswith(error.name):
            return False
        raise


def _apply(patches: Iterable[_Patch]) -> None:
    for patch in patches:
        owner = _owner(patch)
        setattr(owner, patch.name, patch.make(getattr(owner, patch.name)))


def _is(value: Any) -> Callable[[Any], Any]:
    return lambda original: value


def _returns(value: Any) -> Callable[[Any], Any]:
    return lambda original: lambda *args, **kwargs: value


@around
def _within_mode(original: Callable, *args: Any, **kwargs: Any) -> Any:
    with _MODE:
        return original(*args, **kwargs)


def _set_rng_state(new_state: torch.Tensor, device: Any = None, graph_safe: bool = False) -> None:
    torch.set_rng_state(new_state)


@around
def _leaving_rng(original: Callable, *args: Any, **kwargs: Any) -> Any:
    """Wrap a function to restore the state of the generator."""
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


def _torch_norm(original: Callable) -> Callable:
    """Replace TransformerEngine's norm by Megatron's torch norm, if TransformerEngine is not installed."""
    from megatron.core.extensions.transformer_engine import HAVE_TE
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    return original if HAVE_TE else WrappedTorchNorm


def _without_cuda_check(original: Callable) -> Callable:
    """Set Megatron's option for data processing without CUDA, which only skips an assertion."""
    return functools.partial(original, allow_no_cuda=True)


@around
def _unless_compiled(original: Callable) -> None:
    """Wrap `compile_helpers` to skip an existing module: wheels have the module, without the Makefile."""
    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
        original()


@around
def _moved_already(
    original: Callable, tensor: Any, as_numpy: bool = False, record_stream: bool = False
) -> Any:
    """Replace `maybe_move_tensor_to_cpu`, which converts only tensors on a GPU."""
    return tensor.detach().numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _sharding_documents(original: Any) -> Any:
    """Return TransformerEngine's module of kernels, or a module with our sharding of packed documents."""
    return original or SimpleNamespace(thd_get_partitioned_indices=_rows_of_documents)


def _rows_of_documents(cu_seqlens: torch.Tensor, tokens: int, size: int, rank: int) -> torch.Tensor:
    """Return the tokens of a rank with each document sharded zigzag."""
    ends = torch.cat([cu_seqlens.long(), torch.tensor([tokens])]).unique()
    layout = Layout("zigzag-documents", ends=tuple(ends.tolist()))
    return positions(tokens, rank=rank, size=size, layout=layout)


@around
def _without_devices(original: Callable, *args: Any, device_ids: Any = None, **kwargs: Any) -> Any:
    """Wrap `torch.distributed.barrier` to drop device ids, which gloo does not accept."""
    return original(*args, **kwargs)


def _with_transformer_engine_to_pack(original: Callable[..., bool]) -> Callable[..., bool]:
    """Wrap `is_te_min_version` to accept 2.9.0, which only packing schedulers demand."""
    return lambda version, *args, **kwargs: version == "2.9.0" or original(version, *args, **kwargs)


@around
def _whatever_rotates(original: Callable[[Any], None], self: Any) -> None:
    """Wrap `TransformerConfig.__post_init__` to skip its check of --cp-comm-type: see `_that_gathers`."""
    comm_type, variant = self.cp_comm_type, getattr(self, "experimental_attention_variant", None)
    if comm_type and self.transformer_impl == "local" and variant is None:
        self.cp_comm_type = ["all_gather"] * len(comm_type) if isinstance(comm_type, list) else "all_gather"
    original(self)
    self.cp_comm_type = comm_type


@around
def _that_gathers(
    original: Callable, self: Any, config: Any, *args: Any, cp_comm_type: str | None = None, **kwargs: Any
) -> None:
    """Wrap the constructor of Megatron's local attention, which gathers keys whatever --cp-comm-type is."""
    original(self, config, *args, cp_comm_type=cp_comm_type, **kwargs)
    if config.context_parallel_size > 1 and cp_comm_type not in (None, "all_gather"):
        raise ValueError(f"Megatron's local attention has --cp-comm-type all_gather, not {cp_comm_type}")


_CONFIG = "megatron.core.transformer.transformer_config"
_TE = "megatron.core.extensions.transformer_engine"
_SCHEDULES = "megatron.core.datasets.data_schedule_utils"
_DISTRIBUTED_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
_PROPERTIES = SimpleNamespace(name="cpu", major=0, minor=0, total_memory=0, multi_processor_count=0)

_TORCH = (
    # Backwards, see _CudaMeansCpu. Can go when torch keeps modes within torch.autograd.backward.
    _Patch("torch.autograd", "_engine_run_backward", _within_mode),
    # Device management.
    _Patch("torch.cuda", "current_device", _returns(torch.device("cpu"))),
    # To Megatron 0 means: no model parallel groups, no seed.
    _Patch("torch.cuda", "device_count", _returns(1)),
    # Where DeepSpeed was imported (PYTORCH_NVML_BASED_CUDA_CHECK), torch takes a count above 0 for an answer.
    _Patch("torch.cuda", "is_available", _returns(False)),
    _Patch("torch.cuda", "set_device", _returns(None)),
    _Patch("torch.cuda", "get_device_properties", _returns(_PROPERTIES)),
    _Patch("torch.cuda", "get_device_capability", _returns((0, 0))),
    _Patch("torch.cuda", "get_device_name", _returns("cpu")),
    # Asynchrony: everything is done when a call returns.
    _Patch("torch:Tensor", "record_stream", _returns(None)),  # torch itself takes no other class of streams
    _Patch("torch.cuda", "Stream", _is(_Stream)),
    _Patch("torch.cuda", "Event", _is(_Event)),
    _Patch("torch.cuda", "stream", _is(contextlib.nullcontext)),
    _Patch("torch.cuda", "current_stream", _returns(_Stream())),
    _Patch("torch.cuda", "default_stream", _returns(_Stream())),
    _Patch("torch.cuda", "set_stream", _returns(None)),
    _Patch("torch.cuda", "synchronize", _returns(None)),
    _Patch("torch.cuda", "is_current_stream_capturing", _returns(False)),
    # Random numbers: torch queues CUDA seeds until CUDA starts, which would be never.
    _Patch("torch.cuda", "get_rng_state", _is(lambda device=None: torch.get_rng_state())),
    _Patch("torch.cuda", "set_rng_state", _is(_set_rng_state)),
    _Patch("torch.cuda", "manual_seed", _is(torch.default_generator.manual_seed)),
    _Patch("torch.cuda.random", "get_rng_state", _is(lambda device=None: torch.get_rng_state())),
    _Patch("torch.cuda.random", "set_rng_state", _is(_set_rng_state)),
    _Patch("torch.cuda.random", "manual_seed", _is(torch.default_generator.manual_seed)),
    # A loader's iterator draws a seed from the CPU generator, on the first tensor parallel rank alone.
    # Dropout, the CUDA generator's business, would then differ between ranks that must agree.
    _Patch("torch.utils.data.dataloader:_BaseDataLoaderIter", "__init__", _leaving_rng),
    # Memory statistics: torch's other ones are 0 without CUDA already.
    _Patch("torch.cuda", "memory_stats", _returns(defaultdict(int))),
    _Patch("torch.cuda", "reset_peak_memory_stats", _returns(None)),
    # Megatron names the current device, which is no number here.
    _Patch("torch.distributed", "barrier", _without_devices),
)

_CORE = (
    # It defers to the start of CUDA as well, through functions that are imported by name.
    _Patch("megatron.core.tensor_parallel.random", "_set_cuda_rng_state", _is(_set_rng_state)),
    # Splits of the all-to-all dispatcher of experts must be no tensors.
    _Patch("megatron.core.transformer.moe.token_dispatcher", "maybe_move_tensor_to_cpu", _moved_already),
    # Branch dev's local attention gathers keys. Its config takes no other --cp-comm-type for any attention.
    _Patch(f"{_CONFIG}:TransformerConfig", "__post_init__", _whatever_rotates),
    _Patch("megatron.core.transformer.dot_product_attention:DotProductAttention", "__init__", _that_gathers),
    # Resuming a DistributedOptimizer over torch's Adam (no Transformer Engine, no Apex) fails on any device:
    # it asks a fresh Adam for its step; then it loads into views of leaves that require a gradient (float32),
    # takes the step of the fresh Adam or none, and lets all parameters share one step, which grows by their
    # number. Each can go when state_dict, load_parameter_state_* and load_state_dict of that class allow it.
    _Patch(_DISTRIBUTED_OPTIMIZER, "sharded_state_dict", _with_state_to_load_into),
    _Patch(_DISTRIBUTED_OPTIMIZER, "_set_main_param_and_optimizer_states", _loading_torch_state),
)

_IN_SOME_VERSIONS = (
    # HybridStack names TransformerEngine's norm itself, whatever its spec says. From 0.19 on.
    _Patch("megatron.core.models.hybrid.hybrid_block", "TENorm", _torch_norm),
    # None without TransformerEngine, and asked for how packed documents are sharded. From 0.19 on.
    _Patch("megatron.core.utils", "tex", _sharding_documents),
    # The same question on branch dev, through a function that its schedulers import by name.
    _Patch(_TE, "get_thd_partitioned_indices", _is(_rows_of_documents)),
    _Patch(_SCHEDULES, "get_thd_partitioned_indices", _is(_rows_of_documents)),
    # Branch dev refuses to pack with an older TransformerEngine, whose attention was wrong then.
    _Patch(_CONFIG, "is_te_min_version", _with_transformer_engine_to_pack),
)

_TRAINING = (
    _Patch("megatron.training.initialize", "initialize_megatron", _without_cuda_check),
    _Patch("megatron.training.training", "initialize_megatron", _without_cuda_check),
    _Patch("megatron.training", "initialize_megatron", _without_cuda_check),
    # Runs the fused functions on random numbers, which CUDA takes from a generator that initialises nothing
    # under --use-cpu-initialization. Here it is the same one: weights would depend on sequence and CP size.
    _Patch("megatron.training.initialize", "_warmup_jit_function", _returns(None)),
    _Patch("megatron.core.datasets.utils", "compile_helpers", _unless_compiled),
)

_TRAINING_WITH_LEGACY = (
    # Asks nvcc for its version. Gone after 0.16.
    _Patch("megatron.legacy.fused_kernels", "load", _returns(None)),
)
