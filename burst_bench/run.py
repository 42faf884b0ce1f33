"""The runner: measures the cases of a subject one by one, each in fresh processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, fields, replace
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from burst_bench import emulate
from burst_bench.core import ALL, Case, Method, Table, first_line, in_words
from burst_bench.launch import fresh_processes, in_processes
from burst_bench.results import Results
from burst_bench.stage import Outcome, Samples, StageWork, measure


def device_for(subject: type[Case], word: str, joined: bool = False) -> str:
    """Return the device of "auto", "cpu" or "cuda" for a subject; joined: torchrun started the process.

    Raises a ValueError if the subject, or this machine, does not have the device.
    """
    if joined and not subject.joined:
        raise ValueError(f"{subject.subject} starts its own processes: run it without torchrun")
    devices = [device for device in subject.devices if device == "cpu" or torch.cuda.is_available()]
    if subject.joined and not joined and "cuda" in devices:
        if word == "cuda":
            command = f"torchrun --nproc-per-node 8 -m burst_bench {subject.subject} --device cuda"
            raise ValueError(f"{subject.subject} on GPUs needs a process for each: {command}")
        devices.remove("cuda")
    if word == "auto":
        return devices[-1] if devices else subject.devices[0]
    if word not in devices:
        raise ValueError(f"no device {word!r} here for {subject.subject}; legal: auto, {', '.join(devices)}")
    return word


def cases_for(
    subject: type[Case],
    texts: Sequence[str],
    device: str,
    ranks: int | None,
    fixed: Mapping[str, Any],
) -> dict[str, Case]:
    """Return the subject's cases by name, or those that `texts` name or describe.

    Raises a ValueError for a text that is neither a name nor legal fields, and for an unknown option.

    Args:
        subject: Has the cases.
        texts: Names or fields of cases.
        device: "cpu" or "cuda".
        ranks: Processes that torchrun started; None: a case gives their number.
        fixed: Fields that all cases get, by name.
    """
    if foreign := fixed.keys() - {field.name for field in fields(subject)}:
        raise ValueError(f"{subject.subject} has no option --{min(foreign)}")
    cases = {name: replace(case, **fixed) for name, case in subject.named(device).items()}
    if ranks is not None:
        cases = {f"{ranks} ranks": subject(ranks=ranks, **fixed)}
    selection: dict[str, Case] = {}
    for text in texts:
        if text not in cases and "=" not in text:
            raise ValueError(
                f"unknown case {text!r}; legal: {'; '.join(cases)}; or fields such as 'seq=4096'"
            )
        if text in cases:
            selection[text] = cases[text]
            continue
        says_ranks = any(part.split("=")[0].strip() == "ranks" for part in text.split(";"))
        case = in_words(subject, text, **fixed, **({} if ranks is None or says_ranks else {"ranks": ranks}))
        if ranks not in (None, case.ranks):
            raise ValueError(f"torchrun started {ranks} ranks, and {text!r} wants {case.ranks}")
        selection[text] = case
    return selection or dict(cases)


def run(
    subject: type[Case],
    cases: Mapping[str, Case],
    names: Sequence[str],
    repeats: int,
    device: str,
    say: Callable[[Results], None] = lambda results: None,
) -> Results:
    """Measure all cases; `say` gets the results after each.

    A case that fails is an error in the results; other cases still run. In torchrun's ranks, the run
    ends with the first error.

    Raises a ValueError for an unknown name, or if no requested method supports a case; a RuntimeError
    if this machine cannot emulate the cluster that the subject needs.
    """
    results = Results(subject.subject, subject.about(), device, repeats)
    plans = {name: _able(case, names, device) for name, case in cases.items()}
    if subject.emulated and (lacks := emulate.missing()) is not None:
        raise RuntimeError(f"the emulated cluster needs {lacks}")
    for name, (methods, refused) in plans.items():
        case = cases[name]
        results.cases[name] = asdict(case)
        try:
            outcome = _measured(case, methods, repeats, device)
            table = Table(outcome.samples)
            results.add(name, [(*figure, samples) for figure, samples in table.items()])
            results.add(name, case.derive(table))
            refused |= outcome.refused
            ours = [method.name for method in methods if method.ours and method.name in outcome.refused]
            results.errors += [{"case": name, "error": f"{m}: {outcome.refused[m]}"} for m in ours]
        except Exception as error:  # of any kind: other cases may still work
            if dist.is_initialized():  # the other ranks may still be in this case
                raise
            results.errors.append({"case": name, "error": first_line(error)})
        results.refused += [{"case": name, "method": m, "reason": why} for m, why in refused.items()]
        results.judge(subject, cases)
        say(results)
    results.add(ALL, subject.summary(results.tables))
    results.judge(subject, cases)
    return results


def _able(case: Case, names: Sequence[str], device: str) -> tuple[list[Method], dict[str, str]]:
    """Return the methods of these names, or all by default, that can run; and the reasons of the others."""
    by_name = {method.name: method for method in case.methods()}
    if unknown := [name for name in names if name not in by_name]:
        raise ValueError(f"unknown method {unknown[0]!r}; legal: {', '.join(by_name)}")
    methods = [by_name[name] for name in names or (case.default if device == "cpu" else ()) or by_name]
    lacking = {m.name: f"needs {why}" for m in methods if (why := m.needs(case, device)) is not None}
    if len(lacking) == len(methods):
        raise ValueError("; ".join(f"method {name} {why}" for name, why in lacking.items()))
    return [method for method in methods if method.name not in lacking], lacking


def _measured(case: Case, methods: Sequence[Method], repeats: int, device: str) -> Outcome:
    work = StageWork(case, methods, repeats * case.rounds, device)
    sets = range(case.processes)
    if case.beside is None:
        return _joined(_in_world(work) for _ in sets)
    total = Outcome()
    ours = next((method for method in methods if method.name == case.beside), None)
    for method in methods:
        work_of_one = replace(work, methods=[method], beside=None if method is ours else ours)
        outcome = _joined(_alone(work_of_one) for _ in sets)
        total.samples |= outcome.samples
        total.refused |= outcome.refused
    return total


def _in_world(work: StageWork) -> Outcome:
    """Measure in one set of fresh processes, or in torchrun's processes."""
    place: Any = work.case
    if dist.is_initialized():
        return measure(dist.get_rank(), dist.get_world_size(), work)
    if place.emulated:
        outcomes = emulate.run(place.where, place.rates, measure, work)
    else:
        processes = fresh_processes(cuda=work.device == "cuda")
        outcomes = in_processes(place.ranks, measure, work, context=processes)
    first: Outcome = outcomes[0]
    return first


def _alone(work: StageWork) -> Outcome:
    """Measure one method: the end of its process is its result, unless the unit in turn caused it."""
    try:
        return _in_world(work)
    except BrokenProcessPool:
        reason = "its process was ended: too little memory?"
    except Exception as error:
        reason = first_line(error)
    if work.beside is not None:
        return _alone(replace(work, beside=None))
    return Outcome(refused={work.methods[0].name: reason})


def _joined(outcomes: Iterable[Outcome]) -> Outcome:
    """Return the samples of several sets of processes, up to the first that rejects a method.

    Figures that are missing in one of the sets are dropped: their rounds would not be comparable.
    """
    several: list[Samples] = []
    for outcome in outcomes:
        if outcome.refused:
            return outcome
        several.append(outcome.samples)
    figures = [figure for figure in several[0] if all(figure in samples for samples in several)]
    return Outcome({figure: list(chain(*(samples[figure] for samples in several))) for figure in figures})
