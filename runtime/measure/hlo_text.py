"""A reader of XLA's HLO text: computations, instructions, their types, operands and attributes.

It reads what `jax.stages.Compiled.as_text()` gives on CPU, GPU and TPU. Only the outline is parsed
at once; operands and attributes of an instruction are parsed when they are asked for, since most
lines of a large program are of no interest to anybody.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

from tapestry_egg.errors import PlanError

#: Bits per element. Predicates take a byte.
BITS = {
    "pred": 8, "token": 0, "opaque": 0,
    "s1": 1, "s2": 2, "s4": 4, "s8": 8, "s16": 16, "s32": 32, "s64": 64,
    "u1": 1, "u2": 2, "u4": 4, "u8": 8, "u16": 16, "u32": 32, "u64": 64,
    "bf16": 16, "f16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128,
    "f4e2m1fn": 4, "f8e3m4": 8, "f8e4m3": 8, "f8e4m3b11fnuz": 8, "f8e4m3fn": 8,
    "f8e4m3fnuz": 8, "f8e5m2": 8, "f8e5m2fnuz": 8, "f8e8m0fnu": 8,
}  # fmt: skip

_ARRAY = re.compile(r"\b([a-z][a-z0-9]*)\[([0-9,<=? ]*)\]")
_HEADER = re.compile(r"(ENTRY\s+)?%?([\w.\-]+)\s*(?:\(.*)?\{$")
_INSTRUCTION = re.compile(r"(ROOT\s+)?%?([\w.\-]+) = (.*)$", re.DOTALL)
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_COMMENT = re.compile(r"/\*.*?\*/")
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[(){}\[\],]|[^"(){}\[\],]+')


@dataclass(frozen=True, slots=True)
class Array:
    """One array of a type: `f32[8,64]`."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return -(-self.size * BITS[self.dtype] // 8)


def arrays(text: str) -> tuple[Array, ...]:
    """The arrays of a type, tuples flattened: `(f32[2], (s32[]))` has two."""
    found = []
    for dtype, dims in _ARRAY.findall(text):
        if dtype in BITS:  # layouts and tilings hold brackets too, but no dtype before them
            shape = tuple(int(d.strip(" <=?") or 0) for d in dims.split(",") if d.strip())
            found.append(Array(dtype, shape))
    return tuple(found)


@dataclass(frozen=True)
class Instruction:
    """One line: `name = type opcode(operands), attributes`."""

    name: str
    type: str
    opcode: str
    rest: str  # from the opening parenthesis of the operands
    is_root: bool

    @cached_property
    def arrays(self) -> tuple[Array, ...]:
        return arrays(self.type)

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.arrays)

    @cached_property
    def _parts(self) -> tuple[str, str]:
        end = _closing(self.rest)
        return self.rest[1:end], self.rest[end + 1 :]

    @property
    def argument(self) -> str:
        """The text between the parentheses: a constant's value, a parameter's number."""
        return self._parts[0].strip()

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of the operands, in order; their types, where printed, are dropped."""
        items = split(_COMMENT.sub("", self._parts[0]))
        return tuple(item.rsplit(" ", 1)[-1].lstrip("%") for item in items)

    @cached_property
    def attributes(self) -> dict[str, str]:
        """Attribute name -> its text, unparsed."""
        found: dict[str, str] = {}
        for item in split(self._parts[1]):
            key, sign, text = item.partition("=")
            if key.strip() == "device_ids" and found:  # goes on: mesh['a'=8], device_ids=(..) {'a'}
                found[next(reversed(found))] += f", {item}"
            elif sign:
                found[key.strip()] = text.strip()
        return found

    @property
    def called(self) -> tuple[str, ...]:
        """Computations that the instruction runs; those of a while loop are not among them."""
        found: list[str] = []
        for key in ("calls", "to_apply", "called_computations", "branch_computations"):
            if key in self.attributes:
                found += [c.lstrip("%") for c in split(self.attributes[key].strip("{}"))]
        for key in ("true_computation", "false_computation"):
            if key in self.attributes:
                found.append(self.attributes[key].lstrip("%"))
        return tuple(found)

    @property
    def op_name(self) -> str:
        return _quoted(self.attributes.get("metadata", ""), "op_name")


@dataclass(frozen=True)
class Computation:
    """A named list of instructions."""

    name: str
    instructions: tuple[Instruction, ...]

    @cached_property
    def by_name(self) -> dict[str, Instruction]:
        return {i.name: i for i in self.instructions}

    @cached_property
    def root(self) -> Instruction:
        for i in reversed(self.instructions):
            if i.is_root:
                return i
        return self.instructions[-1]


@dataclass(frozen=True)
class Module:
    """A parsed HLO module. `devices` counts partitions × replicas."""

    name: str
    devices: int
    entry: str
    computations: dict[str, Computation]
    frames: dict[int, str]  # stack frame number -> file:line

    def source(self, instruction: Instruction) -> str:
        """`file:line` of the user's program, or an empty string."""
        metadata = instruction.attributes.get("metadata", "")
        if file := _quoted(metadata, "source_file"):
            line = re.search(r"source_line=(\d+)", metadata)
            return f"{file}:{line.group(1)}" if line else file
        frame = re.search(r"stack_frame_id=(\d+)", metadata)
        return self.frames.get(int(frame.group(1)), "") if frame else ""


def parse(text: str) -> Module:
    """Read a module. Raises PlanError where the text holds no entry computation."""
    computations: dict[str, Computation] = {}
    entry = ""
    name = ""
    body: list[Instruction] = []
    for line in _logical_lines(text):
        if line.startswith("}"):
            if name:
                computations[name] = Computation(name, tuple(body))
            name, body = "", []
        elif name:
            if instruction := _instruction(line):
                body.append(instruction)
        elif line.endswith("{") and (header := _HEADER.fullmatch(line)):
            name = header.group(2)
            entry = name if header.group(1) else entry
    if entry not in computations:
        raise PlanError(
            "this text holds no entry computation",
            where="HLO",
            hint="Pass a compiled executable, or what its as_text() gives.",
        )
    title = text[: text.find("\n")]
    return Module(
        name=_first(r"HloModule\s+([\w.\-]+)", title) or "",
        devices=int(_first(r"num_partitions=(\d+)", title) or 1)
        * int(_first(r"replica_count=(\d+)", title) or 1),
        entry=entry,
        computations=computations,
        frames=_frames(text[: text.find("{\n") + 1 or None]),
    )


def split(text: str) -> list[str]:
    """Split at the commas that stand outside quotes and brackets; empty pieces are dropped."""
    items: list[str] = []
    piece: list[str] = []
    depth = 0
    for token in _TOKEN.findall(text):
        if token in ("(", "{", "["):
            depth += 1
        elif token in (")", "}", "]"):
            depth -= 1
        if token == "," and depth == 0:
            items.append("".join(piece).strip())
            piece = []
        else:
            piece.append(token)
    items.append("".join(piece).strip())
    return [i for i in items if i]


def _closing(text: str) -> int:
    """Position of the bracket that closes the one at position 0."""
    depth = at = 0
    for token in _TOKEN.findall(text):
        if token in ("(", "{", "["):
            depth += 1
        elif token in (")", "}", "]"):
            depth -= 1
            if depth == 0:
                return at
        at += len(token)
    return len(text) - 1


def _logical_lines(text: str) -> Iterator[str]:
    """Lines, with long constants that were printed over several lines joined again."""
    pending = ""
    for raw in text.splitlines():
        line = raw.strip()
        if not line:
            continue
        if pending and not _INSTRUCTION.match(line):
            if not line.startswith("}") or _is_open(pending):
                pending += " " + line
                continue
        if pending:
            yield pending
            pending = ""
        if " = " in line and not line.startswith("HloModule"):  # whose attributes may hold one
            pending = line
        else:
            yield line
    if pending:
        yield pending


def _is_open(text: str) -> bool:
    if text.count("(") == text.count(")"):
        return False
    tokens = _TOKEN.findall(text)  # brackets in quotes do not count
    return tokens.count("(") > tokens.count(")")


def _instruction(line: str) -> Instruction | None:
    head = _INSTRUCTION.match(line)
    if not head:
        return None
    right = head.group(3)
    cut = _closing(right) + 1 if right.startswith("(") else right.find(" ")
    opcode = _OPCODE.match(right, cut)
    if not opcode:
        return None
    return Instruction(
        name=head.group(2),
        type=right[:cut],
        opcode=opcode.group(1),
        rest=right[opcode.end() - 1 :],
        is_root=bool(head.group(1)),
    )


def _frames(header: str) -> dict[int, str]:
    """The tables of file names, locations and stack frames that newer XLA prints first."""
    files: dict[int, str] = {}
    locations: dict[int, str] = {}
    frames: dict[int, str] = {}
    section = ""
    for line in header.splitlines():
        number, _, entry = line.strip().partition(" ")
        if not number.isdigit():
            section = line.strip()
        elif section == "FileNames":
            files[int(number)] = entry.strip('"')
        elif section == "FileLocations":
            file = int(_first(r"file_name_id=(\d+)", entry) or 0)
            locations[int(number)] = f"{files.get(file, '?')}:{_first(r' line=([0-9]+)', entry)}"
        elif section == "StackFrames":
            frames[int(number)] = locations.get(
                int(_first(r"file_location_id=(\d+)", entry) or 0), ""
            )
    return frames


def _quoted(text: str, key: str) -> str:
    found = re.search(key + r'="((?:[^"\\]|\\.)*)"', text)
    return found.group(1) if found else ""


def _first(pattern: str, text: str) -> str | None:
    found = re.search(pattern, text)
    return found.group(1) if found else None
