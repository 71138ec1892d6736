"""The language of templates: expressions, shape patterns, projections (docs/template-language.md).

In: YAML text. Out: a `Template` that `metakernels.instantiate` makes signatures of, or a fault with
its line and column.
"""
