"""The command `burst-mcore bench`, which needs torch alone: python -m burst_bench SUBJECT."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from burst_bench import report
from burst_bench.core import Case
from burst_bench.launch import joined
from burst_bench.published.rows import read, record
from burst_bench.results import Results
from burst_bench.run import cases_for, device_for, run
from burst_bench.subjects import SUBJECTS
from burst_bench.subjects.attention import AttentionCase
from burst_plan.files import check_writable


def main(arguments: Sequence[str]) -> int:
    """Measure a subject; return 0 if all ran and reached their bars, 1 if not, 2 if it cannot be measured."""
    options = _parser().parse_args(arguments)
    subject, started = SUBJECTS[options.subject], dist.is_torchelastic_launched()
    out: Path = options.out or Path(f"{subject.subject}.json")
    first = not started or os.environ["RANK"] == "0"  # only the first process prints
    say: Callable[[str], object] = sys.stdout.write if first else str
    running = False
    """Whether torchrun's ranks measure: then each may fail alone."""
    try:
        _check(options, subject)
        device = device_for(subject, options.device, started)
        fields = {} if options.framework is None else {"framework": options.framework}
        size = int(os.environ["WORLD_SIZE"]) if started else None
        cases = cases_for(subject, options.case, device, size, fields)
        names = [name for name in map(str.strip, options.methods.split(",")) if name]
        if first:
            out.parent.mkdir(parents=True, exist_ok=True)
            check_writable(out)

        def note(results: Results) -> None:
            if not first:
                return
            out.write_text(results.as_json())
            if len(results.cases) < len(cases):
                say(f"{report.table(results, [*results.cases][-1])}\n\n")

        running = started
        with joined(device) if started else nullcontext():
            results = run(subject, cases, names, options.repeats or subject.repeats, device, note)
        note(results)
        if options.record is not None and first:
            count = record(options.record, results.tables, cases, device)
            say(f"{count} rows for burst-mcore plan --against {options.record}\n\n")
    except (ValueError, RuntimeError, OSError) as error:
        _tell(error, first, running)
        return 2
    say(f"{subject.about()}\n\n{report.report(results)}\n\nall figures: {out}\n")
    return int(bool(results.errors) or not all(bar.reached for bar in results.bars))


def _tell(error: Exception, first: bool, running: bool) -> None:
    """Print an error in one line: on torchrun's first rank, or on any rank that fails during measurement.

    The other ranks wait a while: torchrun ends all ranks as soon as one has ended. The first may be slower.
    """
    if first or running:
        rank = f" on rank {os.environ['RANK']}" if running else ""
        sys.stderr.write(f"burst-mcore bench{rank}: {' '.join(str(error).split())}\n")
        sys.stderr.flush()
    if not first:
        time.sleep(5)


def _check(options: argparse.Namespace, subject: type[Case]) -> None:
    """Check options before any case is known. Raises ValueError for illegal ones."""
    if options.repeats is not None and options.repeats < 1:
        raise ValueError(f"--repeats must be at least 1, got {options.repeats}")
    if options.record is not None:
        if subject is not AttentionCase:
            raise ValueError(f"--record writes rows of the subject attention, not of {subject.subject}")
        if options.record.exists():
            read(options.record)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors take one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, SUBJECTS))
    parser = _Parser(
        prog="burst-mcore bench",
        description="Measure methods side by side. The exit status is 1 if a case fails, or misses a bar:\n"
        "the worst figure that the project accepts.",
        epilog="subjects:\n" + "\n".join(f"  {name:{width}}  {s.about()}" for name, s in SUBJECTS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("subject", choices=SUBJECTS, metavar="SUBJECT", help="one of the subjects below")
    parser.add_argument(
        "--case", action="append", default=[],
        help="a case by name, or its fields: 'ranks=2; seq=4096'; repeat for more (default: all named cases)",
    )  # fmt: skip
    parser.add_argument("--framework", help="for step: that field of all cases")
    parser.add_argument("--methods", default="", help="names, separated by commas")
    parser.add_argument("--repeats", type=int, help="timed rounds, after a round that is not counted")
    parser.add_argument("--device", default="auto", help="cpu, cuda, or auto: cuda where there is one")
    parser.add_argument("--out", type=Path, help="all figures, as JSON (default: SUBJECT.json)")
    parser.add_argument(
        "--record", type=Path, metavar="FILE",
        help="append rows to a file for burst-mcore plan --against (attention)",
    )  # fmt: skip
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
