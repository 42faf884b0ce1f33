"""Patches for causal LMs of Hugging Face transformers (5.x): forward with labels, without logits."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from types import MethodType
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from burst_mcore.loss.deferred import DeferredLogits
from burst_mcore.loss.function import fused_linear_cross_entropy
from burst_mcore.wrap import while_set

AnyModel = TypeVar("AnyModel", bound=nn.Module)


def patch_causal_lm(
    model: AnyModel, *, chunk_tokens: int | str = "auto", grad_weight_dtype: torch.dtype = torch.float32
) -> AnyModel:
    """Patch the model's forward: with `labels` or `shift_labels` it returns the loss without logits.

    The model's own forward runs, with deferred logits of its head: `fused_linear_cross_entropy` applies the
    model's operations on them (a cap, a scale, tokens shifted or flattened). It runs within the head's own
    forward, so that hooks there gather the weight (ZeRO-3). Hence the loss is the model's own, with
    `num_items_in_batch`, `ignore_index` or an auxiliary loss of experts, up to rounding; but a mean over no
    label is 0 instead of NaN.

    With `shift_labels` [..., tokens], already shifted, `labels` are optional. The output's `logits` are None;
    a tuple lacks them. Without labels, the forward is the model's own, and so is generate. Parameters,
    state_dict, class and loss_function stay unchanged; copies of the model are patched, too.

    Args:
        model: A decoder whose output embeddings are a torch.nn.Linear; patched in place, and returned. A
            second patch replaces the options of the first.
        chunk_tokens, grad_weight_dtype: As `fused_linear_cross_entropy` has them.

    Raises:
        ValueError: if the model cannot be patched.
        TypeError: in forward with labels, if the model applies an unsupported operation to its logits.

    Source: BurstEngine (SC'25), "sequence-level fusion of LM head and loss".
    """
    head_of(model)
    options = {"chunk_tokens": chunk_tokens, "grad_weight_dtype": grad_weight_dtype}
    patched = patch_of(model)
    if patched is not None:
        patched[1].options = options
    else:
        model.forward = PatchedForward(model, options)
    return model


def unpatch_causal_lm(model: AnyModel) -> AnyModel:
    """Undo `patch_causal_lm`, if the model is patched, and return the model.

    Raises:
        ValueError: if other code has wrapped the patched forward since; undo this first.
    """
    patched = patch_of(model)
    if patched is None:
        return model
    owner, patch = patched
    if owner.__dict__["forward"] is not patch:
        raise ValueError(f"{type(owner).__name__}.forward was wrapped after it was patched: unwrap it first")
    del owner.forward
    if patch.instance:
        owner.forward = patch.__wrapped__
    return model


@contextmanager
def unpatched(model: nn.Module) -> Iterator[None]:
    """Suspend the patch of a model: within, its forward computes its logits and its own loss."""
    patched = patch_of(model)
    with while_set(patched[1], paused=True) if patched else nullcontext():
        yield


def head_of(model: nn.Module) -> nn.Linear:
    """Return the output embeddings of a model. Raises ValueError with the reason why it cannot be patched."""
    name = type(model).__name__
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise ValueError(f"{name} is an encoder and a decoder, not a causal LM")
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is None:
        raise ValueError(f"{name} has no output embeddings (get_output_embeddings)")
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        kind = f"{type(head).__module__}.{type(head).__qualname__}"
        raise ValueError(f"output embeddings of {name} must be a torch.nn.Linear, got a {kind}")
    if "forward" in head.__dict__ and not _is_of_tensor_parallelism(head.__dict__["forward"]):
        raise ValueError(f"the forward of {name}'s output embeddings has been replaced by something else")
    return head


class PatchedForward:
    """A patched model's forward, an attribute of the instance: copied and pickled with the model."""

    def __init__(self, model: nn.Module, options: dict[str, Any]) -> None:
        self.model, self.options = model, options
        self.paused = False
        """Whether the model's own forward runs: see `unpatched`."""
        self.compute: Callable[..., Tensor] | None = None
        """A function with the loss's arguments; forwards with labels return its result instead."""
        self.instance = "forward" in model.__dict__
        """Whether the instance had its own forward before."""
        original = model.forward if self.instance else MethodType(type(model).forward, model)
        self.__wrapped__: Callable[..., Any] = original  # inspect.signature reads this attribute
        self.__doc__ = original.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.paused:
            return self.__wrapped__(*args, **kwargs)
        names = [*inspect.signature(self.__wrapped__).parameters]
        arguments = dict(zip(names, args, strict=False)) | kwargs
        shift_labels = arguments.get("shift_labels")
        if arguments.get("labels") is None:
            if shift_labels is None:
                return self.__wrapped__(*args, **kwargs)
            place = names.index("labels") if "labels" in names else len(args)
            if place < len(args):
                args = (*args[:place], shift_labels, *args[place + 1 :])
            else:
                kwargs["labels"] = shift_labels  # without labels models compute no loss
        head = StandIn(self, shift_labels)
        with _in_place(self.model, head):
            out = self.__wrapped__(*args, **kwargs)
        if not head.asked:
            raise TypeError(
                f"{head.model} cannot be patched: with labels its forward takes no cross_entropy of logits "
                "that its output embeddings make"
            )
        return _without_logits(out) if self.compute is None else head.computed


class StandIn:
    """A head that returns deferred logits; it replaces the model's head during a forward with labels.

    Its call does not gather the weight.
    """

    def __init__(self, patch: PatchedForward, shift_labels: Tensor | None) -> None:
        self.head, self.model = head_of(patch.model), type(patch.model).__name__
        self.options, self.compute, self.shift_labels = patch.options, patch.compute, shift_labels
        self.computed = torch.empty(0)
        self.columns = self.head.out_features
        self.asked = 0
        """The number of calls of `loss`."""

    def __call__(self, hidden: Tensor) -> DeferredLogits:
        return DeferredLogits(hidden, self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.head, name)  # models look at weight.dtype

    def loss(self, hidden: Tensor, labels: Tensor, **options: Any) -> Tensor:
        """Return the loss, computed within the head's forward, with positional tensors for its hooks."""
        if self.shift_labels is not None:  # a model without support shifts them again, or ignores them
            if not torch.equal(self.shift_labels.to(labels).flatten(), labels.flatten()):
                self.refuse("does not take shift_labels as they are for")
        self.asked += 1
        compute = self.compute or fused_linear_cross_entropy
        options |= self.options

        def forward(hidden: Tensor, labels: Tensor) -> Any:
            weight, bias, group = self._own_rows()
            return compute(hidden, weight, labels, bias=bias, tp_group=group, **options)

        with while_set(self.head, forward=forward), _plain(self.head):
            loss: Tensor = self.head(hidden, labels)
        if self.compute is not None:
            self.computed = loss
            return loss.new_zeros(())  # a placeholder: `computed` is returned
        return loss.clone()  # models add to it in place, illegal for a view from hooks

    def _own_rows(self) -> tuple[Tensor, Tensor | None, dist.ProcessGroup | None]:
        """Return the head's weight, bias and None, or this rank's rows of both and the TP group.

        Tensor parallelism shards the vocabulary as DTensors over the ranks of a mesh.
        """
        weight: Any = self.head.weight
        bias: Any = self.head.bias
        placements = getattr(weight, "placements", None)
        group = None
        if placements is not None and len(placements) == 1 and placements[0].is_shard(0):
            group = weight.device_mesh.get_group()
            bias = None if bias is None else bias.to_local()
            weight = weight.to_local()
        elif placements is not None or weight.shape != (self.columns, self.head.in_features):
            self.refuse("has spread the vocabulary over ranks, not for the loss to see, of")
        return weight, bias, group

    def refuse(self, use: str) -> NoReturn:
        raise TypeError(
            f"{self.model} cannot be patched: with labels its forward {use} the logits, which are not made "
            "(unpatch_causal_lm takes the patch back)"
        )


def patch_of(model: nn.Module) -> tuple[nn.Module, PatchedForward] | None:
    """Return the patched module within a model (or its adapters) and its patch, perhaps wrapped; or None."""
    for module in model.modules():
        forward = module.__dict__.get("forward")
        while forward is not None and not isinstance(forward, PatchedForward):
            forward = getattr(forward, "__wrapped__", None)
        if forward is not None:
            return module, forward
    return None


def _is_of_tensor_parallelism(hook: Any) -> bool:
    """Return whether a forward or a hook is tensor parallelism's: it shards inputs, or gathers outputs.

    torch's styles add hooks, transformers' replace the forward:
    https://github.com/pytorch/pytorch, torch/distributed/tensor/_api.py, distribute_module;
    https://github.com/huggingface/transformers, src/transformers/distributed/tensor_parallel.py.
    """
    name = getattr(hook, "__qualname__", "")
    return name.startswith(("distribute_module.<locals>", "TensorParallelLayer.install_forward.<locals>"))


@contextmanager
def _plain(head: nn.Linear) -> Iterator[None]:
    """Suspend the hooks of tensor parallelism on a head: the loss takes and returns plain tensors."""
    with ExitStack() as stack:
        for kind in ("_forward_pre_hooks", "_forward_hooks"):
            hooks = getattr(head, kind)
            others = {key: hook for key, hook in hooks.items() if not _is_of_tensor_parallelism(hook)}
            if len(others) < len(hooks):
                stack.enter_context(while_set(head, **{kind: OrderedDict(others)}))
        yield


@contextmanager
def _in_place(model: nn.Module, stand_in: StandIn) -> Iterator[None]:
    """Replace the head by the stand-in in all its parents; the model's modules stay unchanged."""
    with ExitStack() as stack:
        for parent in model.modules():
            for name, child in parent._modules.items():
                if child is stand_in.head:
                    stack.enter_context(while_set(parent, **{name: stand_in}))
        yield


def _without_logits(out: Any) -> Any:
    if isinstance(out, Mapping):
        return type(out)(**{key: x for key, x in out.items() if not isinstance(x, DeferredLogits)})
    if isinstance(out, tuple):
        return tuple(x for x in out if not isinstance(x, DeferredLogits))
    return out
