"""Problems and archives as named arrays, without objects that could execute."""

from __future__ import annotations

import numpy as np

from tapestry_egg.extract.problem.problem import Pair, Problem, Variable

from .archive import Archive, Candidate, Cut, Prices


def problem_arrays(p: Problem) -> dict[str, np.ndarray]:
    """A problem as named arrays without objects; what its parts have in common is there once."""
    tables: list[np.ndarray] = []
    shapes: list[tuple[int, int]] = []
    labels: list[np.ndarray] = []
    number: dict[int, int] = {}

    def table(x: np.ndarray) -> int:
        if id(x) not in number:
            number[id(x)] = len(tables)
            tables.append(x.ravel())
            shapes.append((x.shape[0], x.shape[1] if x.ndim > 1 else -1))
        return number[id(x)]

    def line(x: np.ndarray) -> int:
        if id(x) not in number:
            number[id(x)] = len(labels)
            labels.append(x)
        return number[id(x)]

    parts: list[tuple[int, ...]] = []
    uses: list[tuple[int, int, int]] = []
    spans: list[tuple[int, int]] = []
    every: list[Variable | Pair] = [*p.variables, *p.pairs]
    for part in every:
        ends = (-1, -1, -1, -1)
        if isinstance(part, Pair):
            ends = (part.a, part.b, line(part.label_a), line(part.label_b))
        costs = (table(part.seconds), table(part.joules))
        parts.append((*ends, *costs, len(part.uses), len(part.spans)))
        uses += [(u.start, u.end, table(u.amount)) for u in part.uses]
        spans += [(x.event, table(x.amount)) for x in part.spans]
    none = np.zeros(0, np.int64)
    timeline = p.timeline
    return {
        "counts": np.array([len(p.variables), p.times, -1 if timeline is None else timeline.units]),
        "slowdown": np.array(0.0 if timeline is None else timeline.slowdown),
        "issue": none if timeline is None else timeline.issue,
        "arrive": none if timeline is None else timeline.arrive,
        "units": np.array(-1 if p.latencies is None else p.latencies.units),
        "maker": none if p.latencies is None else p.latencies.maker,
        "reader": none if p.latencies is None else p.latencies.reader,
        "names": np.array([v.name for v in p.variables], dtype=np.str_),
        "parts": np.array(parts, dtype=np.int64).reshape(-1, 8),
        "uses": np.array(uses, dtype=np.int64).reshape(-1, 3),
        "spans": np.array(spans, dtype=np.int64).reshape(-1, 2),
        "shapes": np.array(shapes, dtype=np.int64).reshape(-1, 2),
        "tables": np.concatenate(tables, dtype=np.float64) if tables else np.zeros(0),
        "sizes": np.array([len(x) for x in labels], dtype=np.int64),
        "labels": np.concatenate(labels, dtype=np.int64) if labels else np.zeros(0, np.int64),
    }


def archive_arrays(archive: Archive) -> dict[str, np.ndarray]:
    """An archive as named arrays."""
    prices = [p for _, p in archive.places]
    # Shares of a second are never all nothing, which stands for none here.
    none = np.zeros(max((len(p.events) for p in prices if p.events is not None), default=0))
    events = [none if p.events is None else p.events for p in prices]
    costs = [(*c.costs, c.unmerged) for c in archive.candidates]
    return {
        "rows": np.array([c.rows for c in archive.candidates], dtype=np.int64),
        "costs": np.array(costs).reshape(-1, 4),
        "cuts": np.array([c.numbers for c in archive.cuts], dtype=float).reshape(-1, 5),
        "by_clock": np.array(archive.by_clock),
        "place_cuts": np.array([c.numbers for c, _ in archive.places], dtype=float).reshape(-1, 5),
        "place_rates": np.array([(p.joule, p.second) for p in prices], dtype=float).reshape(-1, 2),
        "place_bytes": np.array([p.bytes for p in prices], dtype=float),
        "place_events": np.array(events, dtype=float),
        "spent": np.array(archive.spent),
    }


def archive_from(data: dict[str, np.ndarray]) -> Archive:
    """The archive of `archive_arrays`."""
    candidates = [
        Candidate(rows, *map(float, costs))
        for rows, costs in zip(data["rows"], data["costs"], strict=True)
    ]
    cuts = [Cut(*map(float, cut)) for cut in data["cuts"]]
    places = [
        (
            Cut(*map(float, cut)),
            Prices(per_byte, float(joule), float(second), events if events.any() else None),
        )
        for cut, (joule, second), per_byte, events in zip(
            data["place_cuts"],
            data["place_rates"],
            data["place_bytes"],
            data["place_events"],
            strict=True,
        )
    ]
    by_clock, spent = bool(data["by_clock"]), float(data["spent"])
    return Archive(candidates, cuts, by_clock, places, spent)
