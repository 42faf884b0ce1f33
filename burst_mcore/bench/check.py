"""Runs burst_bench.check, the new name of the GPU check."""

import runpy

runpy.run_module("burst_bench.check", run_name="__main__", alter_sys=True)
