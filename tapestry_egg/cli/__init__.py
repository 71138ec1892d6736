"""The command line: one module a group of commands; nothing here imports JAX before it must."""

from .app import main as main
