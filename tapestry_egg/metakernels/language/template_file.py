"""Template files: YAML to templates, checked for their form, with the place of every text.

A file maps kernels to entries, as in `matmul` here, or is a list of entries that name theirs:

    matmul:
      index: "[$batch..., $row, $col]"        the index space: one name per dim, or see below
      constraints: {dtype: {enum: [float32]}} the values that a name may have
      inputs:                                 operands in order
        X:
          shape: "[$batch..., $row, $inner]"  a shape pattern; `X: "[...]"` when there is no more
          dtype: $dtype                       binds the name, or says what the dtype must be
          ipf: "[..., 1, 0] :> [..., 1, $inner]"
        W: ..
      reduce: {inner: sum}                    the dim that patterns call $inner is reduced
      outputs:
        result:                               shape "[$.index...]" and ipf "[...] :> [...]" unless
          dtype: $dtype                       given

    - kernels: [dot_general]
      reason: why the entry is as it is
      params: {preferred_element_type: none}  parameters and their defaults; no default: required
      inputs: {lhs: "[$m, $k]", rhs: , "bias?": }
      when: len($m) > 0                       a guard; without it the patterns alone decide
      let: {name: expression}                 names, evaluated when they are first used
      out: {shape: "[$m, $n]", dtype: $lhs.dtype}   the output (or `outputs:`, a mapping of such)
      index: {m: $m, n: $n, k: $k}            index groups: an extent, or a list of extents
      roles: {k: reduce(sum)}                 map (the default), whole, reduce(·), scan(·),
      project: {lhs: "[@m, @k]"}              rows per operand and output; `ipf:` in one place
      passages: [sum(lhs) -> sum]             laws of partial values
      initial: [operand]                      operands that start the reduction
      straight: [operand]                     operands that lie as their dims are written
      moves: [operand]                        operands of which elements go to other places
      takes: [operand]                        operands of which it takes a part by itself: see below
      repeats: [operand]                      operands of which each element stands in many places
      stored: [operand]                       operands that are in memory before it runs
      writes: {into: x, part: y, at: starts}  what it writes into what, and where: see below
      parts: false                            whether the results are parts of it, in order
      dilates: false                          whether it puts something between elements
      adds: false                             whether elements of the result are sums
      joins: [operand]                        operands that add nothing if they have no elements
      carries: {operand: true}                operands that go with results, unread: see below
      settled: 0 if $x.number == 0 else none  what number the result is: see below
      same_as: x if $y.size == 0 else none    which operand the result is, unchanged
      outside: {operand: sum}                 what its boxes find outside it: see below
      placed: {i: true}                       groups along which a block must know where it lies
      skips: {operand: "[1]"}                 dims in whose boxes it skips by strides of its own
      flops: 2                                per index point, or a polynomial in `@groups`
      reads: {operand: "@m"}                  elements read, where not the footprint
      measured: "[$causal, $width]"           where its rates are in tables of measured kernels
      spilled: 0.5                            bytes through memory per flop where they are not
      steps: 8 * $n                           what waits for one another: see below
      scattered: {of: x, elements: "@m", ..}  what lies at places that are data: see below
      precision: $precision                   of a product: see below
      loses: {precision: 0 if $p == HIGHEST else 16}   what results may lose: see below
      promises: {sorted: $indices_are_sorted} what it takes for granted of data: see below
      samples: {axis: range($x.rank)}         what it may be tried with: see below
      scratch: {blocks: 2, scores: "@all"}    bytes in memory beside, where not: see below
      blocks: {products: .., moved: ..}       kernels of a block of its scores: see below
      fusion: kernel                          view | loop | reduce | kernel
      in_products: never                      always | not_in_bfloat16 | again | never: see below
      elements: computed                      kept | selected | computed: see below
      commutes: false                         whether the two operands may change places
      means: sum                              what it is to those that read programs: see below
      local: {shape: $out.shape}              parameters that differ when run on local boxes

Every field may be used in either. A name that ends in `...` (`xs...`) stands for any number of
operands or outputs, one that ends in `?` for an operand that may be missing; expressions about
`xs...` are evaluated once for each, with `$each` the tensor and `$k` its place among them. Without
`index:` the index space is that of the first output's elements, as group `@i`; an operand or output
without a projection is then aligned with it under broadcasting. The boxes of an operand lie inside
it, unless `outside:` says what they find elsewhere: the zero of a monoid (`sum`, `max`, `min`, ..),
the element of a scalar operand (its name), or the other end of the operand (`around`). In `local:`
the names of operands and outputs stand for the local boxes and everything else keeps its value.
Parameters are names too; `$params` holds them all, also where another name hides one, and `$kernel`
is the kernel's name.
`scratch:` has four parts: how many `blocks` of scores are in memory at a time (and how many, where
that is fewer, if products compute what is made of them: `fused`), and as polynomials
in `@groups` the bytes of all `scores`, of one `row` of them, and of what is there `beside`; a
kernel that has no scores only says `beside`, and as `fused` what that is where products compute
what is made of them. In the place of `row` stands `along`, the product of those index dims of which
the longest is cut into blocks.
`blocks:` says what kernels a block of such scores is where products are stored: `products`, lists
`[batch, m, n, k]` of index dims, and `kernels`, which move bytes `moved` in all, `again` for each.
`steps:` are so many that wait for one another, as columns of a decomposition do, in steps of a
Cholesky decomposition, for which targets have a time; a polynomial, or their number in all.
`scattered:` says what the kernel reads, or adds to, at places that are data: bytes of so many
`elements`, counted with those of the operand `of`, lie together in runs of `run` elements, each of
them anywhere among `within`; they are touched `times` times (2: read and written), `unit` at a time
by its threads (the whole run, if it is left out).
`precision:` is the parameter of that name of a product: high and highest count, and presets of
algorithms that are as much.
`loses:` says, by a name for each way, how many bits results may lose besides rounding to their
dtype, as its parameters let them; 0 for none. No rule that keeps its numbers may lose more.
`promises:` says of parameters whether they vouch for the operands: where operands break a promise
that is made, the result may be anything, so that no rule may make a promise its pattern does not.
`samples:` are values for parameters, and dtypes for operands, as lists, of operations that rules
are tried on; `when` in it leaves some out. They are evaluated in their order, operands that are not
in it first.
`in_products:` says whether XLA for GPUs computes the kernel inside the product of matrices that
reads its result; `not_in_bfloat16` where results in bfloat16 are computed in float32 and rounded,
`again` where it does so in every such product, and may store the result for others all the same.
`elements:` says what each element of the results is: one of the operands' that is `kept` (moved,
repeated, chosen by something else), one that is `selected` because it stands out among all (a
greatest, what is sorted), or `computed`; views keep theirs.
`means:` is what rewriting looks for: one of a closed list of words (`Meaning` in
`metakernels/signatures/signature.py`).
`moves:` are operands of which elements go to other places, or some are left out: each as it is,
and to one place. Of those in `takes:` the kernel takes a part itself, where a dim is not cut.
`writes:` says that an operand, `part`, is written as it is into another, `into`, and nothing else
is done to that: where scalars say (`at`, one per dim), moved to where all of it fits.
`carries:` flags operands that are carried along, each to the result of its place, by kernels of as
many results as operands: what nobody reads of these is left out, and so are operands of `joins:`
without elements: both are of a list, `xs...`, or one that may be missing. `settled:` is the number
that every element of the result is, where constants decide; `$x.number` is what all elements of an
operand are, or `none`, and operands of one `$x.id` are one value. `same_as:` is the operand whose
elements the result has in the same places, `x` or, of `xs...`, `[xs, 0]`; or `none`.
`$.index` is the shape of the index space without the dims of `reduce:`, and `$.shape`, in a
projection, that of the tensor. The language of the texts is described in docs/template-language.md.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast, get_args

import yaml

from tapestry_egg.errors import TemplateError
from tapestry_egg.metakernels.signatures.signature import Fusion, InProducts, Meaning
from tapestry_egg.yaml_nodes import compose_yaml

from .expressions import Expression, Origin, PassageText
from .patterns import Pattern
from .template import (
    Constraint,
    Insertion,
    ListText,
    Matrix,
    Operand,
    Output,
    Parts,
    ProjectionForm,
    Reduction,
    RowsText,
    ShapeForm,
    ShapeInsertion,
    Template,
)


def read_templates(path: Path) -> tuple[Template, ...]:
    """The entries of a template file. The texts in them are parsed only when they are first used.

    Raises TemplateError with `file:line:column` for a malformed file.
    """
    root = compose_yaml(path, TemplateError)
    if root is None:
        return ()
    file = TemplateNodes(path)
    if file.is_mapping(root):
        keyed = file.keyed(root, "kernels").items()
        return tuple(_template(file, node, file.origin(key), name) for name, (key, node) in keyed)
    entries = file.sequence(root, "a list of entries, or kernels")
    return tuple(_template(file, node, file.origin(node)) for node in entries)


_FIELDS = (
    "kernels reason params constraints inputs when let out outputs index roles reduce project "
    "passages initial straight moves takes repeats stored writes parts dilates adds joins carries "
    "settled same_as outside placed skips flops reads measured spilled steps scattered precision "
    "loses promises samples scratch blocks fusion in_products elements commutes "
    "means local"
).split()


def _template(file: TemplateNodes, node: Any, origin: Origin, name: str = "") -> Template:
    entry = file.mapping(node, "an entry", _FIELDS)
    for field in ("inputs",) if name else ("kernels", "inputs"):
        if field not in entry:
            raise file.error(node, f"the entry has no {field!r}")
    if ("out" in entry) == ("outputs" in entry):
        raise file.error(node, "the entry needs either `out` or `outputs`")

    def word(field: str, known: Sequence[str], default: str) -> str:
        if field not in entry:
            return default
        found = file.text(entry[field], "a word")
        if found not in known:
            hint = f"One of {', '.join(known)}."
            raise file.error(entry[field], f"unknown {field} {found!r}", hint)
        return found

    def table(field: str) -> dict[str, Expression]:
        return file.expressions(entry[field], f"`{field}`") if field in entry else {}

    def one(field: str) -> Expression | None:
        return file.expression(entry[field]) if field in entry else None

    params = file.mapping(entry["params"], "`params`") if "params" in entry else {}
    index = _index(file, entry["index"]) if "index" in entry else None
    project: dict[str, ProjectionForm] = {}
    if "project" in entry:
        for port, value in file.mapping(entry["project"], "`project`").items():
            project[port] = _projection(file, value, positional=False)
    inputs = _operands(file, entry["inputs"], project)
    results = {"out": entry["out"]} if "out" in entry else file.mapping(entry["outputs"], "outputs")
    outputs = tuple(_output(file, n, v, project, index is not None) for n, v in results.items())
    template = Template(
        kernels=file.words(entry["kernels"], "kernel names") if "kernels" in entry else (name,),
        origin=origin,
        path=file.path,
        reason=file.text(entry["reason"], "a text") if "reason" in entry else "",
        defaults={k: file.expression(v) for k, v in params.items() if not file.is_null(v)},
        required=tuple(k for k, v in params.items() if file.is_null(v)),
        constraints=_constraints(file, entry["constraints"]) if "constraints" in entry else (),
        inputs=inputs,
        outputs=outputs,
        when=one("when"),
        let=table("let"),
        index=index,
        roles=table("roles"),
        reduce=_reductions(file, entry["reduce"]) if "reduce" in entry else {},
        project=project,
        passages=_passages(file, entry["passages"]) if "passages" in entry else (),
        initial=file.words(entry["initial"], "operands") if "initial" in entry else (),
        straight=file.words(entry["straight"], "operands") if "straight" in entry else (),
        moves=file.words(entry["moves"], "operands") if "moves" in entry else (),
        takes=file.words(entry["takes"], "operands") if "takes" in entry else (),
        repeats=file.words(entry["repeats"], "operands") if "repeats" in entry else (),
        stored=file.words(entry["stored"], "operands") if "stored" in entry else (),
        writes=_writes(file, entry["writes"]) if "writes" in entry else {},
        parts=one("parts"),
        dilates=one("dilates"),
        adds=one("adds"),
        joins=file.words(entry["joins"], "operands") if "joins" in entry else (),
        carries=table("carries"),
        settled=one("settled"),
        same_as=one("same_as"),
        outside=table("outside"),
        placed=table("placed"),
        skips=table("skips"),
        flops=one("flops"),
        reads=table("reads"),
        measured=one("measured"),
        spilled=one("spilled"),
        steps=one("steps"),
        scattered=_scattered(file, entry["scattered"]) if "scattered" in entry else {},
        precision=one("precision"),
        loses=table("loses"),
        promises=table("promises"),
        samples=table("samples"),
        scratch=_scratch(file, entry["scratch"]) if "scratch" in entry else {},
        blocks=_blocks(file, entry) if "blocks" in entry else {},
        fusion=cast(Fusion, word("fusion", get_args(Fusion), "kernel")),
        in_products=cast(InProducts, word("in_products", get_args(InProducts), "never")),
        elements=one("elements"),
        commutes=word("commutes", ("true", "false"), "false") == "true",
        means=cast(Meaning, word("means", get_args(Meaning)[1:], "")),
        local=table("local"),
    )
    _check_names(file, entry, template)
    return template


def _scratch(file: TemplateNodes, node: Any) -> dict[str, Expression]:
    found = file.expressions(node, "`scratch`")
    by_row, along = {"blocks", "scores", "row", "beside"}, {"blocks", "scores", "along", "beside"}
    if set(found) - {"fused"} not in (by_row, along, {"beside"}):
        raise file.error(node, "`scratch`: beside, or blocks, scores, row or along too, or fused")
    return found


def _blocks(file: TemplateNodes, entry: Mapping[str, Any]) -> dict[str, Expression]:
    found = file.expressions(entry["blocks"], "`blocks`")
    if set(found) != {"products", "moved", "again", "kernels"}:
        raise file.error(entry["blocks"], "`blocks` has the parts products, moved, again, kernels")
    if "scratch" not in entry or "along" not in file.expressions(entry["scratch"], "`scratch`"):
        raise file.error(entry["blocks"], "`blocks` need a `scratch` with scores `along` some dims")
    return found


def _scattered(file: TemplateNodes, node: Any) -> dict[str, Expression]:
    found, parts = file.expressions(node, "`scattered`"), "of elements run within times"
    if set(found) - {"unit"} != set(parts.split()):
        raise file.error(node, f"`scattered` has the parts {parts}, and perhaps unit")
    return found


def _writes(file: TemplateNodes, node: Any) -> dict[str, str]:
    parts = ("into", "part", "at")
    given = file.mapping(node, "`writes`", parts)
    if tuple(given) != parts:
        raise file.error(node, "`writes` has the parts into, part and at, in this order")
    return {name: file.text(value, "an operand") for name, value in given.items()}


def _operands(
    file: TemplateNodes, node: Any, project: dict[str, ProjectionForm]
) -> tuple[Operand, ...]:
    out: list[Operand] = []
    for written, value in file.mapping(node, "`inputs`").items():
        name = written.removesuffix("...").removesuffix("?")
        many, optional = written.endswith("..."), written.endswith("?")
        if (many or optional) and any(o.many or o.optional for o in out):
            raise file.error(value, "only one operand can stand for several, or be missing")
        pattern: Any = None if file.is_null(value) else value
        dtype = None
        if file.is_mapping(value):
            given = file.mapping(value, "an operand", ("shape", "dtype", "ipf"))
            pattern = given.get("shape")
            dtype = file.expression(given["dtype"]) if "dtype" in given else None
            if "ipf" in given:
                _put(file, project, name, given["ipf"])
        shape = None
        if pattern is not None:
            shape = Pattern(file.text(pattern, "a pattern"), file.origin(pattern))
        out.append(Operand(name, many, optional, shape, dtype))
    return tuple(out)


def _output(
    file: TemplateNodes,
    written: str,
    node: Any,
    project: dict[str, ProjectionForm],
    indexed: bool,
) -> Output:
    given = file.mapping(node, "an output", ("shape", "dtype", "ipf", "count"))
    name = written.removesuffix("...")
    if "dtype" not in given or ("shape" not in given and not indexed):
        hint = "Without `index:` the index space follows from the shape of the first output."
        raise file.error(node, "an output has a `dtype` and, without `index:`, a `shape`", hint)
    if written.endswith("...") != ("count" in given):
        raise file.error(node, "an output has a `count` just when its name ends in `...`")
    if "ipf" in given:
        _put(file, project, name, given["ipf"])
    elif indexed and name not in project:
        project[name] = RowsText(Expression("[...] :> [...]", file.origin(node)))
    shape: ShapeForm = Expression("[$.index...]", file.origin(node))
    if "shape" in given:
        shape = _shape(file, given["shape"])
    count = file.expression(given["count"]) if "count" in given else None
    return Output(name, count, shape, file.expression(given["dtype"]))


def _put(file: TemplateNodes, project: dict[str, ProjectionForm], name: str, node: Any) -> None:
    if name in project:
        raise file.error(node, f"{name!r} has an `ipf`, and is in `project` too")
    project[name] = _projection(file, node, positional=True)


def _projection(
    file: TemplateNodes, node: Any, *, positional: bool, inside: bool = False
) -> ProjectionForm:
    if not file.is_mapping(node):
        return RowsText(file.expression(node), positional)
    given = file.mapping(node, "a projection")
    if "transform" in given and not inside:
        return _insertion(file, node, given)
    if "affineMap" in given:
        fields = file.mapping(node, "a projection", ("affineMap", "shape"))
        affine = file.mapping(fields["affineMap"], "`affineMap`", ("projection", "offset"))
        for name, table in (("shape", fields), ("projection", affine), ("offset", affine)):
            if name not in table:
                raise file.error(node, f"the projection has no {name!r}")
        rows = file.sequence(affine["projection"], "a list of rows")
        return Matrix(
            tuple(map(file.list_text, rows)),
            file.list_text(affine["offset"]),
            file.list_text(fields["shape"]),
        )
    fields = file.mapping(node, "a projection", ("map", "offset", "shape"))
    if "map" not in fields:
        hint = "Or `transform`, or `affineMap` and `shape`."
        raise file.error(node, "the projection has no 'map'", hint)
    parts = {name: file.expression(value) for name, value in fields.items()}
    return Parts(parts["map"], parts.get("offset"), parts.get("shape"))


def _insertion(file: TemplateNodes, node: Any, given: Mapping[str, Any]) -> Insertion:
    what = file.text(given["transform"], "a transform")
    patch = {"insert": "patch", "insertRow": "row"}.get(what)
    if patch is None:
        known = ("insert", "insertRow")
        raise file.error(given["transform"], f"unknown transform {what!r}", suggestion(what, known))
    fields = ("transform", "index", "source", patch)
    for name in fields:
        if name not in given:
            raise file.error(node, f"the transform has no {name!r}")
    file.mapping(node, "a transform", fields)
    source = _projection(file, given["source"], positional=True, inside=True)
    index, change = file.expression(given["index"]), file.expression(given[patch])
    return Insertion(index, source, change, single=what == "insertRow")


def _shape(file: TemplateNodes, node: Any) -> ShapeForm:
    if not file.is_mapping(node):
        return file.expression(node)
    fields = ("transform", "index", "source", "patch")
    given = file.mapping(node, "a shape", fields)
    for name in fields:
        if name not in given:
            raise file.error(node, f"the transform has no {name!r}")
    if (what := file.text(given["transform"], "a transform")) != "insert":
        raise file.error(given["transform"], f"{what!r} does not make a shape; write `insert`")
    return ShapeInsertion(*(file.expression(given[name]) for name in fields[1:]))


_PLAIN = re.compile(r"\$[A-Za-z_][A-Za-z0-9_]*(\.\.\.)?")


def _index(file: TemplateNodes, node: Any) -> dict[str, Expression]:
    """Groups of index dims: as given, one per entry of a list of names, or all as group `i`."""
    if file.is_mapping(node):
        return file.expressions(node, "`index`")
    whole = file.expression(node)
    text = whole.text.strip()
    groups: dict[str, Expression] = {}
    at = whole.text.find("[") + 1
    for part in text[1:-1].split(",") if text[:1] + text[-1:] == "[]" else ():
        name = part.strip()
        origin = whole.origin
        if _PLAIN.fullmatch(name) and not origin.folded and "\n" not in text:
            lead = at + len(part) - len(part.lstrip())
            origin = Origin(origin.file, origin.line, origin.column + lead)
            variable = name.removesuffix("...")
            if variable[1:] not in groups:
                groups[variable[1:]] = Expression(variable, origin)
                at += len(part) + 1
                continue
        return {"i": whole}
    return groups or {"i": whole}


def _reductions(file: TemplateNodes, node: Any) -> dict[str, Reduction]:
    out: dict[str, Reduction] = {}
    for name, value in file.mapping(node, "`reduce`").items():
        if not file.is_mapping(value):
            out[name] = Reduction(file.expression(value))
            continue
        given = file.mapping(value, "a reduction", ("monoid", "over"))
        if "monoid" not in given:
            raise file.error(value, "the reduction has no 'monoid'")
        over = file.expressions(given["over"], "`over`") if "over" in given else None
        out[name] = Reduction(file.expression(given["monoid"]), over)
    return out


def _constraints(file: TemplateNodes, node: Any) -> tuple[Constraint, ...]:
    out = []
    for name, value in file.mapping(node, "`constraints`").items():
        given = file.mapping(value, f"the constraint of {name!r}", ("enum",))
        if "enum" not in given:
            raise file.error(value, "the constraint has no 'enum'")
        allowed = file.words(given["enum"], "values")
        out.append(Constraint(f"${name.removeprefix('$')}", allowed, file.origin(value)))
    return tuple(out)


def _passages(file: TemplateNodes, node: Any) -> tuple[PassageText, ...]:
    return tuple(
        PassageText(file.text(n, "a passage"), file.origin(n))
        for n in file.sequence(node, "a list of passages")
    )


def _check_names(file: TemplateNodes, entry: Mapping[str, Any], template: Template) -> None:
    operands = [o.name for o in template.inputs]
    ports = operands + [o.name for o in template.outputs]
    groups = ["i"] if template.index is None else list(template.index)
    known: Sequence[tuple[str, Any, Sequence[str]]] = (
        ("project", template.project, ports),
        ("reads", template.reads, operands),
        ("outside", template.outside, operands),
        ("roles", template.roles, groups),
        ("placed", template.placed, groups),
        ("skips", template.skips, operands),
        ("initial", template.initial, operands),
        ("straight", template.straight, operands),
        ("moves", template.moves, operands),
        ("takes", template.takes, operands),
        ("repeats", template.repeats, operands),
        ("stored", template.stored, operands),
        ("writes", template.writes.values(), operands),
        ("joins", template.joins, operands),
        ("carries", template.carries, operands),
    )
    for field, table, names in known:
        for key in table:
            if key not in names:
                what = f"{key!r} in `{field}` is not declared"
                raise file.error(entry[field], what, suggestion(key, names))
    fixed = [o.name for o in template.inputs if not (o.many or o.optional)]
    for field, table in (("joins", template.joins), ("carries", template.carries)):
        for key in fixed:
            if key in table:
                hint = f"Where operands may be fewer, they are a list: `{key}...`."
                what = f"{key!r} in `{field}` is one operand, which is never left out"
                raise file.error(entry[field], what, hint)
    if template.commutes and (len(operands) != 2 or template.inputs[0].many):
        raise file.error(entry["commutes"], "only a kernel of two operands commutes")
    if len(set(ports)) < len(ports):
        raise file.error(entry["inputs"], "two operands or outputs have the same name")
    if template.index is not None:
        for port in ports:
            if port not in template.project:
                hint = "Give it an `ipf:`, or a place in `project:`."
                raise file.error(entry["index"], f"nothing is said of how {port!r} is read", hint)
    _check_reductions(file, entry, template, groups)


def _check_reductions(
    file: TemplateNodes, entry: Mapping[str, Any], template: Template, groups: Sequence[str]
) -> None:
    operands = [o.name for o in template.inputs]
    bound = [n for o in template.inputs if o.pattern and template.reduce for n in o.pattern.names()]
    for name, reduction in template.reduce.items():
        if name in groups:
            raise file.error(entry["reduce"], f"{name!r} is an index group already")
        for operand in reduction.over or ():
            if operand not in operands:
                what = f"{operand!r} in `over` is no operand"
                raise file.error(entry["reduce"], what, suggestion(operand, operands))
        if reduction.over is None and f"${name}" not in bound:
            hint = suggestion(f"${name}", list(dict.fromkeys(bound)))
            what = f"no input has a dim ${name} to reduce"
            raise reduction.monoid.error(what, f"{hint} Or say `over: {{operand: dim}}`.")


# YAML nodes of template files as texts that know where they stand.


class TemplateNodes:
    """Reads nodes of one file; every error names the file, the line and the column."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name

    def origin(self, node: Any) -> Origin:
        """Where a node's text starts."""
        start, end = node.start_mark, node.end_mark
        style = getattr(node, "style", None)
        if style == "|":
            # The indentation of block scalars is not in the node; two spaces is ours.
            return Origin(self.name, start.line + 2, 1)
        quoted = int(style in ('"', "'"))
        folded = start.line != end.line and end.column > 0
        return Origin(self.name, start.line + 1, start.column + 1 + quoted, folded)

    def error(self, node: Any, what: str, hint: str = "") -> TemplateError:
        """An error at a node."""
        return TemplateError(what, where=str(self.origin(node)), hint=hint)

    def is_mapping(self, node: Any) -> bool:
        return isinstance(node, yaml.MappingNode)

    def is_list(self, node: Any) -> bool:
        return isinstance(node, yaml.SequenceNode)

    def is_null(self, node: Any) -> bool:
        """Whether nothing is written there."""
        return bool(getattr(node, "tag", "") == "tag:yaml.org,2002:null")

    def sequence(self, node: Any, what: str) -> list[Any]:
        """The nodes of a list."""
        if not isinstance(node, yaml.SequenceNode):
            raise self.error(node, f"expected {what}")
        return list(node.value)

    def keyed(self, node: Any, what: str) -> dict[str, tuple[Any, Any]]:
        """The key and value nodes of a mapping, by name."""
        if not isinstance(node, yaml.MappingNode):
            raise self.error(node, f"expected {what}, a mapping")
        out: dict[str, tuple[Any, Any]] = {}
        for key, value in node.value:
            name = self.text(key, "a name")
            if name in out:
                raise self.error(key, f"{name!r} is given twice")
            out[name] = (key, value)
        return out

    def mapping(self, node: Any, what: str, fields: Sequence[str] = ()) -> dict[str, Any]:
        """The values of a mapping by name; where `fields` are given, it can have no others."""
        keyed = self.keyed(node, what)
        for name, (key, _) in keyed.items():
            if fields and name not in fields:
                raise self.error(key, f"unknown field {name!r}", suggestion(name, fields))
        return {name: value for name, (_, value) in keyed.items()}

    def text(self, node: Any, what: str) -> str:
        """A scalar as it is written."""
        if not isinstance(node, yaml.ScalarNode):
            raise self.error(node, f"expected {what}", "Quote a text that starts with `[` or `{`.")
        return str(node.value)

    def expression(self, node: Any) -> Expression:
        return Expression(self.text(node, "an expression"), self.origin(node))

    def expressions(self, node: Any, what: str) -> dict[str, Expression]:
        return {k: self.expression(v) for k, v in self.mapping(node, what).items()}

    def words(self, node: Any, what: str) -> tuple[str, ...]:
        return tuple(self.text(n, "a name") for n in self.sequence(node, f"a list of {what}"))

    def list_text(self, node: Any) -> ListText:
        """A list of expressions, or one expression that gives it."""
        if not self.is_list(node):
            whole = self.expression(node)
            return ListText((whole,), whole, whole=True)
        entries = tuple(self.expression(n) for n in node.value)
        return ListText(entries, Expression("", self.origin(node)))


def suggestion(name: str, known: Sequence[str]) -> str:
    """The hint for a name that is not among those known."""
    near = difflib.get_close_matches(name, known, 1)
    if near:
        return f"Did you mean {near[0]!r}?"
    return f"There are {', '.join(known)}." if known else "There are none."
