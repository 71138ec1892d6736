"""`python -m tapestry_egg.extract`: answers to choice problems in files."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tapestry_egg.atomic import write_atomic
from tapestry_egg.errors import ExtractError, TapestryError
from tapestry_egg.parallel.deadline import end_as_interrupted

from .answers import Answer, Asked, answer_file, no_answer

_HEAD = f"{'file':40} {'value':>16} {'bound':>16} {'gap':>8} {'seconds':>8} {'proven':6} method"


def main(arguments: Sequence[str] | None = None) -> int:
    """Extract from each file in order; returns 0 when every file has an answer, 1 when one has
    none, 130 after an interruption, whose best answers are printed and written all the same."""
    options = _parser().parse_args(arguments)
    end_as_interrupted()
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
    asked = Asked(
        options.seconds,
        options.seed,
        options.front,
        options.json,
        options.progress,
        options.gap,
        options.patience,
    )
    if not options.json and not options.front:
        print(_HEAD, flush=True)
    failed = interrupted = False
    try:
        for path in options.paths:
            answer = _answer(path, asked)
            failed = failed or answer.failed
            interrupted = interrupted or answer.interrupted
            if answer.error and not options.json:
                print(answer.error, file=sys.stderr, flush=True)
            elif answer.text:
                print(answer.text, flush=True)
            if options.output is not None:
                for name, text in answer.files.items():
                    write_atomic(options.output / name, text)
            if interrupted:
                break
    except KeyboardInterrupt:
        interrupted = True
    except TapestryError as error:  # the folder of the answers
        print(error, file=sys.stderr)
        failed = True
    return 130 if interrupted else int(failed)


def _answer(path: Path, asked: Asked) -> Answer:
    try:
        return answer_file(str(path), path.read_bytes(), asked)
    except OSError as error:
        failure = ExtractError(f"cannot be read: {error}", where=str(path))
        return no_answer(str(path), str(failure), asked)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tapestry_egg.extract",
        description="Choose nodes of e-graphs, strategies of IOPDDL problems, rows of snapshots.",
    )
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help=".json or .json.gz")
    parser.add_argument(
        "--seconds",
        type=float,
        default=60.0,
        help="per file, reading included, but for the last second (default 60)",
    )
    parser.add_argument(
        "--gap", type=float, default=0.0, metavar="SHARE", help="stop this near to the bound: 0.01"
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=float("inf"),
        metavar="SECONDS",
        help="stop after so long without a better answer or bound",
    )
    parser.add_argument("--seed", type=int, default=0, help="default 0")
    parser.add_argument(
        "--front", action="store_true", help="the front of cost and memory of strategy graphs"
    )
    parser.add_argument("--progress", action="store_true", help="tell of every gain on stderr")
    parser.add_argument("--json", action="store_true", help="one JSON object per file")
    parser.add_argument(
        "-o", dest="output", type=Path, metavar="DIR", help="write the chosen nodes there"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
