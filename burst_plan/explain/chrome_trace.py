"""Timelines as a file for chrome://tracing and ui.perfetto.dev."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from burst_plan.simulate.trace import Event


def chrome_trace(runs: Mapping[str, Sequence[Event]]) -> str:
    """Return timelines side by side as Chrome trace JSON, for chrome://tracing and ui.perfetto.dev.

    A process for each rank of each run, a thread for each lane.
    """
    events: list[dict[str, Any]] = []
    processes: dict[tuple[str, int], int] = {}
    lanes: dict[tuple[str, int, str], int] = {}
    for run, events_of_run in runs.items():
        for event in sorted(events_of_run, key=lambda e: (e.rank, e.lane != "compute", e.lane, e.started)):
            process = processes.setdefault((run, event.rank), len(processes))
            lane = lanes.setdefault((run, event.rank, event.lane), len(lanes))
            begin, length = event.started * 1e6, (event.ended - event.started) * 1e6
            span = {"name": event.label, "cat": event.lane, "ph": "X", "ts": begin, "dur": length}
            events.append(span | {"args": {"posted": event.posted * 1e6}, "pid": process, "tid": lane})
    for (run, rank), process in processes.items():
        events.append(_name("process_name", process, 0, f"{run}, rank {rank}"))
    for (run, rank, name), lane in lanes.items():
        events.append(_name("thread_name", processes[run, rank], lane, name))
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _name(kind: str, process: int, lane: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": lane, "args": {"name": name}}
