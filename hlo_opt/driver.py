"""The `hlo-opt` command: reads a module, runs a pipeline, writes the result.

`Driver` can be called in process and extended: import your passes (their decorators register
them), then run it. Nothing here imports JAX unless a flag needs it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TextIO

from jaxlib.mlir import ir

import hlo_opt
from hlo_opt import pipeline as pipelines
from hlo_opt.errors import HloOptError
from hlo_opt.instrumentation import (
    AsmFlags,
    IRPrinting,
    Reproducer,
    Timing,
    print_statistics,
    reproducer_pipeline,
)
from hlo_opt.ir.module import Format, context, format_of, parse, read_bytes, serialize
from hlo_opt.pipeline import FUNCTION, MODULE, PassContext
from hlo_opt.remarks import Remark

TRACEBACK_VARIABLE = "HLO_OPT_TRACEBACK"
SPLIT_MARKER = "// -----"


class _Parser(argparse.ArgumentParser):
    """An argument parser that raises instead of leaving the process."""

    def error(self, message: str) -> NoReturn:
        raise HloOptError(f"error: {message}; see hlo-opt --help")


class _AddPass(argparse.Action):
    """Collects pass flags in the order they are given."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        name = (option_string or "").removeprefix("--")
        text = f"{name}{{{values}}}" if values else name
        if pipelines.CXX_PASSES.get(name) == FUNCTION:
            text = f"{FUNCTION}({text})"
        namespace.passes.append(text)


class Driver:
    """One run of the command.

    Args:
      argv: arguments without the program's name.
      stdin, stdout: binary streams.
      stderr: text stream.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        stdin: BinaryIO | None = None,
        stdout: BinaryIO | None = None,
        stderr: TextIO | None = None,
    ) -> None:
        self.argv = list(argv)
        self.stdin = stdin if stdin is not None else sys.stdin.buffer
        self.stdout = stdout if stdout is not None else sys.stdout.buffer
        self.stderr = stderr if stderr is not None else sys.stderr
        self.remarks: list[Remark] = []

    def run(self) -> int:
        """Runs the command and returns its exit status; says what went wrong in one line."""
        try:
            return self._run()
        except HloOptError as error:
            self.complain(error)
        except KeyboardInterrupt:
            print("hlo-opt: interrupted", file=self.stderr)
            return 130
        except BrokenPipeError:
            raise
        except Exception as error:
            if os.environ.get(TRACEBACK_VARIABLE):
                traceback.print_exc(file=self.stderr)
            reason = " ".join(str(error).split())[:300]
            print(
                f"hlo-opt: internal error: {type(error).__name__}: {reason} "
                f"(set {TRACEBACK_VARIABLE}=1 for the traceback)",
                file=self.stderr,
            )
        return 1

    def _run(self) -> int:
        pipelines.load_passes()
        self.options = self.parser().parse_args([_closed(word) for word in self.argv])
        if text := self.information():
            self.stdout.write(text.encode())
            return 0
        self.check_target()
        context().allow_unregistered_dialects = self.options.allow_unregistered_dialect
        source = self.read()
        steps = pipelines.resolve(self.pipeline_text(source))
        try:
            status, output = self.process(self.chunks(source), steps)
        finally:
            if self.options.remarks_output:
                lines = "".join(remark.to_json() + "\n" for remark in self.remarks)
                write_file(self.options.remarks_output, lines.encode())
        if status == 0 and output is not None:
            self.write(output)
        return status

    def chunks(self, source: bytes) -> list[bytes]:
        """The parts of the input that are processed apart; they keep their line numbers."""
        marker = self.options.split_input_file
        if marker is None:
            return [source]
        if format_of(source) is not Format.MLIR or self.options.emit != Format.MLIR.value:
            raise HloOptError("error: --split-input-file is for MLIR text", location=self.path)
        parts: list[list[str]] = [[]]
        for number, line in enumerate(source.decode().splitlines(keepends=True), start=1):
            if line.strip() == marker:
                parts.append(["\n"] * number)
            else:
                parts[-1].append(line)
        return ["".join(part).encode() for part in parts]

    def process(
        self, chunks: Sequence[bytes], steps: Sequence[pipelines.Pass | pipelines.CxxPass]
    ) -> tuple[int, bytes | None]:
        """The exit status, and what is to be written. A chunk that fails does not stop others."""
        status, outputs = 0, []
        for chunk in chunks:
            try:
                failed, output = self.process_one(chunk, steps)
            except HloOptError as error:
                if len(chunks) == 1:
                    raise
                self.complain(error)
                failed, output = 1, None
            status |= failed
            outputs.append(output)
        whole = [output for output in outputs if output is not None]
        return status, f"{SPLIT_MARKER}\n".encode().join(whole) if whole else None

    def process_one(
        self, source: bytes, steps: Sequence[pipelines.Pass | pipelines.CxxPass]
    ) -> tuple[int, bytes | None]:
        """The exit status for one chunk, and what is to be written of it."""
        if self.options.verify_diagnostics:
            return self.verify_diagnostics(source, steps), None
        module = self.parse(source)
        result = self.transform(module, steps)
        status = self.verify_numerics(module, steps) if self.options.verify_numerics else 0
        if self.options.compile:
            self.compile(result)
        if status or (self.reports_only() and not self.options.output):
            return status, None
        return status, self.emitted(result, source)

    @property
    def path(self) -> str:
        """The input's name in messages."""
        return str(self.options.input)

    def complain(self, error: HloOptError) -> None:
        """Says what went wrong in one line."""
        print(f"{error}" if error.location else f"hlo-opt: {error}", file=self.stderr)

    def parser(self) -> argparse.ArgumentParser:
        """The command line; extend it for drivers of your own."""
        parser = _Parser(
            prog="hlo-opt",
            description="Runs compiler passes on StableHLO modules.",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        parser.add_argument(
            "input",
            nargs="?",
            default="-",
            help="MLIR text or bytecode, portable artifact or jax.export file; - is stdin",
        )
        parser.set_defaults(passes=[])
        self._add_general(parser.add_argument_group("input and output"))
        self._add_checks(parser.add_argument_group("target, remarks and checks"))
        self._add_printing(parser.add_argument_group("printing and debugging"))
        self._add_passes(parser)
        return parser

    def _add_general(self, group: argparse._ArgumentGroup) -> None:
        group.add_argument("-o", dest="output", metavar="FILE", help="write there, not to stdout")
        group.add_argument("--emit", choices=[f.value for f in Format], default="mlir")
        group.add_argument(
            "--artifact-version", metavar="X.Y.Z", help="StableHLO version for --emit=artifact"
        )
        group.add_argument(
            "--split-input-file",
            metavar="MARKER",
            help=f"process parts between lines of a marker apart; '{SPLIT_MARKER}' by default",
        )
        group.add_argument(
            "--pass-pipeline", metavar="TEXT", help="for instance 'builtin.module(raise,cse)'"
        )
        group.add_argument("--allow-unregistered-dialect", action="store_true")
        group.add_argument("--list-passes", action="store_true", help="list passes and exit")
        group.add_argument("--show-dialects", action="store_true", help="list dialects and exit")
        group.add_argument("--version", action="store_true", help="print versions and exit")

    def _add_checks(self, group: argparse._ArgumentGroup) -> None:
        group.add_argument("--target", metavar="NAME", help="v4, v5e, v5p, v6e, tpu7x, cpu or gpu")
        group.add_argument("--remarks", action="store_true", help="print remarks to stderr")
        group.add_argument("--remarks-output", metavar="FILE", help="write remarks as JSON lines")
        group.add_argument(
            "--compile", action="store_true", help="compile the result for the target and report"
        )
        group.add_argument(
            "--verify-numerics",
            action="store_true",
            help="run input and result (kernels interpreted) against float64",
        )
        group.add_argument(
            "--verify-each",
            action=argparse.BooleanOptionalAction,
            default=True,
            help="verify the module after every pass",
        )
        group.add_argument(
            "--verify-diagnostics",
            action="store_true",
            help="check remarks and errors against 'expected-…' comments in the input",
        )

    def _add_printing(self, group: argparse._ArgumentGroup) -> None:
        for flag in ("before", "after"):
            group.add_argument(
                f"--mlir-print-ir-{flag}", metavar="PASS,…", help=f"print IR {flag} these passes"
            )
            group.add_argument(f"--mlir-print-ir-{flag}-all", action="store_true")
        group.add_argument("--mlir-print-ir-after-change", action="store_true")
        group.add_argument("--mlir-print-ir-tree-dir", metavar="DIR", type=Path)
        group.add_argument("--mlir-print-op-generic", action="store_true")
        group.add_argument("--mlir-print-debuginfo", action="store_true")
        group.add_argument("--mlir-elide-elementsattrs-if-larger", metavar="N", type=int)
        group.add_argument("--mlir-timing", action="store_true")
        group.add_argument("--mlir-pass-statistics", action="store_true")
        group.add_argument(
            "--mlir-pass-pipeline-crash-reproducer", metavar="FILE", type=Path, dest="reproducer"
        )
        group.add_argument("--run-reproducer", action="store_true")

    def _add_passes(self, parser: argparse.ArgumentParser) -> None:
        ours = parser.add_argument_group(
            "passes and pipelines of hlo-opt, run in command-line order"
        )
        theirs = parser.add_argument_group("passes of MLIR, StableHLO and Shardy")
        for name, cls in sorted({**pipelines.PASSES, **pipelines.PIPELINES}.items()):
            options = " ".join(f"{o}=" for o in pipelines.pass_options(cls))
            text = summary(cls) + (f" Options: {options}" if options else "")
            self._add_pass(ours, name, text)
        for name, anchor in sorted(pipelines.CXX_PASSES.items()):
            self._add_pass(theirs, name, "" if anchor == "any" else f"on {anchor}")

    def _add_pass(self, group: argparse._ArgumentGroup, name: str, text: str) -> None:
        group.add_argument(
            f"--{name}",
            action=_AddPass,
            dest="passes",
            nargs="?",
            const="",
            metavar="'OPTIONS'",
            help=text.replace("%", "%%"),
        )

    def information(self) -> str:
        """What `--version`, `--list-passes` and `--show-dialects` print."""
        if self.options.version:
            import jaxlib

            return f"hlo-opt {hlo_opt.__version__}\njaxlib {jaxlib.__version__}\n"
        if self.options.list_passes:
            lines = [
                f"{name:32} {summary(cls)}"
                for name, cls in sorted({**pipelines.PASSES, **pipelines.PIPELINES}.items())
            ]
            lines += [f"{name:32} [{a}]" for name, a in sorted(pipelines.CXX_PASSES.items())]
            return "\n".join(lines) + "\n"
        if self.options.show_dialects:
            return "Available Dialects: " + ",".join(DIALECTS) + "\n"
        return ""

    def check_target(self) -> None:
        """Raises `HloOptError` for an unknown target."""
        if self.options.target:
            from hlo_opt.targets import check_target

            check_target(self.options.target)
        elif self.options.compile:
            raise HloOptError("error: --compile needs --target=NAME")

    def read(self) -> bytes:
        """The input's bytes."""
        if self.options.input == "-":
            return self.stdin.read()
        return read_bytes(self.options.input)

    def pipeline_text(self, source: bytes) -> str:
        """The pipeline the command line (or a reproducer) asks for."""
        if self.options.run_reproducer:
            text = reproducer_pipeline(source.decode(errors="replace"))
            if text is None:
                raise HloOptError(
                    "error: the input is not a reproducer", location=self.options.input
                )
            return text
        if self.options.pass_pipeline is not None:
            if self.options.passes:
                raise HloOptError("error: --pass-pipeline and pass flags exclude each other")
            return str(self.options.pass_pipeline)
        return f"{MODULE}({','.join(self.options.passes)})"

    def parse(self, source: bytes) -> ir.Module:
        """The input module, or that of one chunk."""
        if self.options.split_input_file is None:
            return parse(source, path=self.path)
        try:
            return parse(source)
        except HloOptError as error:
            raise HloOptError(error.message, location=self._in_file(error.location)) from None

    def _in_file(self, location: str | None) -> str | None:
        """A location that names the input file, where a chunk's names none."""
        if location is not None and location.partition(":")[0] == "-":
            return self.path + location[1:]
        return location

    def transform(
        self, module: ir.Module, steps: Sequence[pipelines.Pass | pipelines.CxxPass]
    ) -> ir.Module:
        """Runs the pipeline; remarks, timing and statistics are printed also when it fails."""
        options = self.options
        self.ctx = PassContext(target=options.target)
        timing = Timing() if options.mlir_timing else None
        watchers: list[pipelines.Instrumentation] = [
            w for w in (timing, self._ir_printing(), self._reproducer(steps)) if w is not None
        ]
        try:
            return pipelines.run_pipeline(
                module,
                steps,
                self.ctx,
                verify_each=options.verify_each,
                instrumentation=watchers,
            )
        finally:
            self.report_remarks()
            if timing is not None:
                timing.report(self.stderr)
            if options.mlir_pass_statistics:
                print_statistics(self.ctx.remarks, self.stderr)

    def asm_flags(self) -> AsmFlags:
        """How modules are printed."""
        return AsmFlags(
            self.options.mlir_print_op_generic,
            self.options.mlir_print_debuginfo,
            self.options.mlir_elide_elementsattrs_if_larger,
        )

    def _ir_printing(self) -> IRPrinting | None:
        options = self.options
        before = _names(options.mlir_print_ir_before, options.mlir_print_ir_before_all)
        after = _names(options.mlir_print_ir_after, options.mlir_print_ir_after_all)
        change = options.mlir_print_ir_after_change
        if options.mlir_print_ir_tree_dir and before == () == after and not change:
            after = None
        if before == () == after and not change:
            return None
        return IRPrinting(
            self.stderr, self.asm_flags(), before, after, change, options.mlir_print_ir_tree_dir
        )

    def _reproducer(self, steps: Sequence[pipelines.Pass | pipelines.CxxPass]) -> Reproducer | None:
        if self.options.reproducer is None:
            return None
        return Reproducer(self.options.reproducer, pipelines.print_pipeline(steps))

    def report_remarks(self) -> None:
        """Keeps the remarks of a run, and prints them to stderr where that is asked for."""
        for remark in self.ctx.remarks:
            said = replace(remark, location=self._in_file(remark.location) or "")
            self.remarks.append(said)
            if self.options.remarks:
                print(said, file=self.stderr)

    def verify_numerics(
        self, module: ir.Module, steps: Sequence[pipelines.Pass | pipelines.CxxPass]
    ) -> int:
        """Checks the rewrite by running it; returns the exit status."""
        from hlo_opt.verify import verify_pipeline

        report = verify_pipeline(module, steps, self.options.target)
        print(report.table(), file=self.stderr)
        return 0 if report.ok else 1

    def compile(self, module: ir.Module) -> None:
        """Compiles the result for the target and prints what the compiler says."""
        from hlo_opt.targets import compile_module

        print(compile_module(module, self.options.target).table(), file=self.stderr)

    def verify_diagnostics(
        self, source: bytes, steps: Sequence[pipelines.Pass | pipelines.CxxPass]
    ) -> int:
        """Compares remarks and the error with the input's expectations; returns the status."""
        from hlo_opt.testing.diagnostics import check

        error = None
        self.ctx = PassContext(target=self.options.target)
        try:
            pipelines.run_pipeline(self.parse(source), steps, self.ctx)
        except HloOptError as problem:
            error = problem
        problems = check(source.decode(errors="replace"), self.ctx.remarks, error)
        for problem_text in problems:
            print(f"{self.options.input}:{problem_text}", file=self.stderr)
        return 1 if problems else 0

    def reports_only(self) -> bool:
        """Whether a check was asked for and no output file: then stdout stays free of IR."""
        return bool(self.options.compile or self.options.verify_numerics)

    def emitted(self, module: ir.Module, source: bytes) -> bytes:
        """The result in the format asked for."""
        format = Format(self.options.emit)
        if format is Format.MLIR:
            return self.asm_flags().print(module).encode() + b"\n"
        if format is not Format.JAX_EXPORT:
            return serialize(module, format, artifact_version=self.options.artifact_version)
        from hlo_opt.ir.exported import check_platform, read_exported, replace_module

        if format_of(source) is not Format.JAX_EXPORT:
            raise HloOptError(
                "error: --emit=jax-export needs a jax.export file as input", location=self.path
            )
        exported = read_exported(source, self.path)
        check_platform(exported, self.options.target)
        return bytes(replace_module(exported, module).serialize())

    def write(self, data: bytes) -> None:
        """Writes the result, all of it or nothing."""
        if self.options.output in (None, "-"):
            self.stdout.write(data)
            self.stdout.flush()
        else:
            write_file(self.options.output, data)


DIALECTS = (
    "arith",
    "builtin",
    "chlo",
    "func",
    "math",
    "mhlo",
    "mpmd",
    "quant",
    "sdy",
    "shape",
    "stablehlo",
    "tensor",
    "vhlo",
)


def _closed(word: str) -> str:
    """A flag without its optional value as `--flag=`: the next word is never its value."""
    if word == "--split-input-file":
        return f"{word}={SPLIT_MARKER}"
    name = word.removeprefix("--")
    known = (pipelines.PASSES, pipelines.PIPELINES, pipelines.CXX_PASSES)
    return f"{word}=" if word.startswith("--") and any(name in k for k in known) else word


def summary(cls: type) -> str:
    """The first line of a pass's help."""
    return (cls.__doc__ or "").strip().split("\n")[0]


def _names(listed: str | None, everything: bool) -> tuple[str, ...] | None:
    if everything:
        return None
    return tuple(listed.split(",")) if listed else ()


def write_file(path: str, data: bytes) -> None:
    """Writes a file so that it is never seen half-written. Raises `HloOptError`."""
    target = Path(path)
    try:
        if target.exists() and not target.is_file():  # /dev/null, a named pipe
            target.write_bytes(data)
            return
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(data)
            umask = os.umask(0)
            os.umask(umask)
            os.chmod(name, 0o666 & ~umask)
            os.replace(name, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
    except OSError as error:
        reason = error.strerror or str(error)
        raise HloOptError(f"error: cannot write output file: {reason}", location=path) from None


def main() -> int:
    """Entry point of the `hlo-opt` command."""
    # JAX is used for tracing and checks on CPU only: it must not look for an accelerator.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    try:
        status = Driver(sys.argv[1:]).run()
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader went away; Python must not complain when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
