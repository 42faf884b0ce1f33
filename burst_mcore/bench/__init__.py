"""Old names of burst_bench, for one release: `python -m burst_mcore.bench`, .check and .report."""
