"""Runs burst_bench, the new name of the bench."""

import runpy

runpy.run_module("burst_bench", run_name="__main__", alter_sys=True)
