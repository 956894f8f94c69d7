"""What was applied, what was missed and why: one line for people, one JSON line for tools."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxlib.mlir import ir

Kind = Literal["applied", "missed", "analysis"]


@dataclass(frozen=True)
class Remark:
    """One statement of a pass about one place in the program."""

    kind: Kind
    pass_name: str
    structure: str
    message: str
    function: str = ""
    location: str = ""
    args: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        verb = f"{self.structure} missed: " if self.kind == "missed" else f"{self.structure} "
        place = f"{self.location}: " if self.location else ""
        return f"{place}remark: {verb}{self.message} [{self.pass_name}]"

    def to_json(self) -> str:
        return json.dumps(
            {
                "pass": self.pass_name,
                "kind": self.kind,
                "structure": self.structure,
                "function": self.function,
                "location": self.location,
                "message": self.message,
                "args": self.args,
            }
        )


class Remarks:
    """Collects remarks in the order they were made."""

    def __init__(self) -> None:
        self.all: list[Remark] = []

    def __iter__(self) -> Iterator[Remark]:
        return iter(self.all)

    def __len__(self) -> int:
        return len(self.all)

    def add(
        self,
        kind: Kind,
        pass_name: str,
        structure: str,
        message: str,
        *,
        op: ir.Operation | ir.OpView | None = None,
        **args: Any,
    ) -> None:
        """Records a remark; `op` gives its location and function."""
        self.all.append(
            Remark(
                kind,
                pass_name,
                structure,
                message,
                function=function_of(op) if op is not None else "",
                location=source_location(op.location) if op is not None else "",
                args=args,
            )
        )


def function_of(op: ir.Operation | ir.OpView) -> str:
    """The name of the function that contains `op` (or is `op`), or an empty string."""
    node = op.operation
    while node is not None:
        if node.name == "func.func":
            return ir.StringAttr(node.attributes["sym_name"]).value
        parent = node.parent
        node = parent.operation if parent is not None else None
    return ""


def source_location(location: ir.Location) -> str:
    """The innermost `file:line` a location speaks of, or an empty string."""
    if isinstance(location, ir.FileLineColLoc):
        return f"{location.filename}:{location.start_line}"
    if isinstance(location, ir.NameLoc):
        return source_location(location.child_loc)
    if isinstance(location, ir.CallSiteLoc):
        return source_location(location.callee) or source_location(location.caller)
    if isinstance(location, ir.FusedLoc):
        return next(filter(None, map(source_location, location.locations)), "")
    return ""
