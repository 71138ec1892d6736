"""Kernels applied to symbolic tensors: what comes out is what their templates say of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tapestry_egg.errors import GraphError, TemplateError
from tapestry_egg.graph.sources import caller
from tapestry_egg.metakernels import registry
from tapestry_egg.metakernels.language.template import Template
from tapestry_egg.reference.kernels import add_reference
from tapestry_egg.tracing.codec import register_primitive
from tapestry_egg.tracing.plain import check_params

from .tensors import Application, Tensor, constant


@dataclass(frozen=True, eq=False)
class Kernel:
    """A kernel by name, to be applied to symbolic tensors: `linear(x, A, b)`, `linear(x=x, A=A)`,
    `sum(x, axis=1)`. Operands go by position or by the names that the template gives them, a list
    for one of many (`tensors...`); parameters by name. The call gives a tensor, or a tuple of them.
    """

    name: str

    def __repr__(self) -> str:
        return f"Kernel({self.name})"

    def __call__(self, *operands: Any, **named: Any) -> Any:
        """Apply it. Raises TemplateError, which says why each template of the kernel does not fit,
        and GraphError for what is no tensor or no parameter."""
        entries = registry.templates()[self.name]
        template = _meant(entries, named)
        given, params = _sorted(self.name, template, operands, named)
        check_params(params, f"kernel {self.name}")
        types = registry.output_types(self.name, params, [t.type for t in given])
        made = Application(self.name, tuple(given), params, types, caller())
        found = tuple(Tensor(type_, made_by=made, output=q) for q, type_ in enumerate(types))
        single = len(template.outputs) == 1 and template.outputs[0].count is None
        return found[0] if single else found


def kernel(
    name: str,
    templates: str | Path | None = None,
    *,
    run: Callable[..., Any] | None = None,
    reference: Callable[..., Any] | None = None,
) -> Kernel:
    """The kernel of that name: one that ships (`tapestry-egg kernels` lists them), or the entry of
    a template file of your own.

    `run` is what runs it, a function of JAX arrays, the operands in order, and the parameters by
    name; it is given the part of each that its device has. `reference` is the same in NumPy, which
    plans and rules are held against. Without `run` programs of the kernel are planned, drawn and
    saved, but do not run. Raises TemplateError where there is no such entry, and GraphError for a
    `run` of a kernel that is JAX's own.
    """
    if templates is not None:
        registry.add_templates(templates, only=name)
    if name not in registry.templates():
        raise TemplateError(
            f"no template for kernel {name!r}",
            hint="Give the file that has it: te.kernel(name, templates=FILE.yaml).",
        )
    if run is not None:
        register_primitive(_Run(name, run), replacing=_Run)
    if reference is not None:
        function = reference
        add_reference(name, lambda call: function(*call.operands, **call.params))
    return Kernel(name)


class _Run:
    """What runs a kernel, where a primitive of JAX's stands for one of JAX's."""

    multiple_results = True

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name, self.function = name, function

    def get_bind_params(self, params: dict[str, Any]) -> dict[str, Any]:
        return params

    def bind(self, *operands: Any, **params: Any) -> Sequence[Any]:
        out = self.function(*operands, **params)
        return out if isinstance(out, tuple | list) else (out,)


def _meant(entries: Sequence[Template], named: Mapping[str, Any]) -> Template:
    """The entry whose operands are those that are given by name."""
    tensors = {k for k, v in named.items() if _is_tensor(v)}
    for template in entries:
        if tensors <= {o.name for o in template.inputs}:
            return template
    declared = ", ".join(o.name for o in entries[0].inputs)
    raise TemplateError(
        f"no operand of {entries[0].kernels[0]} is called {min(tensors)}",
        where=str(entries[0].origin),
        hint=f"Its operands are {declared}.",
    )


def _is_tensor(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return bool(value) and all(map(_is_tensor, value))
    return isinstance(value, Tensor | np.ndarray)


def _sorted(
    name: str, template: Template, operands: Sequence[Any], named: Mapping[str, Any]
) -> tuple[list[Tensor], dict[str, Any]]:
    """The tensors in the order of the template, and the parameters."""
    slots = [o.name for o in template.inputs]
    params = {k: _plain(v) for k, v in named.items() if k not in slots}
    own = dict(zip(slots, operands, strict=False))
    if len(operands) > len(slots):
        if len(slots) != 1 or not template.inputs[0].many:
            raise GraphError(
                f"{name} takes {len(slots)} operands, {len(operands)} are given",
                where=str(template.origin),
                hint=f"They are {', '.join(slots)}; parameters go by name.",
            )
        own = {slots[0]: list(operands)}
    for k, v in named.items():
        if k in slots and k not in own:
            own[k] = v
        elif k in slots:
            raise GraphError(f"operand {k} of {name} is given twice", where=str(template.origin))
    found: list[Tensor] = []
    for operand in template.inputs:
        value = own.get(operand.name)
        if value is None:
            if not (operand.optional or operand.many):
                raise GraphError(
                    f"operand {operand.name} of {name} is missing", where=str(template.origin)
                )
            continue
        many = list(value) if isinstance(value, list | tuple) else [value]
        found += [v if isinstance(v, Tensor) else constant(v) for v in many]
    return found, params


def _plain(value: Any) -> Any:
    """A parameter as graphs keep it: lists for tuples."""
    return list(map(_plain, value)) if isinstance(value, tuple | list) else value
