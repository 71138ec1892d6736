"""The one family of errors: where it happened, what is wrong, what to do about it."""

from __future__ import annotations

from .printable import printable


class TapestryError(Exception):
    """Base of every error that tapestry-egg raises on purpose.

    `where` names the place (`file:line:column`, a node with its source line, an argument), `what`
    says what is wrong there, `hint` says what to do. Printed as three short lines.
    """

    def __init__(self, what: str, *, where: str = "", hint: str = "") -> None:
        self.what = what
        self.where = where
        self.hint = hint
        super().__init__(what)

    def __str__(self) -> str:
        head = f"{self.where}: {self.what}" if self.where else self.what
        return printable(f"{head}\n  {self.hint}" if self.hint else head)


class GraphError(TapestryError):
    """A block graph is malformed, or a graph file cannot be read or written."""


class TemplateError(TapestryError):
    """A metakernel template is malformed or does not fit the operands given."""


class RuleError(TapestryError):
    """A rule file is malformed, or a rule is refused."""


class TargetError(TapestryError):
    """A target or mesh is unknown, malformed, or not present on this machine."""


class ExtractError(TapestryError):
    """No plan meets the limits, or an extraction input is malformed."""


class PlanError(TapestryError):
    """A plan is inconsistent with its graph, its mesh or its layouts."""


class TraceError(TapestryError):
    """A function cannot be traced with the arguments given."""


class UnplannedError(TraceError):
    """A function says something that no plan can keep. `te.jit` runs it as it is written."""


class PeerError(TapestryError):
    """Processes of one job do not run the same thing, or one of them is gone."""
