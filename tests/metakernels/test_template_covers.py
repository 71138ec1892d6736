"""Every template: any disjoint cover of its index space gives what the whole gives.

Hypothesis draws shapes, parameters and the cover (uneven, of map and reduce dims, with halos where
boxes overlap). Integers must agree exactly, floats up to 1e-5 (2e-2 below 32 bits), relative and
absolute: partial results are rounded to the output's dtype before they combine.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tapestry_egg.metakernels import registry
from tapestry_egg.reference.kernels import REFERENCES
from tests.metakernels.cases import application, check_cover
from tests.metakernels.cases_elementwise import ABSENT
from tests.metakernels.covers import random_cover
from tests.metakernels.template_cases import CASES, FAMILY

#: Kernels as other versions of JAX spell them.
SPELLINGS = {
    "copy_p": "copy",
    **{f"scatter_{kind}": f"scatter-{kind}" for kind in ("add", "sub", "mul", "max", "min")},
}
#: Index groups that no operation can be cut along although their dims are not all `whole`; covers
#: cut none of which shards exchange states (`tests/runtime/test_lower_states.py` does).
NEVER_CUT = {
    **{kernel: {"r"} for kernel in ("reduce_xor", "argmax", "argmin", "top_k")},
    "conv_general_dilated": {"z"},
    "scatter_apply": {"b"},
}
RNG = st.randoms(use_true_random=False)
MANY = 8  # examples of kernels whose cases take several forms; one entry of few forms needs fewer
FEW = 3


def covered(kernel: str, rng: random.Random) -> None:
    app = application(kernel, rng)
    check_cover(app, random_cover(app.signature, rng, cuts=4))


@pytest.mark.parametrize("kernel", CASES)
def test_shards_give_what_the_whole_gives(kernel: str) -> None:
    examples = FEW if FAMILY[kernel] in ("elementwise", "cumulative") else MANY

    @settings(max_examples=examples)
    @given(RNG)
    def check(rng: random.Random) -> None:
        covered(kernel, rng)

    check()


@pytest.mark.long
@pytest.mark.parametrize("kernel", [k for k in CASES if FAMILY[k] != "elementwise"])
def test_shards_give_what_the_whole_gives_at_length(kernel: str) -> None:
    for seed in range(40):
        covered(kernel, random.Random(seed))


def test_every_kernel_has_cases_and_a_reference() -> None:
    library = Path(registry.__file__).with_name("templates")
    own = {  # of files that other tests read
        kernel
        for kernel, entries in registry.templates().items()
        if all(Path(entry.path).parent != library for entry in entries)
    }
    kernels = set(registry.templates()) - own
    assert kernels == set(REFERENCES) - own, (
        "a template without a reference, or the other way round"
    )
    assert kernels == set(CASES) | set(SPELLINGS) | ABSENT, (
        "a template without cases, or the other way round"
    )
    for kernel, like in SPELLINGS.items():
        assert registry.templates()[kernel] == registry.templates()[like]


@pytest.mark.slow
def test_every_entry_is_drawn_and_cut_along_every_index_group() -> None:
    wanted = set()
    for kernel in CASES:
        for entry in registry.templates()[kernel]:
            groups = set(entry.index or {"i": None}) - NEVER_CUT.get(kernel, set())
            groups -= {g for g, r in entry.roles.items() if r.text == "whole"}
            wanted |= {(kernel, entry.origin.line, g) for g in groups or {""}}
    for kernel in CASES:
        for seed in range(80):
            own = {w for w in wanted if w[0] == kernel}
            if not own:
                break
            rng = random.Random(seed)
            app = application(kernel, rng)
            assert app.template is not None, f"{app} has no template"
            cut = {""}
            for d, dim in enumerate(app.signature.index):
                if any(b.shape[d] < dim.size for b in random_cover(app.signature, rng, cuts=6)):
                    cut.add(dim.name.rstrip("0123456789"))
            wanted -= {(kernel, app.template.origin.line, g) for g in cut}
    assert not wanted, f"never drawn, or never cut: {sorted(wanted)}"
