"""Reading, writing and moving whole modules.

The format of an input is detected from its first bytes, never from a file name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from enum import Enum
from functools import cache
from pathlib import Path

from jaxlib.mlir import ir, passmanager
from jaxlib.mlir.dialects import stablehlo

from hlo_opt import compat
from hlo_opt.errors import HloOptError

BYTECODE_MAGIC = b"ML\xefR"
# What StableHLO writes behind the magic and a version byte or two.
ARTIFACT_PRODUCER = b"StableHLO_v"


class Format(Enum):
    """What a module can be read from and written as."""

    MLIR = "mlir"
    BYTECODE = "bytecode"
    ARTIFACT = "artifact"
    JAX_EXPORT = "jax-export"


def format_of(data: bytes) -> Format:
    """The format of an input, from its content. A `jax.export` file has no magic number: what is
    neither bytecode nor text is taken for one."""
    if data.startswith(BYTECODE_MAGIC):
        head = data[len(BYTECODE_MAGIC) : len(BYTECODE_MAGIC) + 16]
        return Format.ARTIFACT if ARTIFACT_PRODUCER in head else Format.BYTECODE
    try:
        data.decode()
    except UnicodeDecodeError:
        return Format.JAX_EXPORT
    return Format.MLIR


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
    """Parses a module in any `Format` and verifies it.

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
    format = format_of(data)
    if format is Format.JAX_EXPORT:
        from hlo_opt.ir.exported import read_exported

        data, format = read_exported(data, name).mlir_module_serialized, Format.ARTIFACT
    with ctx, ir.Location.unknown():
        try:
            if format is Format.ARTIFACT:
                module = _from_artifact(ctx, data, name)
            elif format is Format.BYTECODE:
                module = ir.Module.parse(data)
            elif name != "-":
                module = ir.Module.parseFile(name)  # so that locations name the file
            else:
                module = ir.Module.parse(data.decode())
            module.operation.verify()
        except ir.MLIRError as error:
            raise first_diagnostic(error, name) from None
    return module


def _from_artifact(ctx: ir.Context, data: bytes, name: str) -> ir.Module:
    with _diagnostics(ctx) as messages:
        try:
            module = stablehlo.deserialize_portable_artifact(ctx, data)
        except ValueError:
            reason = messages[0] if messages else "it cannot be read"
            raise HloOptError(
                f"error: invalid StableHLO portable artifact: {reason}", location=name
            ) from None
    _restore_symbols(module)
    return module


# Artifacts turn the symbols in composites' attributes into strings. Which ones were symbols is
# noted on the module: a string may name another function by now, since JAX renames functions when
# it merges modules (and drops the note).
_SYMBOLS = "hlo_opt.symbols"


def _composites(module: ir.Module) -> list[tuple[ir.Operation, str, dict[str, ir.Attribute]]]:
    """Every composite that has attributes, its name and these."""
    found: list[tuple[ir.Operation, str, dict[str, ir.Attribute]]] = []

    def visit(op: ir.Operation) -> ir.WalkResult:
        if op.name == "stablehlo.composite" and "composite_attributes" in op.attributes:
            name = ir.StringAttr(op.attributes["name"]).value
            entries = {e.name: e.attr for e in ir.DictAttr(op.attributes["composite_attributes"])}
            found.append((op.operation, name, entries))
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return found


def _note_symbols(module: ir.Module) -> None:
    noted = {
        f"{name}.{key}"
        for _, name, entries in _composites(module)
        for key, value in entries.items()
        if isinstance(value, ir.FlatSymbolRefAttr)
    }
    if noted:
        with module.context:
            names = [ir.StringAttr.get(one) for one in sorted(noted)]
            module.operation.attributes[_SYMBOLS] = ir.ArrayAttr.get(names)


def _restore_symbols(module: ir.Module) -> None:
    """Makes the strings symbols again that `_note_symbols` noted."""
    if _SYMBOLS not in module.operation.attributes:
        return
    noted = {ir.StringAttr(s).value for s in ir.ArrayAttr(module.operation.attributes[_SYMBOLS])}
    for op, name, entries in _composites(module):
        for key, value in entries.items():
            if f"{name}.{key}" in noted and isinstance(value, ir.StringAttr):
                entries[key] = ir.FlatSymbolRefAttr.get(value.value)
        op.attributes["composite_attributes"] = ir.DictAttr.get(entries)
    del module.operation.attributes[_SYMBOLS]


@contextlib.contextmanager
def _diagnostics(ctx: ir.Context) -> Iterator[list[str]]:
    """Collects what MLIR would print to stderr."""
    messages: list[str] = []

    def keep(diagnostic: ir.Diagnostic) -> bool:
        messages.append(diagnostic.message.splitlines()[0])
        return True

    handler = ctx.attach_diagnostic_handler(keep)
    try:
        yield messages
    finally:
        handler.detach()


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


def serialize(
    module: ir.Module, format: Format = Format.MLIR, *, artifact_version: str | None = None
) -> bytes:
    """The module as text (UTF-8, one trailing newline), bytecode or portable artifact.

    Args:
      artifact_version: StableHLO version a portable artifact is for, such as `"1.0.0"`; that of
        this jaxlib by default.

    Raises:
      HloOptError: the module cannot be written as a portable artifact of that version.
    """
    if format is Format.BYTECODE:
        return compat.bytecode(module)
    if format is Format.MLIR:
        return str(module.operation.get_asm()).rstrip("\n").encode() + b"\n"
    assert format is Format.ARTIFACT, format
    version = artifact_version or stablehlo.get_current_version()
    copy = clone(module)  # what is given becomes VHLO itself
    _note_symbols(copy)
    with _diagnostics(module.context) as messages:
        try:
            # Other dialects: Shardy's meshes, and CHLO ops as JAX's own exports have them.
            return stablehlo.serialize_portable_artifact(copy, version, allow_other_dialects=True)
        except ValueError:
            reason = messages[0] if messages else "unknown reason"
            raise HloOptError(
                f"error: no portable artifact of version {version}: {reason}"
            ) from None


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
