"""Metakernels: templates that say how an operation's index space projects into its tensors.

A template is data, in the language that docs/template-language.md describes; those of JAX's
primitives are the files in `templates/`, and `opaque.yaml` says of the others why they have none.
In: an operation's kernel, types and parameters. Out: its signature. To print one: `tapestry-egg
kernels NAME --shape 8,16`.

* `registry` answers for an operation: its `signature` (index dims with roles, one projection per
  tensor, laws of partial values, costs), from the first template that fits, else the opaque one;
* `signatures` holds what it answers, and `splits` says which cuts of the index space are legal, and
  what each does to every tensor;
* `language` reads templates: YAML to `template`, with the expression language, its grammar
  (`language/parser.py`), shape patterns and projections;
* applying: `binding` matches operands, `index_space` and `instantiate` make the signature.
"""

from __future__ import annotations
