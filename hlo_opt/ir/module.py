"""Reading, writing and moving whole modules.

The format of an input is detected from its first bytes, never from a file name.
"""

from __future__ import annotations

from enum import Enum
from functools import cache
from pathlib import Path

from jaxlib.mlir import ir, passmanager

from hlo_opt import compat
from hlo_opt.errors import HloOptError

BYTECODE_MAGIC = b"ML\xefR"


class Format(Enum):
    """What a module can be written as."""

    MLIR = "mlir"
    BYTECODE = "bytecode"


@cache
def context() -> ir.Context:
    """The process's shared context, every dialect loaded."""
    return compat.new_context()


def first_diagnostic(error: ir.MLIRError, file_name: str) -> HloOptError:
    """Turns MLIR's multi-line error into one line with the place it speaks of."""
    for diagnostic in error.error_diagnostics:
        place = str(diagnostic.location).removeprefix("loc(").removesuffix(")").replace('"', "")
        location = file_name if place == "unknown" else place.replace("-:", f"{file_name}:", 1)
        return HloOptError("error: " + diagnostic.message.splitlines()[0], location=location)
    return HloOptError(f"error: {error.message}", location=file_name)


def parse(
    source: str | bytes, *, path: str | Path = "-", into: ir.Context | None = None
) -> ir.Module:
    """Parses MLIR text or bytecode and verifies the module.

    Args:
      source: text or bytes; the format is detected from the content.
      path: the file `source` was read from, for messages and locations; `-` for none.
      into: the context to parse into; the shared one by default.

    Raises:
      HloOptError: the input is not a valid module.
    """
    ctx = into if into is not None else context()
    data = source.encode() if isinstance(source, str) else source
    name = str(path)
    with ctx, ir.Location.unknown():
        try:
            if data.startswith(BYTECODE_MAGIC):
                module = ir.Module.parse(data)
            elif name != "-":
                data.decode()
                module = ir.Module.parseFile(name)  # so that locations name the file
            else:
                module = ir.Module.parse(data.decode())
            module.operation.verify()
        except ir.MLIRError as error:
            raise first_diagnostic(error, name) from None
        except UnicodeDecodeError:
            raise HloOptError("error: neither MLIR text nor MLIR bytecode", location=name) from None
    return module


def read(path: str | Path) -> ir.Module:
    """Reads a module from a file. Raises `HloOptError` when it cannot be read or parsed."""
    return parse(read_bytes(path), path=path)


def read_bytes(path: str | Path) -> bytes:
    """The bytes of an input file. Raises `HloOptError` when it cannot be read."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        reason = error.strerror or str(error)
        raise HloOptError(f"error: cannot open input file: {reason}", location=str(path)) from None


def serialize(module: ir.Module, format: Format = Format.MLIR) -> bytes:
    """The module as bytecode or as text (UTF-8, one trailing newline)."""
    if format is Format.BYTECODE:
        return compat.bytecode(module)
    return str(module.operation.get_asm()).rstrip("\n").encode() + b"\n"


def clone(module: ir.Module) -> ir.Module:
    """A copy of a module in its own context."""
    copy = ir.Module.create(module.operation.location)
    for name in module.operation.attributes:
        copy.operation.attributes[name] = module.operation.attributes[name]
    with ir.InsertionPoint(copy.body):
        for op in module.body.operations:
            op.operation.clone()
    return copy


def run_cxx_passes(op: ir.Operation, passes: str) -> None:
    """Runs MLIR passes on a module or function, in place; for our own lists, not users' text."""
    with op.context:
        passmanager.PassManager.parse(f"{op.name}({passes})").run(op)
