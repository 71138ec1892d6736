"""Signatures of operations by kernel name: the templates that ship with the package, and caches."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tapestry_egg.errors import TemplateError
from tapestry_egg.graph.arrays import kind
from tapestry_egg.graph.blockgraph import BlockGraph, Operation, TensorType
from tapestry_egg.metakernels.language.expressions import Expression
from tapestry_egg.metakernels.language.faults import Mismatch
from tapestry_egg.metakernels.language.scopes import Inner, Names
from tapestry_egg.metakernels.language.template import Template
from tapestry_egg.metakernels.language.template_file import read_templates
from tapestry_egg.metakernels.signatures.parameters import hashable, readable
from tapestry_egg.metakernels.signatures.signature import Elements, Meaning, OperationSignature
from tapestry_egg.zspace import Projection, ZRange

from .instantiate import Instance, instantiate, names_of, types_given

# Published whole, never filled in place: other threads read it meanwhile.
_TEMPLATES: Mapping[str, tuple[Template, ...]] = {}
_LOCK = threading.RLock()
_INSTANCES: dict[Any, Instance | None] = {}
_SIGNATURES: dict[Any, OperationSignature] = {}
_TYPES: dict[Any, tuple[TensorType, ...]] = {}
_BOUND: dict[Any, tuple[Template, Names] | None] = {}
_ADDED: list[str] = []


def templates() -> Mapping[str, tuple[Template, ...]]:
    """Kernel name -> its entries, in the order in which they are tried."""
    global _TEMPLATES
    if not _TEMPLATES:
        with _LOCK:
            if not _TEMPLATES:
                known: Mapping[str, tuple[Template, ...]] = {}
                for path in sorted(Path(__file__).with_name("templates").glob("*.yaml")):
                    known = _with(known, read_templates(path))
                _TEMPLATES = known
    return _TEMPLATES


def add_templates(path: str | Path, only: str = "") -> tuple[Template, ...]:
    """Read a template file of your own, or `only` its entries for one kernel; they are tried before
    those already known, in place of those read from there before.

    Returns the entries. Raises TemplateError with `file:line:column` for the first fault in it.
    """
    global _TEMPLATES
    added = read_templates(Path(path))
    if only:
        added = tuple(t for t in added if only in t.kernels)
    for template in added:
        template.check()
    with _LOCK:
        _TEMPLATES = _with(templates(), added)
        if (file := str(Path(path).absolute())) not in _ADDED:
            _ADDED.append(file)
        _INSTANCES.clear()
        _SIGNATURES.clear()
        _TYPES.clear()
        _BOUND.clear()
        spelled.cache_clear()
    return added


def added() -> tuple[str, ...]:
    """The absolute paths of the template files read beside those of the package."""
    return tuple(_ADDED)


def _with(
    known: Mapping[str, tuple[Template, ...]], entries: Sequence[Template]
) -> Mapping[str, tuple[Template, ...]]:
    """What is known and new entries, which are tried first; those of one file take the place of
    what was read from it before."""
    own: dict[str, list[Template]] = {}
    for template in entries:
        for kernel in template.kernels:
            own.setdefault(kernel, []).append(template)
    files = {template.path for template in entries}
    rest = {k: tuple(t for t in known.get(k, ()) if t.path not in files) for k in own}
    return {**known, **{k: (*new, *rest[k]) for k, new in own.items()}}


def signature(
    kernel: str,
    params: Mapping[str, Any],
    input_types: Sequence[TensorType],
    output_types: Sequence[TensorType] | None = None,
    regions: int = 0,
) -> OperationSignature:
    """The operation projection signature of one operation.

    `params` is plain data as in `tracing/codec.py`. A kernel without a template, one whose guards
    all fail, or a region operation gets the opaque signature, for which `output_types` is needed.
    Raises TemplateError when a template contradicts `output_types`.
    """
    inputs = tuple(input_types)
    outputs = None if output_types is None else tuple(output_types)
    key = (kernel, hashable(params), inputs, outputs, regions)
    found = _SIGNATURES.get(key)
    if found is None:
        made = None if regions else _instance(kernel, params, inputs, outputs)
        if made is not None:
            found = made.signature
        elif outputs is None:
            raise TemplateError(
                f"no template fits {kernel} of {', '.join(map(str, inputs)) or 'nothing'}",
                hint="\n  ".join(
                    (*_reasons(kernel, params, inputs), "With its output types given it is opaque.")
                ),
            )
        else:
            found = opaque(kernel, inputs, outputs)
        _SIGNATURES[key] = found
    return found


def output_types(
    kernel: str, params: Mapping[str, Any], input_types: Sequence[TensorType]
) -> tuple[TensorType, ...]:
    """The types of what an operation gives: those of its signature, of which nothing else is made.

    Raises TemplateError where no template fits.
    """
    inputs = tuple(input_types)
    key = (kernel, hashable(params), inputs)
    found = _TYPES.get(key)
    if found is None:
        for template in templates().get(kernel, ()):
            try:
                found = types_given(template, kernel, params, inputs)
                break
            except Mismatch:
                continue
        else:
            found = signature(kernel, params, inputs).output_types  # which says why there are none
        _TYPES[key] = found
    return found


def bound(
    kernel: str, params: Mapping[str, Any], input_types: Sequence[TensorType]
) -> tuple[Template, Names] | None:
    """The entry that stands for an operation, and what its names stand for; None where none does.

    Guards count, and patterns; nothing else of the entry is looked at.
    """
    inputs = tuple(input_types)
    key = (kernel, hashable(params), inputs)
    if key not in _BOUND:
        made = None
        for template in templates().get(kernel, ()):
            try:
                made = template, names_of(template, kernel, params, inputs)
                break
            except Mismatch:
                continue
        _BOUND[key] = made
    return _BOUND[key]


def takes(kernel: str, params: Mapping[str, Any], input_types: Sequence[TensorType]) -> bool:
    """Whether an operation has operands of dtypes that its kernel takes, as its template says."""
    try:
        found = bound(kernel, params, input_types)
    except TemplateError:  # parameters are missing
        found = None
    if found is None:
        return True
    template, names = found
    at = 0
    for operand in template.inputs:
        width = len(input_types) - len(template.inputs) + 1 if operand.many else 1
        if operand.name in template.samples:
            own = _sample(template.samples[operand.name], names)
            if not all(allowed(t.dtype, own) for t in input_types[at : at + width]):
                return False
        at += width
    return "when" not in template.samples or bool(_sample(template.samples["when"], names) or ())


def valid(kernel: str, params: Mapping[str, Any], input_types: Sequence[TensorType]) -> bool:
    """Whether JAX has an operation, as far as its template says and takes for granted."""
    try:
        found = bound(kernel, params, input_types)
        if found is not None and found[0].valid is not None and not found[0].valid(found[1]):
            return False
    except TemplateError:  # it asks for dims that are not there
        return False
    return takes(kernel, params, input_types)


def unlike(
    kernel: str,
    params: Mapping[str, Any],
    input_types: Sequence[TensorType],
    other: Mapping[str, Any] | None = None,
) -> Any:
    """What its template says that tells an operation from others of its kernel, or one from an
    `other` that reads the same; none where it says nothing."""
    template, names = bound(kernel, params, input_types) or (None, Names({}))
    if template is None or "unlike" not in template.samples:
        return None
    return template.samples["unlike"](Inner(names, {"$other": readable(other)}))


def _sample(text: Expression, names: Names) -> Any:
    """What is said of samples; nothing where that depends on parameters that are not there."""
    try:
        return text(names)
    except TemplateError:
        return ()


def allowed(dtype: str, dtypes: Sequence[str]) -> bool:
    """Whether a dtype is one of a list of dtypes and kinds; of an empty list every one is."""
    return not dtypes or dtype in dtypes or kind(dtype) in dtypes


def losses(
    kernel: str, params: Mapping[str, Any], input_types: Sequence[TensorType]
) -> dict[str, float]:
    """In which ways, and by how many bits each, results of an operation may be less precise than
    their dtype, as its template says."""
    template, names = bound(kernel, params, input_types) or (None, {})
    return {k: float(text(names)) for k, text in template.loses.items()} if template else {}


def promises(
    kernel: str, params: Mapping[str, Any], input_types: Sequence[TensorType]
) -> tuple[str, ...]:
    """What an operation takes for granted of its operands, as its template says."""
    template, names = bound(kernel, params, input_types) or (None, {})
    return tuple(k for k, text in template.promises.items() if text(names)) if template else ()


def signature_of(
    op: Operation, input_types: tuple[TensorType, ...], output_types: tuple[TensorType, ...]
) -> OperationSignature:
    """The signature of an operation without regions; the operation remembers it.

    A program is priced and scheduled many times, and most of its operations stay the same ones.
    """
    known = op.__dict__.get("_signature")
    if known is None or known[0] != input_types or known[1] != output_types:
        found = signature(op.kernel, op.params, input_types, output_types)
        known = op.__dict__["_signature"] = (input_types, output_types, found)
    remembered: OperationSignature = known[2]
    return remembered


def signature_in(graph: BlockGraph, op: Operation) -> OperationSignature:
    """The signature of an operation of a graph, without regions."""
    values = graph.values
    return signature_of(
        op, tuple([values[v] for v in op.inputs]), tuple([values[v] for v in op.outputs])
    )


def on_values(
    op: Operation, inputs: tuple[int, ...], outputs: tuple[int, ...], remat: int | None
) -> Operation:
    """An operation on other values of the same types, whose signature is the same."""
    if (inputs, outputs) == (op.inputs, op.outputs):
        return op
    other = replace(op, inputs=inputs, outputs=outputs, remat=remat)
    if "_signature" in op.__dict__:
        other.__dict__["_signature"] = op.__dict__["_signature"]
    return other


def has_local(kernel: str) -> bool:
    """Whether a kernel has parameters that are others on parts of its operands."""
    return any(template.local for template in templates().get(kernel, ()))


def localize(
    kernel: str,
    params: Mapping[str, Any],
    sig: OperationSignature,
    local_input_shapes: Sequence[tuple[int, ...]],
    local_output_shapes: Sequence[tuple[int, ...]],
) -> dict[str, Any]:
    """Parameters with which the kernel runs on operands that are image boxes of an index box.

    The shapes are those of the images of that index box. Raises TemplateError where the kernel
    cannot run on such boxes.
    """
    if sig.opaque or not has_local(kernel):
        return dict(params)
    made = _instance(kernel, params, sig.input_types, sig.output_types)
    if made is None:
        raise TemplateError(f"no template fits {kernel}, whose signature says that one did")
    return {**params, **made.localize(local_input_shapes, local_output_shapes)}


def entry(
    kernel: str,
    params: Mapping[str, Any],
    input_types: Sequence[TensorType],
    output_types: Sequence[TensorType] | None = None,
) -> Template | None:
    """The entry that gives an operation its signature; None for an opaque operation."""
    outputs = None if output_types is None else tuple(output_types)
    made = _instance(kernel, params, tuple(input_types), outputs)
    return None if made is None else made.template


def meaning(kernel: str) -> Meaning:
    """What a kernel is to those that read programs, as the first of its entries says."""
    found = templates().get(kernel)
    return found[0].means if found else ""


@cache
def spelled() -> Mapping[str, tuple[str, ...]]:
    """Kernels that are a primitive of JAX by another name, which that is where it has a parameter:
    the primitive and the parameter of each."""
    return {k: said for own in templates().values() for t in own for k, said in t.spelled.items()}


def in_blocks(kernel: str) -> bool:
    """Whether a kernel runs in blocks of scores that it never stores as a whole."""
    return any("blocks" in t.scratch for t in templates().get(kernel, ()))


def draws(kernel: str) -> bool:
    """Whether a kernel gives other numbers each time that it runs on the same operands."""
    return facts_of(kernel).draws


def calls_python(kernel: str) -> bool:
    """Whether a kernel calls into Python."""
    return facts_of(kernel).calls


def runs_once(op: Operation) -> bool:
    """Whether one device runs an operation for all: it has effects, or calls into Python, where
    equal operands may give unequal results."""
    return op.effectful or facts_of(op.kernel).runs_once


def is_repeatable(op: Operation) -> bool:
    """Whether an operation without regions gives the same each time that it runs on the same
    operands, so that two of it are one, and one can run again."""
    return not (op.regions or runs_once(op) or draws(op.kernel))


def is_light(op: Operation, values: Sequence[TensorType]) -> bool:
    """Whether an operation on such values goes element by element, at one operation for each at
    most, so that it may as well run again: what masks are made of."""
    if len(op.outputs) != 1 or not is_repeatable(op):
        return False
    read, made = (tuple([values[v] for v in vs]) for vs in (op.inputs, op.outputs))
    known = signature_of(op, read, made)
    return known.fusion in ("loop", "view") and known.whole_flops <= made[0].size


def opaque(
    kernel: str,
    input_types: Sequence[TensorType],
    output_types: Sequence[TensorType],
    *,
    once: bool = False,
) -> OperationSignature:
    """The signature of an operation of which nothing is known: one index point, nothing to cut.

    With `once` one device runs it, as it does what calls into Python.
    """

    def full(tensor: TensorType) -> Projection:
        return Projection.fixed(ZRange.from_shape(tensor.shape), 0)

    facts = facts_of(kernel)
    elements = float(sum(t.size for t in (*input_types, *output_types)))
    return OperationSignature(
        kernel=kernel,
        index=(),
        inputs=tuple(map(full, input_types)),
        outputs=tuple(map(full, output_types)),
        input_types=tuple(input_types),
        output_types=tuple(output_types),
        flops=((elements, ()),) if elements else (),
        reads=(None,) * len(input_types),
        elements=facts.elements,
        opaque=True,
        once=once or facts.runs_once,
        calls=facts.calls,
    )


def _instance(
    kernel: str,
    params: Mapping[str, Any],
    inputs: tuple[TensorType, ...],
    outputs: tuple[TensorType, ...] | None,
) -> Instance | None:
    plain = hashable(params)
    key = (kernel, plain, inputs, outputs)
    if key not in _INSTANCES:
        alike = _INSTANCES.get((kernel, plain, inputs, None))
        if alike is not None and alike.signature.output_types == outputs:
            return _INSTANCES.setdefault(key, alike)
        made = None
        for template in templates().get(kernel, ()):
            try:
                made = instantiate(template, kernel, params, inputs, outputs)
                break
            except Mismatch:
                continue
        _INSTANCES[key] = made
    return _INSTANCES[key]


def _reasons(
    kernel: str, params: Mapping[str, Any], inputs: tuple[TensorType, ...]
) -> tuple[str, ...]:
    """Why none of a kernel's templates stands for an operation, one line for each."""
    out = []
    for template in templates().get(kernel, ()):
        try:
            instantiate(template, kernel, params, inputs, None)
        except Mismatch as e:
            out.append(f"{template.origin}: {e}")
    return tuple(out) or (f"There is no template for {kernel!r}.",)


# Primitives that have no template on purpose: the reason for each, and what is known of it.


@dataclass(frozen=True, slots=True)
class Opaque:
    """What `opaque.yaml` says of a primitive; its first lines say what the fields mean."""

    reason: str
    calls: bool = False
    once: bool = False
    draws: bool = False
    planned: bool = True
    elements: Elements = "computed"

    @property
    def runs_once(self) -> bool:
        """Whether one device runs it for all."""
        return self.calls or self.once


#: What is known of a primitive that the file does not name.
_UNKNOWN = Opaque("")


@cache
def opaque_primitives() -> Mapping[str, Opaque]:
    """What is known of each primitive that has no template on purpose, by name."""
    text = Path(__file__).with_name("opaque.yaml").read_text("utf-8")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    facts = [(e.pop("primitives"), Opaque(**e)) for e in yaml.load(text, loader)]
    return {name: each for names, each in facts for name in names}


def facts_of(kernel: str) -> Opaque:
    """What is known of a kernel without a template."""
    return opaque_primitives().get(kernel, _UNKNOWN)
