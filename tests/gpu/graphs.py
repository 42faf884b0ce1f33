"""CUDA graphs of a step."""

import torch


def assert_capturable(step):
    """`step` returns tensors; replayed from a graph it must return the same."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # everything is compiled and made before the capture
        for _ in range(2):
            want = step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    for x in got:
        x.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3)
