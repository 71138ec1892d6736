"""The command `kernels`: templates as they are written, and what they say of given operands."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tapestry_egg.errors import TapestryError, TemplateError

from .console import Json, print_json

if TYPE_CHECKING:
    from tapestry_egg.graph.blockgraph import TensorType
    from tapestry_egg.metakernels.language.template import Template

_SHAPE_HELP = (
    "An operand, in order or by name: 8,16 or int32[8,16] or x=8,16; once for each. Prints the "
    "index space, the projections ( A | B | S ) and the legal splits."
)


def kernels(
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="One kernel, in full.")] = "",
    shape: Annotated[
        list[str] | None, typer.Option("--shape", metavar="[NAME=]TYPE", help=_SHAPE_HELP)
    ] = None,
    param: Annotated[
        list[str] | None,
        typer.Option(
            "--param",
            metavar="NAME=VALUE",
            help="A parameter, as JSON or a word: axis=1; may be repeated.",
        ),
    ] = None,
    parts: Annotated[
        list[int] | None,
        typer.Option(
            "--parts",
            metavar="N",
            min=2,
            max=1 << 20,
            help="Cut every index dim into so many parts; may be repeated. Default: 2.",
        ),
    ] = None,
    file: Annotated[
        list[str] | None,
        typer.Option("--templates", metavar="FILE", help="A template file of yours."),
    ] = None,
    as_json: Json = False,
) -> None:
    """List the kernels with a template, or show one."""
    from tapestry_egg.columns import columns
    from tapestry_egg.metakernels.registry import add_templates, templates

    for path in file or ():
        add_templates(path)
    known = templates()
    if name and name not in known:
        raise TemplateError(
            f"no template for kernel {name!r}",
            hint="It runs all the same, uncut. `tapestry-egg kernels` lists those with a template.",
        )
    if shape or param or parts:
        if not name:
            raise TapestryError("--shape, --param and --parts are of one kernel: name it")
        _show_operation(name, shape or (), param or (), parts or (2,), as_json)
        return
    entries: list[dict[str, Any]] = [
        {
            "kernel": kernel,
            "file": template.path.name,
            "line": template.origin.line,
            "fusion": template.fusion,
            "reason": " ".join(template.reason.split()),
            "text": _entry_text(template.path, template.origin.line),
        }
        for kernel in ([name] if name else sorted(known))
        for template in known[kernel]
    ]
    if as_json:
        print_json(entries)
    elif name:
        for entry in entries:
            print(f"# {entry['file']}:{entry['line']}\n{entry['text']}")
    else:
        rows = [["kernel", "fusion", "template", "reason"]]
        rows += [
            [e["kernel"], e["fusion"], f"{e['file']}:{e['line']}", e["reason"]] for e in entries
        ]
        print(columns([[str(cell) for cell in row] for row in rows]))


def _entry_text(path: Path, line: int) -> str:
    """The entry of a template file that starts at `line`: up to the next one as far left."""
    lines = path.read_text(encoding="utf-8").splitlines()[line - 1 :]
    if not lines:
        return ""
    left = len(lines[0]) - len(lines[0].lstrip())
    end = next(
        (i for i, t in enumerate(lines[1:], 1) if t.strip() and len(t) - len(t.lstrip()) <= left),
        len(lines),
    )
    return "\n".join(t[left:] for t in lines[:end]).rstrip()


def _show_operation(
    kernel: str, shapes: Sequence[str], params: Sequence[str], parts: Sequence[int], as_json: bool
) -> None:
    """What the template that fits says of the operands and parameters given."""
    from tapestry_egg.metakernels.registry import entry, signature, templates
    from tapestry_egg.show.signature import port_names, signature_data, signature_text

    values = dict(map(_parameter, params))
    inputs = _in_order([_operand(text) for text in shapes], templates()[kernel])
    found = signature(kernel, values, inputs)
    template = entry(kernel, values, inputs)
    assert template is not None  # or there would be no signature without output types
    names = port_names(template, len(found.inputs), len(found.outputs))
    if as_json:
        print_json({"template": str(template.origin), **signature_data(found, names, tuple(parts))})
    else:
        print(f"# {template.origin}")
        print(signature_text(found, names, tuple(parts)))


def _operand(text: str) -> tuple[str, TensorType]:
    """`x=8,16` as a name, which may be empty, and a type; the dtype is float32 unless given."""
    from tapestry_egg.tracing.graph_documents import type_of_text

    name, equals, written = text.rpartition("=")
    if equals and not name.isidentifier():
        raise TapestryError(f"{name!r} is not the name of an operand", where=f"--shape {text}")
    full = written.strip().replace(" ", "")
    if re.fullmatch(r"([0-9]+([,x][0-9]+)*)?", full):
        full = f"float32[{full.replace('x', ',')}]"
    try:
        return name, type_of_text(full, f"--shape {text}")
    except TapestryError as e:
        raise TapestryError(e.what, where=e.where, hint="Write 8,16 or int32[8,16].") from None


def _parameter(text: str) -> tuple[str, Any]:
    """`axis=1` as a name and a value: JSON where it can be read as such, else the text itself."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise TapestryError(f"{text!r} is not NAME=VALUE", where="--param", hint="axis=1")
    try:
        return name, json.loads(value)
    except (ValueError, RecursionError):
        return name, value


def _in_order(
    given: Sequence[tuple[str, TensorType]], entries: Sequence[Template]
) -> tuple[TensorType, ...]:
    """Operands given by name in the order in which a template declares them."""
    names = [name for name, _ in given]
    if not any(names):
        return tuple(tensor for _, tensor in given)
    for template in entries:
        declared = [operand.name for operand in template.inputs]
        if set(names) <= set(declared):
            return tuple(t for own in declared for name, t in given if name == own)
    declared = [operand.name for operand in entries[0].inputs]
    raise TapestryError(
        "operands are given all in order, or all by name",
        where=f"--shape {', '.join(filter(None, names))}",
        hint=f"The template's operands are {', '.join(declared)}.",
    )
