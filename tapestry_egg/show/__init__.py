"""Text and pictures of programs, plans and fronts, for people and as plain data for programs.

In: what other stages made. Out: text, SVG, a folder of pages. Nothing here decides anything.
"""
