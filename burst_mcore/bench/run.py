"""The runner: measures the cases of a subject one by one, each in fresh processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, replace
from itertools import chain
from typing import Any

import torch

from burst_mcore.bench import emulate
from burst_mcore.bench.clock import Samples
from burst_mcore.bench.core import ALL, Case, Method, Table, first_line, in_words
from burst_mcore.bench.launch import fresh_processes, in_processes, in_torchrun, torchrun
from burst_mcore.bench.methods import METHODS
from burst_mcore.bench.results import Results
from burst_mcore.bench.stage import Outcome, Work, measure


def device_for(subject: type[Case], word: str) -> str:
    """Return the device that "auto", "cpu" or "cuda" means for a subject.

    Raises:
        ValueError: the subject, or this machine, does not have it.
    """
    here = [device for device in subject.devices if device == "cpu" or torch.cuda.is_available()]
    if word == "auto":
        return here[-1] if here else subject.devices[0]
    if word not in here:
        raise ValueError(f"no device {word!r} here for {subject.subject}; legal: auto, {', '.join(here)}")
    return word


def cases_for(
    subject: type[Case], texts: Sequence[str], device: str, given: Mapping[str, Any] | None = None
) -> dict[str, Case]:
    """Return the subject's cases by name, or those that `texts` name or describe.

    given: fields that all of them get, by name (`Case.options`).

    Raises:
        ValueError: a text is neither a name nor legal fields, or the subject has no such option.
    """
    given = dict(given or {})
    if foreign := given.keys() - set(subject.options):
        raise ValueError(f"{subject.subject} has no option --{min(foreign)}")
    named = {name: replace(case, **given) for name, case in subject.named(device).items()}
    for text in texts:
        if text not in named and "=" not in text:
            raise ValueError(
                f"unknown case {text!r}; legal: {'; '.join(named)}; or fields such as 'seq=4096'"
            )
    asked = {text: named[text] if text in named else in_words(subject, text, **given) for text in texts}
    return asked or dict(named)


def run(
    subject: type[Case],
    cases: Mapping[str, Case],
    names: Sequence[str],
    repeats: int,
    device: str,
    say: Callable[[Results], None] = lambda results: None,
) -> Results:
    """Measure all cases; `say` gets the results after each.

    A case that fails is an error in the results, and costs no other.

    Raises:
        ValueError: a name is unknown, or no method that was asked for can serve a case.
        RuntimeError: this machine cannot emulate the cluster that the subject needs.
    """
    results = Results(subject.subject, subject.about(), device, repeats)
    for case in cases.values():
        _check_processes(case, device)
    plans = {name: _able(case, names, device) for name, case in cases.items()}
    if subject.emulated:
        emulate.require()
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
        except Exception as error:  # whatever it is, other cases may work
            results.errors.append({"case": name, "error": first_line(error)})
        results.refused += [{"case": name, "method": m, "reason": why} for m, why in refused.items()]
        results.judge(subject, cases)
        say(results)
    results.add(ALL, subject.summary(results.tables))
    results.judge(subject, cases)
    results.notes += subject.notes(results.tables)
    return results


def _check_processes(case: Case, device: str) -> None:
    """Raise a ValueError if the ranks of a case are not the processes that there are."""
    started = torchrun()
    if started is None:
        if case.several_gpus and device == "cuda" and case.ranks > 1:
            raise ValueError(
                f"{case.subject} on cuda needs a GPU for each rank: torchrun --nproc-per-node {case.ranks} "
                f"-m burst_mcore.bench {case.subject} --device cuda"
            )
        return
    if not case.several_gpus:
        raise ValueError(f"{case.subject} starts its own processes: run it without torchrun")
    if started[1] != case.ranks:
        raise ValueError(
            f"torchrun started {started[1]} processes, a case has {case.ranks} ranks: give --case 'ranks="
            f"{started[1]}; ...'"
        )


def _able(case: Case, names: Sequence[str], device: str) -> tuple[list[Method], dict[str, str]]:
    """Methods of these names, or all by default, that lack nothing; and what the others lack."""
    known = METHODS[case.kind] if case.kind else {method.name: method for method in case.methods()}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"unknown method {unknown[0]!r}; legal: {', '.join(known)}")
    methods = [known[name] for name in names or case.default or known]
    lacking = {m.name: f"needs {why}" for m in methods if (why := m.needs(case, device)) is not None}
    if len(lacking) == len(methods):
        raise ValueError("; ".join(f"method {name} {why}" for name, why in lacking.items()))
    return [method for method in methods if method.name not in lacking], lacking


def _measured(case: Case, methods: Sequence[Method], repeats: int, device: str) -> Outcome:
    """Return the samples of all methods on one case."""
    work = Work(case, methods, 1 if case.cold else repeats * case.rounds, device)
    sets = range(case.processes * (repeats if case.cold else 1))
    if case.beside is None:
        return _joined(_in_world(work) for _ in sets)
    whole = Outcome()
    ours = next((method for method in methods if method.name == case.beside), None)
    for method in methods:
        alone = replace(work, methods=[method], beside=None if method is ours else ours)
        outcome = _joined(_alone(alone) for _ in sets)
        whole.samples |= outcome.samples
        whole.refused |= outcome.refused
    return whole


def _in_world(work: Work) -> Outcome:
    """Measure in one set of fresh processes."""
    place: Any = work.case
    if torchrun() is not None:
        outcomes = [in_torchrun(measure, work.device == "cuda", work)]
    elif place.emulated:
        outcomes = emulate.run(place.where, place.rates, measure, work)
    else:
        processes = fresh_processes(cuda=work.device == "cuda")
        outcomes = in_processes(place.ranks, measure, work, context=processes)
    first: Outcome = outcomes[0]
    return first


def _alone(work: Work) -> Outcome:
    """Measure one method: the end of its process is its result, unless the method beside caused it."""
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
    """Return the samples of several sets of processes; up to the first that refuses a method.

    Figures that one of the sets does not have are dropped: their rounds would not be those of the others.
    """
    several: list[Samples] = []
    for outcome in outcomes:
        if outcome.refused:
            return outcome
        several.append(outcome.samples)
    figures = [figure for figure in several[0] if all(figure in samples for samples in several)]
    return Outcome({figure: list(chain(*(samples[figure] for samples in several))) for figure in figures})
