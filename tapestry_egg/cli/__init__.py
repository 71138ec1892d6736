"""The command line: one module a group of commands; nothing here imports JAX before it must.

In: files and options. Out: text on standard output, `--json` for programs, progress on standard
error.
"""

from .app import main as main
