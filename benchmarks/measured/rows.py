"""Rows of published measurements, read from a directory of CSV files that is not shipped."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from .programs import Model

#: Flop/s of FlashAttention-2 on H100 at 4096 keys, by the width of a head: forward with a causal
#: mask, backward without one (FlashAttention-3, arXiv:2407.08608, figures 5 and 6), which at 8192
#: keys is as quick within 1 % (Dao-AILab/flash-attention, pull request 1791).
FLASH_ATTENTION_2 = {64: (284e12, 279e12), 128: (319e12, 310e12)}

#: Bytes of one device of the machine that the runs were made on.
CAPACITY = 80e9


def read(directory: Path, name: str) -> list[Mapping[str, str]]:
    """The rows of one file; its first lines, which begin with `#`, say where they are from."""
    with open(directory / name, encoding="utf-8") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


@dataclass(frozen=True)
class Run:
    """One training run: shapes, how it divides, and what was measured (0: nothing)."""

    name: str
    group: tuple[str, str]
    model: Model
    target: str
    data: int
    tensor: int
    zero: int
    micro_batch: int
    micro_batches: int
    sequence_parallel: bool = True
    remat: str = "none"
    stages: int = 1  # of a pipeline, which is no part of the program: see `pipelined`
    interleaved: int = 1  # parts of a stage
    attention: tuple[float, float] | None = None  # flop/s of another kernel, forward and backward
    loss_bytes: float = 0.0  # that its framework's loss holds on a device beside the logits
    seconds: float = 0.0
    peak_bytes: float = 0.0
    ran: bool = True

    @property
    def devices(self) -> int:
        return self.data * self.tensor

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.data * self.micro_batch * self.micro_batches * self.model.sequence

    def key(self) -> str:
        """What a prediction depends on."""
        return "|".join(
            map(
                str,
                (
                    *(self.model, self.target, self.data, self.tensor, self.zero),
                    *(self.micro_batch, self.micro_batches, self.sequence_parallel, self.remat),
                ),
            )
        )


def _model(x: Mapping[str, str]) -> Model:
    """The shapes that a row tells."""
    return Model(
        layers=int(x["layers"]),
        width=int(x["hidden"]),
        heads=int(x["heads"]),
        hidden=int(x["ffn"]),
        vocabulary=int(x["vocab"]),
        sequence=int(x["seq"]),
    )


def _host(devices: int, chip: str = "p5") -> str:
    return f"{chip}:{devices}" if devices <= 8 else f"{chip}:{devices // 8}x8"


def ultrascale(directory: Path) -> Iterator[Run]:
    """The runs without pipelines whose own numbers agree (`row_consistent`), 1B and 8B on H100.

    nanotron's loss holds two float32 arrays beside the logits: the logits widened, and those less
    their greatest, which become the softmax (tensor_parallel/functional.py,
    sharded_cross_entropy and _ShardedCrossEntropy).
    """
    for x in read(directory, "ultrascale_h100.csv"):
        if x["pp"] != "1" or x["row_consistent"] != "1":
            continue
        model = replace(_model(x), tied=x["tied"] == "1")
        ran = x["status"] == "ok"
        yield Run(
            name=f"{x['model']} dp{x['dp']} tp{x['tp']} zero{x['zero']} mbs{x['mbs']}",
            group=(x["model"], x["nodes"]),
            model=model,
            target=_host(int(x["gpus"])),
            data=int(x["dp"]),
            tensor=int(x["tp"]),
            zero=int(x["zero"]),
            micro_batch=int(x["mbs"]),
            micro_batches=int(x["grad_acc"]),
            attention=FLASH_ATTENTION_2[model.head],
            loss_bytes=8.0 * int(x["mbs"]) * model.sequence * model.vocabulary / int(x["tp"]),
            seconds=float(x["step_s"]) if ran else 0.0,
            peak_bytes=float(x["gpu_mem_gb"] or 0) * 2**30,  # nanotron: bytes / 1024**3
            ran=ran,
        )


def states_and_activations(run: Run) -> float:
    """Bytes of one device by formula: states, and activations without recomputation.

    States: bfloat16 parameters, float32 gradients, master weights and two moments, the last three
    over `data` with ZeRO 1. Activations of a layer as Korthikanti et al. count them (2022, section
    4.1), without dropout and with attention streamed, the feed-forward part by its own two or three
    values; over `tensor` with sequence parallelism. Logits in bfloat16 and, for the loss, float32.
    """
    m, t, d = run.model, run.tensor, run.data
    layer = m.width * m.head * (2 * m.heads + 2 * m.kv) + (3 if m.gated else 2) * m.width * m.hidden
    count = (m.layers * layer + m.vocabulary * m.width * (1 if m.tied else 2)) / t
    own = 12.0 / d if run.zero else 12.0
    states = count * (2 + 4 + own)
    tokens = run.micro_batch * m.sequence
    saved = 2 * (6 * m.width + (m.heads + 2 * m.kv) * m.head + (3 if m.gated else 2) * m.hidden)
    share = t if run.sequence_parallel else 1
    return states + tokens * m.layers * saved / share + tokens * m.vocabulary * 6 / t


def korthikanti(directory: Path) -> Iterator[Run]:
    """The eight runs of Korthikanti et al., 2022, table 5: GPTs of 22B to 1T on A100, tensor
    parallel in a host; of a pipeline the program is a stage, its layers with embedding and loss."""
    for x in read(directory, "anchors_llm.csv"):
        if "Table 5" not in x["source"] or "kProfile" not in x["source"]:
            continue
        stages = int(x["pp"])
        yield Run(
            name=f"{x['model']} {'selective' if x['sp'] == '1' else 'full'}",
            group=("korthikanti", ""),
            model=replace(
                _model(x), layers=int(x["layers"]) // stages, tied=True, gated=False, stored=True
            ),
            target="a100:8",
            data=1,
            tensor=int(x["tp"]),
            zero=0,
            micro_batch=int(x["mbs"]),
            micro_batches=int(x["gbs"]) // int(x["mbs"]),
            sequence_parallel=x["sp"] == "1",
            remat="full" if x["recompute"] == "full" else "attention",
            stages=stages,
            interleaved=int(x["vp"] or 1),
            seconds=float(x["step_s"]),
        )


def pipelined(run: Run, seconds: float) -> float:
    """Seconds of a step of a pipeline, from those of one stage for all its micro-batches.

    One forward, one backward, interleaved: of m micro-batches on p stages of v parts each, the
    bubble is (p - 1) / (v·m) of the work (Narayanan et al., 2021, section 2.2). What stages send
    each other, and that the first has no loss and the last no embedding, is not counted.
    """
    bubble = (run.stages - 1) / (run.interleaved * run.micro_batches)
    return seconds * (1.0 + bubble)


#: Keys of the longest sequences of Mosaic's runs that are taken: with more the time is that of
#: attention, and their tables do not say whose kernel ran.
LONGEST = 4096


def mosaic(directory: Path) -> Iterator[Run]:
    """GPTs of 125M to 70B on 8 to 64 A100 80GB and H100, fully sharded, in bfloat16, as MosaicML's
    llm-foundry ran them: whole micro-batches, layers recomputed or not, 512 to 4096 tokens."""
    for x in read(directory, "anchors_llm.csv"):
        chip = {"h100_80gb": "h100", "a100_80gb": "a100"}.get(x["hw"])
        if "llm-foundry" not in x["source"] or chip is None or x["precision"] != "amp_bf16":
            continue
        data, batch, micro = int(x["chips"]), int(x["gbs"]), int(x["mbs"])
        if data > 64 or int(x["seq"]) > LONGEST or batch % (data * micro):
            continue
        model = replace(_model(x), tied=True, gated=False)
        yield Run(
            name=f"{x['model']} s{x['seq']} b{micro} {data}",
            group=(chip, "8" if data == 8 else "more"),
            model=model,
            target=_host(data, chip),
            data=data,
            tensor=1,
            zero=3,
            micro_batch=micro,
            micro_batches=batch // data // micro,
            remat=x["recompute"],
            attention=FLASH_ATTENTION_2.get(model.head) if chip == "h100" else None,
            seconds=batch * int(x["seq"]) / data / float(x["tok_s_chip"]),
        )


def launch_seconds(directory: Path) -> float:
    """Host seconds to launch a small kernel from PyTorch, eagerly: the median of those measured."""
    found = [x for x in read(directory, "microbench.csv") if x["kind"] == "launch"]
    return median(float(x["time_us"]) for x in found) * 1e-6
