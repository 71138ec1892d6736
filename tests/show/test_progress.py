"""Progress: the events themselves, as lines in a log and as bars on a terminal."""

from __future__ import annotations

import io

from tapestry_egg.progress import VERBS, Bars, Lines, Phase, Progress, Reporter, reporter


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def work(progress: Progress) -> None:
    """What a pipeline says of one graph."""
    for verb in VERBS[:4]:
        progress(Phase(verb, "begun", None, "gpt2"))
        progress(Phase(verb, "halfway", 0.5, "gpt2"))
        progress(Phase(verb, "well", 1.0, "gpt2"))


def test_a_phase_reads_as_one_line() -> None:
    assert str(Phase("extract", "front 7", 0.5, "gpt2")) == "extract gpt2: 50 %  front 7"
    assert str(Phase("trace")) == "trace"
    assert str(Phase("trace", "1369 operations", 1.0)) == "trace: 1369 operations"


def test_anything_that_takes_a_phase_is_a_progress() -> None:
    heard: list[Phase] = []
    work(heard.append)
    assert [p.phase for p in heard[::3]] == ["trace", "encode", "saturate", "extract"]


def test_lines_tell_begin_and_end_and_hold_back_between() -> None:
    stream = io.StringIO()
    with Lines(stream, every=60) as progress:
        work(progress)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "trace gpt2: begun"
    assert lines[1].startswith("trace gpt2: well  (0.0 s)")
    assert len(lines) == 8
    assert not any("halfway" in line for line in lines)


def test_lines_with_no_pause_tell_everything() -> None:
    stream = io.StringIO()
    work(Lines(stream, every=0))
    assert sum("halfway" in line for line in stream.getvalue().splitlines()) == 4


def test_the_reporter_suits_the_stream() -> None:
    assert isinstance(reporter(Terminal()), Bars)
    assert isinstance(reporter(io.StringIO()), Lines)
    assert type(reporter(Terminal(), quiet=True)) is Reporter


def test_bars_show_stage_and_words_and_stay() -> None:
    stream = Terminal()
    with reporter(stream) as progress:
        work(progress)
    shown = stream.getvalue()
    for verb in VERBS[:4]:
        assert verb in shown
    assert "well" in shown


def test_quiet_says_nothing() -> None:
    stream = Terminal()
    with reporter(stream, quiet=True) as progress:
        work(progress)
    assert stream.getvalue() == ""
