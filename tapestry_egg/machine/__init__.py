"""Machines: targets as data, their networks, and what a kernel or a collective costs on them.

In: `NAME:SHAPE`, or a file like those in `targets/`. Out: a `Target`, and seconds, joules and bytes
on the wire as functions of it. To print one: `tapestry-egg targets`.
"""
