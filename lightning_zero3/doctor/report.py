# SPDX-License-Identifier: Apache-2.0
"""The doctor's verdict: all that was seen in one object, and what of it is wrong, each with its remedy."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from lightning_zero3.build_locks import BuildLock
from lightning_zero3.doctor import machine, versions
from lightning_zero3.doctor.process import Answers

_SECTIONS = ("torch", "accelerator", "fixes", "limits", "ops", "combinations")


def assemble(
    packages: list[versions.Package],
    tools: list[machine.Tool],
    links: dict[str, Any],
    locks: list[BuildLock],
    answers: Answers | None,
    locks_afterwards: list[BuildLock],
) -> dict[str, Any]:
    """Everything, JSON throughout.

    Args:
        packages: What is installed.
        tools: Compilers and ninja.
        links: See :func:`machine.links`.
        locks: Found before anything was imported.
        answers: The child's; None where none was started, because it would have waited for a lock.
        locks_afterwards: Found when the child was gone.

    Returns:
        ``can_train``, ``problems`` (each ``what``, ``remedy``, and whether it is ``fatal``), and the sections.
    """
    said = answers or Answers()
    trial = _trial(answers)
    problems = [
        *_of_packages(packages),
        *_of_locks(locks),
        *_of_tools(tools, said),
        *_of_upstream(said),
        *(
            []
            if trial["ok"] or answers is None
            else [_problem(f"zero3_fast can't train: {trial['reason']}", _what_to_do(trial))]
        ),
        *_of_locks([lock for lock in locks_afterwards if lock.path not in {before.path for before in locks}]),
    ]
    return {
        "can_train": trial["ok"] and not any(problem["fatal"] for problem in problems),
        "problems": problems,
        "python": versions.python(),
        "packages": [{**asdict(p), "ok": not versions.unsatisfied(p)} for p in packages],
        "tools": [asdict(tool) for tool in tools],
        "links": links,
        "locks": [
            {"path": str(x.path), "op": x.op, "state": x.state, "seen": x.seen, "remedy": x.remedy} for x in locks
        ],
        **{name: said.sections.get(name) for name in _SECTIONS},
        "trial": trial,
    }


def _trial(answers: Answers | None) -> dict[str, Any]:
    if answers is None:
        reason = "not tried: it would wait for the build lock"
        return {"ok": False, "reason": reason, "result": None, "log": []}
    result = answers.sections.get("trial")
    if result is not None and not answers.ended:
        return {"ok": True, "reason": "", "result": result, "log": []}
    reason = answers.errors.get("trial") or answers.ended or "it said nothing"
    if "trial" not in answers.sections:
        last = [*answers.sections][-1:] or ["nothing"]
        reason += f" (it had got as far as: {last[0]})"
    return {"ok": False, "reason": reason, "result": result, "log": answers.log}


def _what_to_do(trial: dict[str, Any]) -> str:
    last = next((line for line in reversed(trial["log"]) if line.strip()), "")
    hint = f"; the last line it printed: {last.strip()[:300]}" if last else ""
    return f"mend what the reason names{hint} (all its last lines are in --json's trial.log)"


def _problem(what: str, remedy: str, fatal: bool = True) -> dict[str, Any]:
    return {"what": what, "remedy": remedy, "fatal": fatal}


def _of_packages(packages: list[versions.Package]) -> list[dict[str, Any]]:
    problems = []
    for package in packages:
        if versions.unsatisfied(package):
            state = "is missing" if package.version is None else f"is {package.version}, {package.required} is needed"
            needed = package.needed_for == "zero3_fast"
            lost = "" if needed else f"; without it there is no: {package.needed_for}"
            problems.append(_problem(f"{package.name} {state}{lost}", package.remedy, needed))
    return problems


def _of_locks(locks: list[BuildLock]) -> list[dict[str, Any]]:
    words = {
        "abandoned": "a build lock that nobody holds; every run that needs {op} waits for it for ever, silently",
        "unknown": "a build lock whose holder can't be seen; if it has none, runs that need {op} wait for ever",
        "held": "a build lock that is held; runs that need {op} wait until it's gone",
    }
    return [
        _problem(f"{x.path}: {words[x.state].format(op=x.op)} ({x.seen})", x.remedy, x.state == "abandoned")
        for x in locks
    ]


def _of_tools(tools: list[machine.Tool], answers: Answers) -> list[dict[str, Any]]:
    cuda = (answers.sections.get("accelerator") or {}).get("cuda_available", False)
    return [
        _problem(f"{tool.name}: {tool.problem}. Ops that aren't built yet can't be", tool.remedy, fatal=False)
        for tool in tools
        if tool.problem and (tool.name != "nvcc" or cuda)
    ]


def _of_upstream(answers: Answers) -> list[dict[str, Any]]:
    problems = [
        _problem(f"section {name}: {error}", "reinstall the package that it names", fatal=False)
        for name, error in answers.errors.items()
        if name != "trial"
    ]
    for fix in answers.sections.get("fixes") or []:
        if fix["upstream"] == "unknown layout":
            what = f"{fix['name']}: this DeepSpeed is laid out in another way ({', '.join(fix['missing'])})"
            problems.append(_problem(what, "nothing: upstream's own code runs there; a tested release: 0.19.8", False))
    for limit in answers.sections.get("limits") or []:
        if limit["present"] is not False:
            what = f"{limit['name']}: {limit['symbol']} {limit['reason']} ({limit['affected']})"
            remedy = limit["remedy"] if limit["present"] else limit["how"]
            problems.append(_problem(what, remedy, fatal=False))
    return problems
