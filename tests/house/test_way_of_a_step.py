"""The way of a step: the files and functions of the package that a call and its backward run."""

import gc
import sys
from pathlib import Path

import limits
import torch
import torch.distributed as dist
from ranks import processes

import burst_mcore
from burst_mcore import Mask, Topology, burst_attention

PACKAGE = str(Path(burst_mcore.__file__).parent)


def _functions_of(run):
    """Return the (file, function) pairs of the package that a run calls."""
    functions = set()

    def note(frame, event, arg):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            functions.add((frame.f_code.co_filename, frame.f_code.co_qualname))

    gc.collect()
    gc.disable()  # what ends objects of earlier calls is not on the way
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
        gc.enable()
    return functions


def _ways(rank, size):  # in new interpreters: other tests leave caches, and functions around functions
    """Functions of a causal ring: of the first step, and of the third and a forward, which plan nothing."""
    topology, mask = Topology.from_group(dist.group.WORLD), Mask.causal()
    import burst_mcore.attention.kernels.cpu  # noqa: F401 - the first call imports the file of its kernel

    tensors = [torch.randn(1, 64, 2, 16, requires_grad=True) for _ in range(3)]

    def forward():
        with torch.no_grad():
            burst_attention(*tensors, topology=topology, mask=mask)

    def step():
        burst_attention(*tensors, topology=topology, mask=mask).sum().backward()

    cold = _functions_of(step)
    for call in (step, forward):
        call()
    return cold, _functions_of(step), _functions_of(forward)


def _held(functions, files, lines, most):
    """Hold a way to so many files, lines of these and functions."""
    paths = {path for path, _ in functions}
    size = sum(len(Path(path).read_text().splitlines()) for path in paths)
    assert 10 < len(paths) <= files and size <= lines and 50 < len(functions) <= most, sorted(functions)


def test_the_call_reaches_few_modules():
    """Before the route was chosen by a rule, and kernels were imported at their first use: 91."""
    code = "import sys, burst_mcore.attention.api; print([x for x in sys.modules if x[:5] == 'burst'])"
    reached = limits.run([sys.executable, "-c", code]).stdout.split()
    assert 40 < len(reached) <= 65


def test_a_step_runs_few_functions_of_few_files():
    """Before one autograd function stood for a call: 30 files and 5,450 lines; cold 64 files."""
    for cold, warm, forward in processes(2, _ways, start="spawn"):
        _held(forward, files=15, lines=2800, most=90)
        _held(warm, files=17, lines=3260, most=135)
        _held(cold, files=44, lines=9750, most=410)
