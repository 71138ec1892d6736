"""A front, planned once: taken from the cache where it is kept, by one process for all."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tapestry_egg.extract.front.notes import INTERRUPTED
from tapestry_egg.files.plan_cache import PlanCache, chosen_cache, plain_options, plan_key

if TYPE_CHECKING:
    from tapestry_egg.extract.front.front import Front
    from tapestry_egg.machine.target import Target
    from tapestry_egg.tracing.trace import Program


def plan_once(
    program: Program,
    target: Target,
    asked: Mapping[str, Any],
    plan: Callable[[], Front],
    *,
    devices: Sequence[Any] = (),
    cache: bool | str | Path | None = None,
) -> Front:
    """The front of a program that `plan` gives, or gave before to the same question.

    `asked` is everything else that decides it. What the cache holds is not planned again. Where
    `devices` belong to several processes, all of them must call this; the first of them plans, and
    all return its front, certified by each as one from a file is. Raises what `plan` raises, on
    every process, and PeerError where the processes do not ask for the same.
    """
    from tapestry_egg.runtime.processes.distributed import peers_of

    kept = chosen_cache(cache)
    peers = peers_of(devices) if devices else None
    if peers is None:
        return _found_or_planned(program, target, asked, plan, kept)

    from tapestry_egg.files.admission import admit_front
    from tapestry_egg.files.plan_message import packed, unpacked
    from tapestry_egg.runtime.processes.rendezvous import environment

    def made() -> bytes:
        return packed(_found_or_planned(program, target, asked, plan, kept), program)

    doing = f"plan {program.name}"
    with peers.together():
        statement = {**environment(devices), **_statement(program, target, asked)}
        peers.agree(doing, statement)
        found = unpacked(peers.handed(doing, made), program)  # the first, too: all have the same
    admit_front(found, f"{doing}: $", asked.get("rules", ()))
    return found


def _found_or_planned(
    program: Program,
    target: Target,
    asked: Mapping[str, Any],
    plan: Callable[[], Front],
    cache: PlanCache | None,
) -> Front:
    """The front from the cache, else planned now and kept there."""
    if cache is None:
        return plan()
    for known in ({**asked, "like": None}, asked):  # what was planned in full comes first
        key = plan_key(program, target, known)
        found = cache.get(key, program, asked.get("rules", ()))
        if found is not None:
            return found
        if not asked.get("like"):
            break
    front = plan()
    if INTERRUPTED not in front.notes:
        cache.put(key, front, program)
    return front


def _statement(program: Program, target: Target, asked: Mapping[str, Any]) -> dict[str, str]:
    """What this process is about to plan, in words that differ where plans could."""
    from tapestry_egg.files.fingerprint import options_form, program_parts

    graph = program.graph
    parts = program_parts(program)
    types = ", ".join(str(t) for t in program.input_types)
    said = {
        "arguments": f"{_short(types)} ({parts['arguments'][:12]})",
        "results": parts["results"][:12],
        "operations": f"{len(graph.operations)} ({parts['operations'][:12]})",
        "constants": f"{len(graph.constants)} ({parts['constants'][:12]})",
        # How much memory is free differs a little between devices; the first process's counts.
        "target": f"{target.spec} ({_digest(options_form(replace(target, hbm_bytes=0)))})",
    }
    for name, form in plain_options(asked).items():
        text = json.dumps(form, sort_keys=True)
        said[name] = text if len(text) <= 200 else f"{_short(text)} ({_digest(form)})"
    return said


def _short(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."


def _digest(form: Any) -> str:
    return hashlib.sha256(json.dumps(form, sort_keys=True).encode()).hexdigest()[:12]
