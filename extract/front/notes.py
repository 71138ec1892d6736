"""Notes of a front: what happened to its search, what costs leave out, what was not searched.

Every text stands in `KINDS`. A note is made by `note`, and read as a sentence by `str`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tapestry_egg.columns import wrapped

#: What a note tells about: the `run` of the search (always printed), the `cost` of plans, or the
#: `space`, which lacks plans that no gap covers.
Effect = Literal["run", "cost", "space"]

_HEADS: dict[Effect, str] = {
    "run": "the search:",
    "cost": "plans and their costs:",
    "space": "not searched, and no gap covers it:",
}


@dataclass(frozen=True, slots=True)
class Note:
    """One thing to know about a front: `count` things of a `kind`, and the `setting` that changes
    it, empty if there is none. `str` gives the sentence."""

    kind: str
    text: str
    count: int = 1
    effect: Effect = "space"
    setting: str = ""

    def __str__(self) -> str:
        return f"Not searched: {self.text}." if self.effect == "space" else self.text


class _Number(int):
    """A number that is formatted with its noun: `{n:value}` as `1 value` or `2 values`."""

    def __format__(self, noun: str) -> str:
        one, _, many = noun.partition("|")
        return f"{int(self)} {one if self == 1 else many or f'{one}s'}" if noun else str(int(self))


_WORK = "Settings(work=...) or --work"
_ENTRIES = "Settings(entries=...), which takes more memory"
_BATCHES = "Settings(micro_batches=(2, 4, ...))"

#: Every kind of note: its effect, its text, and the setting that changes it.
KINDS: dict[str, tuple[Effect, str, str]] = {
    # The run
    "interrupted": ("run", "Interrupted: these are the best plans that were found until then.", ""),
    "time-limit": (
        "run",
        "The time limit of {seconds} s ended {what}; another run may give another front.",
        "Settings(seconds=...) or --seconds",
    ),
    "patience": (
        "run",
        "The search ended after {seconds} s without a better plan; another run may give another "
        "front.",
        "Settings(patience=...) or --patience",
    ),
    "constraint": ("run", "{text}", "Constrain it on the mesh of the plan, in blocks of one size"),
    "mesh-cost": ("run", "{text}", ""),
    "moved": (
        "run",
        "No plan leaves the arguments of {name} in their layouts ({why}); they are moved at every "
        "call.",
        "",
    ),
    "what-if": (
        "run",
        "What if: {words}. These are the plans found for {known}, costed again; others may be "
        "better, and no bound is proven.",
        "te.optimize for that machine",
    ),
    "text": ("cost", "{text}", ""),  # of a file of an earlier version
    # Costs
    "not-audited": (
        "cost",
        "{name} was not checked by the ledger, because this JAX lacks an operation that it runs.",
        "Plan with the JAX that runs the plan",
    ),
    "opaque": (
        "cost",
        "Replicated on every device: {count:operation} without a template ({names}). Time is "
        "estimated from operand and result bytes alone.",
        "Write it in jax.numpy, or describe it with a template (docs/kernels.md)",
    ),
    "unsplit": (
        "cost",
        "Replicated on every device: {count:operation} with {share} of the bytes that no rule "
        "shards ({names}).",
        "Write it with other jax.numpy operations; tapestry-egg census gives the reasons",
    ),
    # The space: each text continues "Not searched: "
    "results-memory": (
        "space",
        "plans of a lower peak: XLA reserves space for non-donated results from the start, which "
        "the search did not count",
        "Donate the state (donate_argnums), which also lowers the peak",
    ),
    "own-objective": (
        "space",
        "plans for {name}: it only compares plans that were found for other objectives",
        "",
    ),
    "mesh-axes": (
        "space",
        "{count:mesh shape} of more than {axes:axis|axes}",
        "Settings(max_axes=...) or --max-axes",
    ),
    "long-program": (
        "space",
        "{count:mesh shape}, because the program has {operations:operation}",
        "mesh_shapes=[...]",
    ),
    "long-program-axes": (
        "space",
        "meshes of more than {axes:axis|axes}, because the program has {operations:operation}",
        "mesh_shapes=[...]",
    ),
    "layouts": (
        "space",
        "{count:mesh shape} ({some}), because tensors have too many layouts there",
        "A mesh of fewer axes",
    ),
    "devices": (
        "space",
        "{count:number} of devices ({some}) that do not divide the machine's",
        "",
    ),
    "other-size-meshes": (
        "space",
        "{count:mesh shape}, because the mesh is that of the plan for other sizes",
        "te.optimize without like=",
    ),
    "other-size-forms": (
        "space",
        "other forms of the program than the rules of plan {name} for other sizes make",
        "te.optimize without like=",
    ),
    "three-axes": (
        "space",
        "{count:form} of {forms} on meshes of three axes",
        "Settings(max_axes=3) or --max-axes 3",
    ),
    "finer-meshes": (
        "space",
        "{count:network} ({some}), because these forms gave no plan of the front on other meshes",
        "mesh_shapes=[...]",
    ),
    "named-mesh": ("space", "meshes that divide an axis of {mesh}", "Settings(front=True)"),
    "work": ("space", "{names}, because the work was spent", _WORK),
    "tables": (
        "space",
        "{count:network} ({some}), because their tables are too large",
        _ENTRIES,
    ),
    "fastest": ("space", "all but the fastest plan within the limits", "Settings(front=True)"),
    # Forms of the program
    "no-rules": (
        "space",
        "other forms of the program, because it has {operations:operation}",
        "Settings(front=True)",
    ),
    "rules-budget": (
        "space",
        "forms of the program beyond a budget of the rules",
        "Settings(algebra=...)",
    ),
    "layout-rules": (
        "space",
        "strategies beyond a budget of the rules on layouts, in {count} of {networks:network}",
        "Settings(budget=...)",
    ),
    "forms": ("space", "{count:more form} of the program", "Settings(forms=...)"),
    "forms-views": (
        "space",
        "{count:form} of the program with other views or another operand order only",
        "",
    ),
    "forms-unseen": ("space", "some forms of the program that the rules found", ""),
    "forms-slight": (
        "space",
        "{count:form} of the program, because they save next to nothing on one device",
        "Settings(least_gain=0)",
    ),
    "bodies": (
        "space",
        "other forms of {count:loop or branch body|loop and branch bodies} of next to no time",
        "",
    ),
    "equal-layers": (
        "space",
        "rewrites across equal layers: {count:operation} of them were rewritten like one layer",
        "",
    ),
    "untried": ("space", "{count:kind} of rewrite that looked useful", ""),
    "many-operands": (
        "space",
        "other forms of {count:operation} with more operands than rules match",
        "",
    ),
    "softmax": (
        "space",
        "fused attention for {count:softmax|softmaxes} that the rules recognise only in part; "
        "masks stay in memory",
        "Write it as jax.nn.dot_product_attention",
    ),
    "stacks-all": (
        "space",
        "rewrites without stacks, because the copies of {count:chain} of products were stacked",
        "",
    ),
    "stacks-slower": (
        "space",
        "stacks of {count:chain} of equal products, because one device takes a tenth longer",
        "",
    ),
    "stacks-small": (
        "space",
        "stacks of {count:chain} of equal products: little work for the bytes copied, more than "
        "200 operations, or no rule for jax.vmap",
        "",
    ),
    "loops-long": (
        "space",
        "{count:loop} over stacks written out: no more than 4096 operations are, 512 with "
        "front=False",
        "",
    ),
    "batch-whole": ("space", "micro-batches, because {operation} needs the whole batch", ""),
    "batch-fits": (
        "space",
        "micro-batches, because the devices have memory for the whole batch",
        f"{_BATCHES}, or a lower limit on peak_bytes",
    ),
    "batch-counts": ("space", "{count:other number} of micro-batches", _BATCHES),
    "batch-counts-recomputed": (
        "space",
        "{count:other number} of micro-batches with recomputation",
        _BATCHES,
    ),
    "batch-forms": (
        "space",
        "{count:more form} of the program with recomputation in micro-batches",
        "",
    ),
    "batch-dims": ("space", "micro-batches along {count:dim} of the state", ""),
    "recompute": (
        "space",
        "{count:more form} of the program with recomputation",
        "Settings(recompute=...)",
    ),
    "recompute-where": ("space", "recomputation beyond {where}", ""),
    "recompute-slight": (
        "space",
        "recomputation, because it frees at most {share} of the peak on one device",
        "",
    ),
    "recompute-library": ("space", "recomputation of {count:library kernel}", ""),
    "recompute-readers": (
        "space",
        "recomputation of {count:value} for some of its readers only",
        "Settings(recompute=...)",
    ),
    "strategies": ("space", "more than {most} strategies each of {what} on {meshes}", ""),
    "kernel-collectives": (
        "space",
        "some combinations of collectives inside kernels, of {count:value}",
        "",
    ),
    "shared-until": (
        "space",
        "some last readers of shared copies, of {count:value}",
        "",
    ),
    "shared-copies": (
        "space",
        "shared copies of {count:value} other than by all-gather, reduce-scatter or one collective",
        "",
    ),
    "shared-tables": (
        "space",
        "shared copies of {count:value}, because the tables are too large",
        _ENTRIES,
    ),
    "overlap": ("space", "collectives that start at other places than one each", ""),
    "unmerged": ("space", "merged collectives of {count:more plan}", ""),
    "unmerged-unlikely": (
        "space",
        "merged collectives of {count:more plan}, because merging saved too little in others on "
        "the same mesh",
        "",
    ),
}


def note(kind: str, count: int = 1, setting: str | None = None, **words: Any) -> Note:
    """A note of a kind of `KINDS`, whose text has these words."""
    effect, text, usual = KINDS[kind]
    said = {k: _Number(x) if isinstance(x, int) else x for k, x in words.items()}
    said["count"] = _Number(count)
    change = (usual if setting is None else setting).format(**said)
    return Note(kind, text.format(**said), count, effect, change)


#: The note of a front that Ctrl-C cut short.
INTERRUPTED = note("interrupted")


def as_note(known: Note | str | dict[str, Any]) -> Note:
    """A note as a file has it: with its fields, or a sentence of an earlier version."""
    if isinstance(known, Note):
        return known
    return note("text", text=known) if isinstance(known, str) else Note(**known)


def happened(notes: Iterable[Note]) -> list[Note]:
    """The notes about the run of a search, which a reader is always shown."""
    return [n for n in notes if n.effect == "run"]


def notes_text(notes: Sequence[Note], width: int = 0) -> str:
    """All notes with the settings that change them, by effect, in lines of a width (0: the
    reader's)."""
    lines = []
    for effect, head in _HEADS.items():
        if own := [n for n in notes if n.effect == effect]:
            lines.append(head)
            for n in own:
                lines.append(f"  {n.text}")
                lines += [f"    to change it: {n.setting}"] if n.setting else []
    return wrapped("\n".join(lines), width)
