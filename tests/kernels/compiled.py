"""Compiles the Triton kernels for GPUs that need not be there, and counts what came out.

`python tests/kernels/compiled.py` writes the table `benchmarks/compiled.json`: registers, spills, shared
memory, and instructions of the inner loops of each kernel.
"""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import torch
import triton
from triton._C.libtriton import native_specialize_impl as specialize
from triton.backends.compiler import BaseBackend, GPUTarget
from triton.compiler import ASTSource

from burst_mcore.attention.kernels import triton_code
from burst_mcore.attention.kernels.triton import launch, needs, of_gradients
from burst_mcore.attention.numerics import rowwise_triton
from burst_mcore.loss import rows_triton

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
TABLE = Path(__file__).resolve().parents[2] / "benchmarks/compiled.json"
CAPABILITIES = ((8, 0), (8, 9), (9, 0), (10, 0))
HEAD_DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))
OF_FLOAT32 = HEAD_DIMS[:2]
SIZES = {"bf16": 2, "fp32": 4}
SHARED_ON_HOPPER = 232448
"""Bytes of shared memory that a block may have."""
STRIDES = "_row", "_head", "_batch", "size", "_s"
UNITS = r"\b(?:HGMMA|HMMA|UTC\w*MMA)"


def _compiled(function, constants, types, capability, options):
    """The kernel for pointers and strides that 16 divides; integers are 32 bits, tuples have a place each."""
    names = list(inspect.signature(function.fn).parameters)
    constants = {name: value for name, value in constants.items() if name in names}
    types |= dict.fromkeys(constants, "constexpr")
    aligned = []
    for i, (name, parameter) in enumerate(zip(names, function.params, strict=True)):
        kind = types.get(name, "")
        known = isinstance(kind, tuple) or kind.startswith("*") or name.endswith(STRIDES)
        free = not (parameter.do_not_specialize or parameter.do_not_specialize_on_alignment)
        if name not in constants and known and free:
            aligned += [(i, j) for j in range(len(kind))] if isinstance(kind, tuple) else [(i,)]
    source = ASTSource(
        fn=function,
        signature={name: types.get(name, "i32") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={place: [["tt.divisibility", 16]] for place in aligned},
    )
    return triton.compile(source, GPUTarget("cuda", 10 * capability[0] + capability[1], 32), options)


def attention(name, head_dim, value_dim, dtype="bf16", capability=(9, 0), sizes=None, **options):
    """The compiled attention kernel `name` for tensors of these head dims and this dtype."""
    wide, wide_value = (1 << (dim - 1).bit_length() for dim in (head_dim, value_dim))
    itemsize = 4 if dtype == "fp32" else 2
    lists = not options.get("BAND", True)
    sizes = sizes or launch(name, wide + wide_value, itemsize, capability, lists)
    constants = {
        "USED": head_dim, "VALUE_USED": value_dim, "DIM": wide, "VALUE_DIM": wide_value,
        "ROWS": sizes.rows, "COLUMNS": sizes.columns, "SOFTCAP": False, "FRESH": False, "BAND": True,
        "KEYS": name != "dv", "VALUES": name != "dk", "QUERIES": name == "all", "lse_row": 1, "delta_row": 1,
        "PRECISION": "ieee" if dtype == "fp32" else "tf32", **options,
    }  # fmt: skip
    types = dict.fromkeys(("q", "k", "v", "dout"), f"*{dtype}")
    types |= dict.fromkeys(("out", "lse", "delta", "unit_of", "dq", "dk", "dv", "unused"), "*fp32")
    if dtype == "fp32" and name == "forward":
        types["lse"] = "*fp64"
    of_lists = ("starts", "full", "entries")
    if not lists:
        constants |= dict.fromkeys((*of_lists, "unit_of"))
    types |= dict.fromkeys(of_lists, "*i32") | dict.fromkeys(("scale", "softcap"), "fp32")
    function = getattr(triton_code, "dkv" if name in ("dk", "dv", "all") else name)
    warps = {"num_warps": sizes.warps, "num_stages": sizes.stages}
    return _compiled(function, constants, types, capability, warps)


def rows_of_loss(name, gradients):
    """The compiled kernel `name` of the loss's elementwise work, from float32 to bfloat16."""
    constants = {"SOFTCAP": True, "GRADIENTS": gradients, "BLOCK": rows_triton.BLOCK}
    types = dict.fromkeys(("logits", "found", "scale", "columns", "lse"), "*fp32")
    types |= {"out": "*bf16", "labels": "*i64"}
    types |= dict.fromkeys(("softcap", "temperature", "z_loss", "smoothing"), "fp32")
    options = {"num_warps": rows_triton.WARPS}
    return _compiled(getattr(rows_triton, name), constants, types, (9, 0), options)


def rows_of_parts(name, parts):
    """The compiled kernel that puts so many partial results in bfloat16 together."""
    constants = {"PARTS": parts, "USED": 128, "DIM": 128, "ROWS": rowwise_triton.ROWS}
    types = {"outs": ("*bf16",) * parts, "parts": ("*bf16",) * parts, "lses": "*fp32", "out": "*bf16"}
    types |= dict.fromkeys(("outs_s", "parts_s"), ("i32",) * (3 * parts)) | {"lse": "*fp32"}
    return _compiled(getattr(rowwise_triton, name), constants, types, (9, 0), {"num_warps": 4})


def loops(sass):
    """The instructions of each inner loop, in the order of the code."""
    lines = [line.strip() for line in sass.splitlines()]
    labels = {line[:-1]: at for at, line in enumerate(lines) if re.fullmatch(r"\.L_\w+:", line)}
    spans = []
    for at, line in enumerate(lines):
        target = re.search(r"\bBRA\b.*\((\.L_\w+)\)", line)
        if target and labels.get(target[1], at) < at:
            spans.append((labels[target[1]], at))
    inner = [a for a in spans if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in spans)]
    return [[x for x in lines[first : last + 1] if x.startswith("/*")] for first, last in sorted(inner)]


def products(body, multiply_adds):
    """The instructions by which a loop multiplies matrices; none if the loop does not.

    They are those of matrix units, or else multiply-adds, at least as many as a product of blocks takes.
    """
    text = "\n".join(body)
    found = re.findall(r"\bFFMA2?\b", text)
    many = len(found) + found.count("FFMA2") >= multiply_adds  # FFMA2 is two at once
    return set(re.findall(UNITS, text)) or (set(found) if many else set())


def figures(kernel, multiply_adds):
    """Registers, spills, shared memory, and the inner loops' instructions of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()

        def told(tool, *options):
            return subprocess.run([TOOLS / tool, *options, file.name], capture_output=True, text=True).stdout

        usage, sass = told("cuobjdump", "-res-usage"), told("nvdisasm", "-c")
    bodies = [body for body in loops(sass) if products(body, multiply_adds)]
    return {
        "registers": int(re.search(r"REG:(\d+)", usage)[1]),
        "spills": len(re.findall(r"\b(?:STL|LDL)\b", sass)),
        "spills in loops": sum(bool(re.search(r"\b(?:STL|LDL)\b", x)) for body in bodies for x in body),
        "shared": kernel.metadata.shared,
        "instructions of loops": [len(body) for body in bodies],
        "products": sorted({x for body in bodies for x in products(body, multiply_adds)}),
    }


def kernels(dims, capability=(9, 0), dtype="bf16", walk="band"):
    """The names of the attention kernels for some head dims."""
    of_two = (
        of_gradients(padded(dims), SIZES[dtype], capability, deterministic=x, softcap=walk == "softcap")
        for x in (True, False)
    )
    return tuple(dict.fromkeys(("forward", *(name for names in of_two for name in names))))


def padded(dims):
    """The head dims of keys and values, padded and added up."""
    return sum(1 << (dim - 1).bit_length() for dim in dims)


VARIANTS = {
    "band": {"BAND": True},
    "lists": {"BAND": False},
    "softcap": {"BAND": True, "SOFTCAP": True},
    "fresh": {"BAND": True, "FRESH": True},
}
"""The options of a kernel: full, causal and windowed tiles added to sums; and what differs from those."""


def row(name, dims, capability, walk="band", dtype="bf16"):
    """A line of the table; walk: of `VARIANTS`."""
    sizes = launch(name, padded(dims), SIZES[dtype], capability, walk == "lists")
    of_thread = sizes.rows * sizes.columns * min(dims) // (32 * sizes.warps)
    counted = figures(attention(name, *dims, dtype, capability, **VARIANTS[walk]), of_thread)
    return {
        "kernel": name, "walk": walk, "dtype": dtype, "head dims": list(dims), "capability": list(capability),
        "launch": list(sizes), **counted,
    }  # fmt: skip


def faults(figures):
    """What is wrong with a line of the table."""
    whole, edge = figures["instructions of loops"]
    if figures["spills in loops"]:
        yield f"{figures['spills in loops']} spills in inner loops"
    if edge > 1.7 * whole:
        yield f"an edge block takes {edge} instructions, a whole one {whole}"
    most = needs(padded(figures["head dims"]), SIZES[figures["dtype"]], tuple(figures["capability"]))
    if figures["shared"] > most:
        yield f"{figures['shared']} bytes of shared memory"
    units = {8: {"HMMA"}, 9: {"HGMMA"}, 10: {"UTCHMMA"}}[figures["capability"][0]]
    adds = {"FFMA", "FFMA2"} if figures["capability"][0] == 10 else {"FFMA"}
    if set(figures["products"]) != (units if figures["dtype"] == "bf16" else adds):
        yield f"products by {figures['products']}"


def key(figures):
    """What a line of the table is about."""
    dims, capability = figures["head dims"], figures["capability"]
    return figures["kernel"], figures["walk"], figures["dtype"], *dims, *capability


def grown(now, before):
    """What a line of the table has more of than the committed one; versions of Triton differ a little."""
    for name in ("registers", "spills in loops", "shared"):
        if now[name] > before[name]:
            yield f"{name}: {now[name]}, before {before[name]}"
    loops = zip(now["instructions of loops"], before["instructions of loops"], strict=True)
    yield from (f"a loop of {a} instructions, before {b}" for a, b in loops if a > 1.05 * b)


def cases():
    """(kernel, head dims, capability, walk, dtype) of each line of the table."""
    for capability in CAPABILITIES:
        for dims in HEAD_DIMS:
            for walk in ("band", "lists"):
                yield from ((name, dims, capability, walk, "bf16") for name in kernels(dims, capability))
                if dims in OF_FLOAT32:
                    names = kernels(dims, capability, "fp32")
                    yield from ((name, dims, capability, walk, "fp32") for name in names)
    for capability in ((8, 0), (9, 0)):
        for dims in ((64, 64), (128, 128)):
            for walk in ("softcap", "fresh"):
                names = kernels(dims, capability, walk=walk)
                yield from ((name, dims, capability, walk, "bf16") for name in names)


def hold(*wanted):
    """AssertionError if kernels have faults, or cost more than the table says: all, or some of Hopper's."""
    table = {key(each): each for each in json.loads(TABLE.read_text())["rows"]}
    for case in cases():
        if wanted and (case[0] not in wanted or case[1:] != ((128, 128), (9, 0), "band", "bf16")):
            continue
        now = row(*case)
        wrong = [*faults(now), *grown(now, table.pop(key(now)))]
        assert not wrong, (case, wrong)
    assert wanted or not table, f"the table has lines of no kernel: {list(table)}"


def check():
    """AssertionError if a kernel does not fit a Hopper GPU, or misses its matrix units or wide copies."""
    for name in ("forward", "dq", "dkv"):
        kernel = attention(name, 128, 128)
        assert "wgmma.mma_async" in kernel.asm["ptx"], name
        assert "cp.async.cg.shared.global" in kernel.asm["ptx"], name
        assert kernel.metadata.shared <= SHARED_ON_HOPPER, name
    for name, gradients in (("statistics_kernel", True), ("gradients_kernel", True)):
        assert "ld.global.v4" in rows_of_loss(name, gradients).asm["ptx"], name
    for name in ("_combine", "_add"):
        for parts in (2, 9):
            assert "ld.global.v4" in rows_of_parts(name, parts).asm["ptx"], (name, parts)


def check_lengths():
    """AssertionError if row-wise kernels are compiled anew for other rows, or as many elsewhere."""
    variants = defaultdict(set)
    for name in ("_delta", "_stand_in", "_combine", "_add"):
        setattr(rowwise_triton, name, _Noted(getattr(rowwise_triton, name), variants[name]))
    for rows in (16, 17, 31, 48):  # documents end anywhere
        tensors = [
            torch.empty(1, 64 + rows, 4, 64, dtype=torch.bfloat16)[:, rows : 2 * rows] for _ in range(3)
        ]
        lses = [torch.empty(1, 4, 64 + rows)[..., i : i + rows] for i in range(3)]
        rowwise_triton.delta_rows(*tensors[:2], lses[0])
        rowwise_triton.stand_in_rows(tensors[0], lses[1], tensors[1], 0.0)
        rowwise_triton.combine_rows([*zip(tensors, lses, strict=True)], tensors[0], lses[0])
        rowwise_triton.add_rows(tensors, tensors[0])
    assert {name: len(keys) for name, keys in variants.items()} == dict.fromkeys(variants, 1), variants


class _Noted:
    """A kernel that is not run: it notes for which arguments Triton would compile it."""

    def __init__(self, kernel, keys):
        self._kernel, self._keys = kernel, keys

    def __getitem__(self, grid):
        def run(*args, **constants):
            flags = [
                (not p.do_not_specialize, not p.do_not_specialize_on_alignment) for p in self._kernel.params
            ]
            key = [specialize(BaseBackend, x, False, *flag) for x, flag in zip(args, flags, strict=False)]
            self._keys.add((str(key), *constants.items()))

        return run


if __name__ == "__main__":
    rows = []
    for case in cases():
        rows.append(row(*case))
        sys.stdout.write(f"{case} {rows[-1]['instructions of loops']} {'; '.join(faults(rows[-1]))}\n")
    written = {"triton": triton.__version__, "rows": rows}
    TABLE.write_text(json.dumps(written, indent=1) + "\n")
    sys.exit(any(any(faults(x)) for x in rows))
