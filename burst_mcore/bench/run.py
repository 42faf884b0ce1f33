"""The runner: measures the cases of a subject one by one, each in fresh processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, replace
from typing import Any

import torch

from burst_mcore.bench import emulate
from burst_mcore.bench.core import ALL, Case, Derived, Figure, Method, Subject, first_line, in_words
from burst_mcore.bench.launch import in_processes
from burst_mcore.bench.methods import METHODS
from burst_mcore.bench.results import Results
from burst_mcore.bench.stage import Outcome, Work, measure


def device_for(subject: Subject, word: str) -> str:
    """Return the device that "auto", "cpu" or "cuda" means for a subject.

    Raises:
        ValueError: the subject, or this machine, does not have it.
    """
    here = [device for device in subject.devices if device == "cpu" or torch.cuda.is_available()]
    if word == "auto":
        return here[-1] if here else subject.devices[0]
    if word not in here:
        raise ValueError(f"no device {word!r} here for {subject.name}; legal: auto, {', '.join(here)}")
    return word


def cases_for(subject: Subject, texts: Sequence[str], device: str) -> dict[str, Any]:
    """Return the subject's cases by name, or those that `texts` name or describe.

    Raises:
        ValueError: a text is neither a name nor legal fields.
    """
    named = subject.cases(device)
    for text in texts:
        if text not in named and "=" not in text:
            raise ValueError(
                f"unknown case {text!r}; legal: {'; '.join(named)}; or fields such as 'seq=4096'"
            )
    asked = {text: named[text] if text in named else in_words(subject.case, text) for text in texts}
    return asked or dict(named)


def run(
    subject: Subject,
    cases: Mapping[str, Any],
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
    results = Results(subject.name, subject.about, device, repeats)
    plans = {name: _able(subject, case, names, device) for name, case in cases.items()}
    lacks = emulate.missing() if subject.emulated else None
    if lacks is not None:
        raise RuntimeError(f"the emulated cluster needs {lacks}")
    for name, case in cases.items():
        methods, lacking = plans[name]
        results.cases[name] = asdict(case)
        results.refused += [{"case": name, "method": m, "reason": why} for m, why in lacking.items()]
        try:
            outcome = _measured(subject, case, methods, repeats, device)
            table = outcome.samples
            measured = [(method, meter, samples) for (method, meter), samples in table.items()]
            results.figures += _figures(name, [*measured, *subject.derive(case, table)])
            for method in (method for method in methods if method.name in outcome.refused):
                reason = outcome.refused[method.name]
                results.refused.append({"case": name, "method": method.name, "reason": reason})
                if method.ours:
                    results.errors.append({"case": name, "error": f"{method.name}: {reason}"})
        except Exception as error:  # whatever it is, other cases may work
            results.errors.append({"case": name, "error": first_line(error)})
        results.judge(subject, cases)
        say(results)
    results.figures += _figures(ALL, subject.summary(results.tables))
    results.judge(subject, cases)
    return results


def _figures(case: str, derived: Derived) -> list[Figure]:
    return [Figure(case, method, meter, tuple(samples)) for method, meter, samples in derived if len(samples)]


def _able(
    subject: Subject, case: Case, names: Sequence[str], device: str
) -> tuple[list[Method], dict[str, str]]:
    """Methods of these names, or all by default, that lack nothing; and what the others lack."""
    known = METHODS[subject.kind] if subject.kind else subject.methods(case)
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"unknown method {unknown[0]!r}; legal: {', '.join(known)}")
    methods = [known[name] for name in names or subject.default or known]
    lacking = {m.name: f"needs {why}" for m in methods if (why := m.needs(case, device)) is not None}
    if len(lacking) == len(methods):
        raise ValueError("; ".join(f"method {name} {why}" for name, why in lacking.items()))
    return [method for method in methods if method.name not in lacking], lacking


def _measured(subject: Subject, case: Case, methods: Sequence[Method], repeats: int, device: str) -> Outcome:
    """Return the samples of all methods on one case."""
    work = Work(
        subject.stage, case, methods, 1 if subject.cold else repeats * case.rounds, device,
        cold=subject.cold, clearly=subject.clearly,
    )  # fmt: skip
    sets = case.processes * (repeats if subject.cold else 1)
    if subject.beside is None:
        return _joined(_in_world(subject, work) for _ in range(sets))
    whole = Outcome()
    ours = next((method for method in methods if method.name == subject.beside), None)
    for method in methods:
        alone = replace(work, methods=[method], alone=True, beside=None if method is ours else ours)
        outcome = _joined(_alone(subject, alone) for _ in range(sets))
        whole.samples |= outcome.samples
        whole.refused |= outcome.refused
    return whole


def _in_world(subject: Subject, work: Work) -> Outcome:
    """Measure in one set of fresh processes."""
    if subject.emulated:
        place: Any = work.case
        outcome: Outcome = emulate.run(place.cluster, place.rates, measure, work)[0]
    else:
        outcome = in_processes(work.case.ranks, measure, work, cuda=work.device == "cuda")[0]
    return outcome


def _alone(subject: Subject, work: Work) -> Outcome:
    """Measure one method: the end of its process is its result, unless the method beside caused it."""
    try:
        return _in_world(subject, work)
    except BrokenProcessPool:
        reason = "its process was ended: too little memory?"
    except Exception as error:
        reason = first_line(error)
    if work.beside is not None:
        return _alone(subject, replace(work, beside=None))
    return Outcome(refused={work.methods[0].name: reason})


def _joined(outcomes: Iterable[Outcome]) -> Outcome:
    """Return the samples of several sets of processes; up to the first that refuses a method.

    Figures that one of the sets does not have are dropped: their rounds would not be those of the others.
    """
    whole = Outcome()
    for number, outcome in enumerate(outcomes):
        if number == 0 or outcome.refused:
            whole = outcome
        else:
            both = [key for key in whole.samples if key in outcome.samples]
            whole.samples = {key: whole.samples[key] + outcome.samples[key] for key in both}
        if whole.refused:
            break
    return whole
