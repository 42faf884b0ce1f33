"""Compiles the Triton kernels for a GPU that need not be there, and looks at what came out."""

from __future__ import annotations

import inspect

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from burst_mcore.attention.kernels import triton_code
from burst_mcore.attention.kernels.triton import launch
from burst_mcore.loss import rows_triton

HOPPER = GPUTarget("cuda", 90, 32)
SHARED = 227 * 1024
"""Bytes of shared memory that a block may have there."""


def compiled(name: str, head_dim: int, value_dim: int, dtype: str = "bf16", **options: bool):
    """The compiled kernel `name` for tensors of these head dims and this dtype."""
    function = getattr(triton_code, name)
    names = list(inspect.signature(function.fn).parameters)
    wide, wide_value = (1 << (dim - 1).bit_length() for dim in (head_dim, value_dim))
    sizes = launch(name, max(wide, wide_value), 4 if dtype == "fp32" else 2)
    constants = {
        "USED": head_dim, "VALUE_USED": value_dim, "DIM": wide, "VALUE_DIM": wide_value,
        "ROWS": sizes.rows, "COLUMNS": sizes.columns, "SOFTCAP": False, "FRESH": False, "lse_row": 1,
        "delta_row": 1, "PRECISION": "ieee" if dtype == "fp32" else "tf32", **options,
    }  # fmt: skip
    types = dict.fromkeys(("q", "k", "v", "dout"), f"*{dtype}")
    types |= dict.fromkeys(("out", "lse", "delta", "dq", "dk", "dv", "unused"), "*fp32")
    types |= dict.fromkeys(("starts", "full", "others", "firsts", "parts"), "*i32")
    types |= dict.fromkeys(("scale", "softcap"), "fp32") | dict.fromkeys(constants, "constexpr")
    aligned = [
        i
        for i, n in enumerate(names)
        if n not in constants
        and not function.params[i].do_not_specialize
        and (types.get(n, "").startswith("*") or n.endswith(("_row", "_head", "_batch")))
    ]
    source = ASTSource(
        fn=function,
        signature={name: types.get(name, "i32") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items() if name in names},
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    return triton.compile(source, HOPPER, {"num_warps": sizes.warps, "num_stages": sizes.stages})


def compiled_rows(name: str, gradients: bool):
    """The compiled kernel `name` of the loss's elementwise work, from float32 to bfloat16."""
    function = getattr(rows_triton, name)
    names = list(inspect.signature(function.fn).parameters)
    constants = {"SOFTCAP": True, "GRADIENTS": gradients, "BLOCK": rows_triton.BLOCK}
    constants = {name: value for name, value in constants.items() if name in names}
    types = dict.fromkeys(("logits", "found", "scale", "columns", "lse"), "*fp32")
    types |= {"out": "*bf16", "labels": "*i64"} | dict.fromkeys(constants, "constexpr")
    types |= dict.fromkeys(("softcap", "temperature", "z_loss", "smoothing"), "fp32")
    aligned = [
        i for i, n in enumerate(names) if types.get(n, "*")[0] == "*" and not n.endswith(("lary", "tokens"))
    ]
    source = ASTSource(
        fn=function,
        signature={name: types.get(name, "i32") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    return triton.compile(source, HOPPER, {"num_warps": rows_triton.WARPS})


def check() -> None:
    """AssertionError if a kernel does not fit a Hopper GPU, or misses its matrix units or wide copies."""
    for name in ("forward", "dq", "dkv"):
        kernel = compiled(name, 128, 128)
        assert "wgmma.mma_async" in kernel.asm["ptx"], name
        assert "cp.async.cg.shared.global" in kernel.asm["ptx"], name
        assert kernel.metadata.shared <= SHARED, name
    for options in ({"SOFTCAP": True}, {"FRESH": True}):
        assert compiled("dkv", 64, 64, **options).metadata.shared <= SHARED
    for name, gradients in (("statistics_kernel", True), ("gradients_kernel", True)):
        assert "ld.global.v4" in compiled_rows(name, gradients).asm["ptx"], name


def check_others() -> None:
    """The same for other head dims, and that float32 is multiplied as such."""
    for name in ("forward", "dq", "dkv"):
        for dims in ((256, 256), (192, 128)):
            kernel = compiled(name, *dims)
            assert "wgmma.mma_async" in kernel.asm["ptx"], (name, dims)
            assert kernel.metadata.shared <= SHARED, (name, dims)
        for dim in (64, 128, 256):
            kernel = compiled(name, dim, dim, "fp32", FRESH=True)
            assert "fma.rn.f32" in kernel.asm["ptx"] and "tf32" not in kernel.asm["ptx"], (name, dim)
            assert kernel.metadata.shared <= SHARED, (name, dim)
