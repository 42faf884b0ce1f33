"""Runs burst_bench.report, the new name of reports of results."""

import runpy

runpy.run_module("burst_bench.report", run_name="__main__", alter_sys=True)
