"""Programs of rules: what is not computed twice is what computing it again would give."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from tapestry_egg.metakernels import registry
from tapestry_egg.rules.verify.evaluate import NoReference, Program, _in, as_numbers
from tapestry_egg.rules.verify.instances import Drawn, Instance, instances
from tapestry_egg.rules.verify.laws import sides
from tapestry_egg.rules.verify.unlike import Unlike
from tapestry_egg.rules.verify.values import landmarks
from tests.rules.corpus import every_true


def programs(every: int, most: int) -> list[Instance]:
    found: list[Instance] = []
    for rule in every_true()[::every]:
        for law in sides(rule):
            drawn = instances(rule, law, 5, 200, Drawn(), landmarks(rule), Unlike(most))
            found += [i for i in islice(drawn, most) if i.rounds]
    return found


@pytest.fixture(scope="module")
def some() -> list[Instance]:
    return programs(20, 3)


@pytest.mark.slow
def test_what_follows_a_moved_tensor_is_what_a_program_from_there_computes(
    some: list[Instance],
) -> None:
    rng = np.random.default_rng(3)
    moved = 0
    for instance in some:
        program = Program(instance, "wide")
        drawn = [n for n in instance.inputs if n not in instance.side.constants]
        values = program.inputs(("unit",) * len(drawn), rng, (0.0, 1.0))
        try:
            at = program.evaluate(values)
        except NoReference:  # such programs are not judged
            continue
        for name in (n for n in drawn if values[n].dtype.kind == "f"):
            other = values[name] * 1.5
            again = program.evaluate({**values, name: other})
            for root, made in instance.side.unions:
                for end in (root, made):
                    there = program.after(at, name, other, end)
                    np.testing.assert_array_equal(there, again[end])
                    moved += bool((there != at[end]).any())
    assert moved > 10


def test_a_kernel_in_wider_numbers_reads_and_writes_where_its_own_signature_says(
    some: list[Instance],
) -> None:
    seen = set()
    for instance in some:
        for entry in instance.applied.values():
            changed, signature = _in(entry, "wide")
            inputs = [as_numbers(t, "wide") for t in entry.inputs]
            own = registry.signature(entry.kernel, changed.params, inputs)
            assert (signature.inputs, signature.outputs) == (own.inputs, own.outputs)
            assert (signature.index, signature.outside) == (own.index, own.outside)
            assert (signature.input_types, signature.output_types) == (
                own.input_types,
                own.output_types,
            )
            seen.add(entry.kernel)
    assert len(seen) >= 10
