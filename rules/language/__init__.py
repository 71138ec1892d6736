"""The language of rules: books in YAML, their patterns, guards and templates, and egglog text.

In: files like those in `books/`. Out: `RuleBook`s of rules with their law, their numerics class and
the line that each stands on. To print them: `tapestry-egg rules`.
"""
