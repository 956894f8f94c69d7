"""Watching a pipeline run: timing, IR printing, statistics and crash reproducers."""

from __future__ import annotations

import re
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from jaxlib.mlir import ir

from hlo_opt.remarks import Remarks

RULE = "===" + "-" * 73 + "==="


@dataclass(frozen=True)
class AsmFlags:
    """How IR is printed; see MLIR's flags of the same names."""

    generic: bool = False
    debug_info: bool = False
    elide_larger: int | None = None

    def print(self, module: ir.Module) -> str:
        """The module's text, without a trailing newline."""
        text: str = module.operation.get_asm(
            print_generic_op_form=self.generic,
            enable_debug_info=self.debug_info,
            large_elements_limit=self.elide_larger,
        )
        return text.rstrip("\n")


@dataclass
class Timing:
    """Wall time of every step; `report` prints MLIR's table."""

    seconds: list[tuple[str, float]] = field(default_factory=list)
    _start: float = 0.0

    def before(self, name: str, module: ir.Module) -> None:
        self._start = time.perf_counter()

    def after(self, name: str, module: ir.Module) -> None:
        self.seconds.append((name, time.perf_counter() - self._start))

    def failed(self, name: str, module: ir.Module, rest: str) -> None:
        self.after(name, module)

    def report(self, stream: TextIO) -> None:
        """Prints the times of all steps and their sum."""
        total = sum(seconds for _, seconds in self.seconds)
        print(RULE, f"{'... Execution time report ...':^79}", RULE, sep="\n", file=stream)
        print(f"  Total Execution Time: {total:.4f} seconds\n", file=stream)
        print("  ----Wall Time----  ----Name----", file=stream)
        for name, seconds in [*self.seconds, ("Total", total)]:
            share = 100 * seconds / total if total else 0.0
            print(f"  {seconds:8.4f} ({share:5.1f}%)  {name}", file=stream)


@dataclass
class IRPrinting:
    """Prints the module around steps, to a stream or as a tree of files.

    Attributes:
      before_names, after_names: steps to print at; None for all.
      after_change: print after a step only when the module changed.
      tree_dir: write numbered files there instead of printing.
    """

    stream: TextIO
    flags: AsmFlags
    before_names: Collection[str] | None = ()
    after_names: Collection[str] | None = ()
    after_change: bool = False
    tree_dir: Path | None = None
    _count: int = 0
    _last: str | None = None

    def before(self, name: str, module: ir.Module) -> None:
        if self.after_change and self._last is None:
            self._last = self.flags.print(module)
        if _selected(name, self.before_names):
            self._dump("Before", name, self.flags.print(module))

    def after(self, name: str, module: ir.Module) -> None:
        if not _selected(name, self.after_names) and not self.after_change:
            return
        text = self.flags.print(module)
        if self.after_change and text == self._last:
            return
        self._last = text
        self._dump("After", name, text)

    def failed(self, name: str, module: ir.Module, rest: str) -> None:
        pass

    def _dump(self, when: str, name: str, text: str) -> None:
        if self.tree_dir is None:
            print(f"// -----// IR Dump {when} {name} //----- //\n{text}\n", file=self.stream)
            return
        self.tree_dir.mkdir(parents=True, exist_ok=True)
        safe = re.sub(r"[^\w.-]+", "_", name)[:80].strip("_")
        suffix = "_before" if when == "Before" else ""
        (self.tree_dir / f"{self._count}_{safe}{suffix}.mlir").write_text(text + "\n")
        self._count += 1


def _selected(name: str, names: Collection[str] | None) -> bool:
    bare = re.sub(r"^func\.func\((.*)\)$", r"\1", name)
    return names is None or name in names or re.sub(r"\{.*\}", "", bare) in names


@dataclass
class Reproducer:
    """Writes the module as it went into the run and the pipeline, when a step fails."""

    path: Path
    pipeline: str

    def before(self, name: str, module: ir.Module) -> None:
        pass

    def after(self, name: str, module: ir.Module) -> None:
        pass

    def failed(self, name: str, module: ir.Module, rest: str) -> None:
        text = AsmFlags(debug_info=True).print(module)
        self.path.write_text(f"{REPRODUCER_MARK}{self.pipeline}\n{text}\n")


REPRODUCER_MARK = "// hlo-opt reproducer: "


def reproducer_pipeline(text: str) -> str | None:
    """The pipeline a reproducer file starts with, or None."""
    first = text.split("\n", 1)[0]
    return first.removeprefix(REPRODUCER_MARK) if first.startswith(REPRODUCER_MARK) else None


def print_statistics(remarks: Remarks, stream: TextIO) -> None:
    """Prints how many structures each pass applied, missed or analysed."""
    print(RULE, f"{'... Pass statistics report ...':^79}", RULE, sep="\n", file=stream)
    counts: dict[str, dict[str, int]] = {}
    for remark in remarks:
        of_pass = counts.setdefault(remark.pass_name, {})
        key = f"{remark.structure} {remark.kind}".strip()
        of_pass[key] = of_pass.get(key, 0) + 1
    for name, of_pass in counts.items():
        print(name, file=stream)
        for key, count in of_pass.items():
            print(f"  (S) {count:6d} {key}", file=stream)
