"""What predictions are worth against measured runs: errors, ranks, regret, fit, peaks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import mean, median
from typing import Any

from . import nanotron
from .predict import Prediction
from .rows import CAPACITY, Run, states_and_activations

#: Runs within this share of the best count as the best: so much do repeats differ.
NOISE = 0.15
#: Groups of this many hosts stand apart: their measurements are suspect.
SUSPECT = "64"


@dataclass(frozen=True)
class Judged:
    """A run beside its prediction: what devices take for a step, what the host takes to dispatch
    it, and `seconds`, the longer of both and what follows when both are done."""

    run: Run
    predicted: Prediction
    device_seconds: float
    host_seconds: float
    after_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        return max(self.device_seconds, self.host_seconds) + self.after_seconds

    @property
    def peak_bytes(self) -> float:
        """Of one device: the plan's, and what its framework's loss holds besides."""
        return self.predicted.peak_bytes + self.run.loss_bytes

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= CAPACITY


def with_attention(run: Run, made: Prediction) -> float:
    """Seconds of a run's devices, whose attention may have been another kernel's."""
    if run.attention is None:
        return made.seconds
    forward, backward = run.attention
    taken = made.attention_flops / forward + made.attention_backward_flops / backward
    return made.seconds - made.attention_seconds + taken


def judged(
    runs: Sequence[Run], found: Mapping[str, Prediction | str], launch: float, host: float = 1.0
) -> list[Judged]:
    """The runs that have a prediction.

    Adapters: PyTorch's host, in eager mode, dispatches every operation and collective by itself,
    `launch` seconds each (times `host`), while devices work; a step takes as long as the slower of
    both. The stream is gathered and scattered in rings. Gradients are summed as nanotron does
    (`nanotron.py`): with ZeRO 0 beside the backward pass of the last micro-batch, two thirds of its
    work; with ZeRO 1 after it, and then copies are launched for which devices wait.
    """
    out = []
    for run in runs:
        made = found.get(run.key())
        if isinstance(made, Prediction):
            dispatching = (made.dispatches + made.collectives) * launch * host
            working = with_attention(run, made)
            computing = working - made.reducing_seconds + made.ring_seconds
            backward = 2 / 3 * (working - made.data_seconds) / run.micro_batches
            summing = nanotron.summing_seconds(run)
            devices = computing + (summing if run.zero else max(0.0, summing - backward))
            copying = nanotron.copies(run) * launch
            out.append(Judged(run, made, devices, dispatching, copying))
    return out


def host_factor(rows: Sequence[Judged], model: str = "1B") -> float:
    """How many times as long the host takes as `launch` says: the median over the runs of one model
    that it is predicted to pace (1 where there are none)."""
    paced = [
        (r.run.seconds - r.after_seconds) / r.host_seconds
        for r in rows
        if r.run.ran and r.run.group[0] == model and r.host_seconds > r.device_seconds
    ]
    return median(paced) if paced else 1.0


def distinct(rows: Sequence[Judged]) -> list[Judged]:
    """One row for runs that differ in nothing: the median of those that ran, if any did."""
    same: dict[str, list[Judged]] = defaultdict(list)
    for row in rows:
        same[row.run.key()].append(row)
    out = []
    for group in same.values():
        ran = sorted((r for r in group if r.run.ran), key=lambda r: r.run.seconds)
        out.append(ran[len(ran) // 2] if ran else group[0])
    return out


@dataclass(frozen=True)
class Errors:
    """Relative errors: how many, their median, mean and 90th percentile, and the median bias."""

    count: int
    median: float
    mean: float
    ninetieth: float
    bias: float


def errors(rows: Sequence[Judged]) -> Errors | None:
    """Errors of the tokens per second of runs that ran."""
    return _errors(r.run.seconds / r.seconds - 1 for r in rows if r.run.ran)


def _errors(signed: Iterable[float]) -> Errors | None:
    signed = list(signed)
    if not signed:
        return None
    sizes = sorted(map(abs, signed))
    at = min(len(sizes) - 1, int(0.9 * len(sizes)))
    return Errors(len(sizes), median(sizes), mean(sizes), sizes[at], median(signed))


@dataclass(frozen=True)
class Choice:
    """A group of runs: rank correlation of seconds, the run chosen, and its regret."""

    group: tuple[str, str]
    count: int
    ran: int
    correlation: float | None
    chosen: str
    regret: float | None
    failed_before: int  # runs said to fit and to be faster that did not run


def choices(rows: Sequence[Judged]) -> list[Choice]:
    """Per (model, hosts): among all runs, those that failed included, the one that is predicted to
    be the fastest of those that are said to fit; where it failed, the next one."""
    groups: dict[tuple[str, str], list[Judged]] = defaultdict(list)
    for row in distinct(rows):
        groups[row.run.group].append(row)
    out = []
    for key, group in sorted(groups.items(), key=lambda kv: (kv[0][0], int(kv[0][1] or 0))):
        ran = [r for r in group if r.run.ran]
        if not ran:
            continue
        best = min(r.run.seconds for r in ran)
        ranked = sorted((r for r in group if r.fits), key=lambda r: r.seconds)
        failed = 0
        chosen = None
        for row in ranked:
            if row.run.ran:
                chosen = row
                break
            failed += 1
        regret = None
        if chosen is not None:
            regret = chosen.run.seconds / best
            regret = 1.0 if regret <= 1 + NOISE else regret
        out.append(
            Choice(
                key,
                len(group),
                len(ran),
                correlation([r.seconds for r in ran], [r.run.seconds for r in ran]),
                chosen.run.name if chosen else "",
                regret,
                failed,
            )
        )
    return out


def correlation(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Spearman's rank correlation; None of fewer than three pairs."""
    if len(a) < 3:
        return None
    from scipy.stats import spearmanr

    return float(spearmanr(a, b).statistic)


@dataclass(frozen=True)
class Fit:
    """What is said of fitting: of runs that ran, and of failures that are too large by formula."""

    ran: int
    said_to_fit: int
    too_large: int
    refused: int
    other_failures: int
    other_refused: int


def fit(rows: Sequence[Judged]) -> Fit:
    """Of runs that ran, how many are said to fit; of failures, how many are refused."""
    ran = [r for r in rows if r.run.ran]
    failed = [r for r in rows if not r.run.ran]
    large = [r for r in failed if states_and_activations(r.run) > CAPACITY]
    other = [r for r in failed if states_and_activations(r.run) <= CAPACITY]
    return Fit(
        len(ran),
        sum(r.fits for r in ran),
        len(large),
        sum(not r.fits for r in large),
        len(other),
        sum(not r.fits for r in other),
    )


def peaks(rows: Sequence[Judged]) -> Errors | None:
    """Relative errors of peak bytes of runs that ran."""
    known = [r for r in rows if r.run.ran and r.run.peak_bytes]
    return _errors(r.peak_bytes / r.run.peak_bytes - 1 for r in known)


def plain(value: Any) -> Any:
    """A table as JSON."""
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if hasattr(value, "__dataclass_fields__"):
        return {k: plain(v) for k, v in asdict(value).items()}
    return value
