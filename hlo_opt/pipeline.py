"""Pass registry, pass options, textual pipelines and the runner.

A pass is a frozen dataclass: its fields are its options, its docstring is its help, `run` does the
work. C++ passes of MLIR and StableHLO and our own stand in one textual pipeline, in MLIR's syntax;
maximal runs of C++ passes go to one `PassManager` each, Python passes are plain calls in between.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import re
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeVar

from jaxlib.mlir import ir, passmanager

from hlo_opt import compat
from hlo_opt.errors import HloOptError
from hlo_opt.ir.module import clone, first_diagnostic
from hlo_opt.remarks import Kind, Remarks

MODULE = "builtin.module"
FUNCTION = "func.func"


@dataclass
class PassContext:
    """What a pass may know and say beyond the module.

    Attributes:
      target: name of the target the module is for, if any.
      interpret: kernels are emitted as plain StableHLO (Pallas's generic interpreter), for checks.
      knows_donation: `main` says which arguments the caller gives away.
      remarks: what the passes say.
    """

    target: str | None = None
    interpret: bool = False
    knows_donation: bool = True
    remarks: Remarks = field(default_factory=Remarks)


class Pass:
    """Base of our passes. Subclasses are frozen dataclasses registered by `register_pass`."""

    name: ClassVar[str]
    structure: ClassVar[str] = ""

    def run(self, module: ir.Module, ctx: PassContext) -> None:
        """Rewrites `module` in place. Must be idempotent and leave it verified."""
        raise NotImplementedError

    def remark(
        self,
        ctx: PassContext,
        kind: Kind,
        message: str,
        *,
        op: ir.Operation | ir.OpView | None = None,
        **args: Any,
    ) -> None:
        """Records a remark in this pass's name."""
        ctx.remarks.add(kind, self.name, self.structure, message, op=op, **args)

    def __str__(self) -> str:
        return self.name + _print_options(self)


class Pipeline:
    """Base of named pipelines: a frozen dataclass that expands to a list of passes."""

    name: ClassVar[str]

    def expand(self) -> str:
        """The passes this stands for, as pipeline text without an anchor."""
        raise NotImplementedError


P = TypeVar("P", bound=type[Pass])
Q = TypeVar("Q", bound=type[Pipeline])

PASSES: dict[str, type[Pass]] = {}
PIPELINES: dict[str, type[Pipeline]] = {}
_STAGES: dict[str, list[tuple[int, str]]] = {}


def register_pass(name: str, *, stage: str = "", rank: int = 0) -> Callable[[P], P]:
    """Class decorator: registers a pass under its pipeline name.

    Args:
      name: as written in a pipeline and, with two dashes, on the command line.
      stage: the named pipeline this pass joins (`"raise"`, `"lower"`), if any.
      rank: its place in the stage, lower first; larger structures raise first.
    """

    def register(cls: P) -> P:
        cls.name = name
        PASSES[name] = cls
        if stage:
            _STAGES.setdefault(stage, []).append((rank, name))
        return cls

    return register


def register_pipeline(name: str) -> Callable[[Q], Q]:
    """Class decorator: registers a named pipeline."""

    def register(cls: Q) -> Q:
        cls.name = name
        PIPELINES[name] = cls
        return cls

    return register


@register_pipeline("raise")
@dataclass(frozen=True)
class Raise(Pipeline):
    """Normalizes and raises every structure that is recognised."""

    def expand(self) -> str:
        return ",".join(["normalize", *_stage("raise")])


@register_pipeline("lower")
@dataclass(frozen=True)
class Lower(Pipeline):
    """Replaces composites by kernels of the target."""

    def expand(self) -> str:
        return ",".join([*_stage("lower"), "symbol-dce"])


@register_pipeline("inference")
@dataclass(frozen=True)
class Inference(Pipeline):
    """Everything for an inference graph: raise, then lower.

    Options:
      weights: `int8` hoists and quantizes the weights in between.
      exclude: weights to leave as they are; see `quantize`.
      parameters: which arguments are weights; see `hoist-weights`.
    """

    weights: str = ""
    exclude: str = ""
    parameters: str = ""

    def __post_init__(self) -> None:
        if not self.weights and (self.exclude or self.parameters):
            raise HloOptError("error: 'inference' takes exclude and parameters with weights=int8")

    def expand(self) -> str:
        if not self.weights:
            return "raise,lower"
        hoist = _text("hoist-weights", parameters=self.parameters)
        quantize = _text("quantize", weights=self.weights, exclude=self.exclude)
        return f"raise,{hoist},{quantize},lower"


def _text(name: str, **options: str) -> str:
    """A pass with those options that are not empty, as pipeline text."""
    given = [f'{key}="{value}"' for key, value in options.items() if value]
    return f"{name}{{{' '.join(given)}}}"


def _stage(name: str) -> list[str]:
    return [pass_name for _, pass_name in sorted(_STAGES.get(name, []))]


# C++ passes and the anchor they may run on, found by running each of them with jaxlib 0.10.2 and
# 0.12.0. A pass under the wrong anchor can abort the process, so nothing else reaches MLIR.
# MLIR's `inline` is left out: no inliner interface is registered for these dialects, so it does
# nothing; ours has its name.
_ANY = "any"
_ON_ANY = """
    canonicalize control-flow-sink cse generate-runtime-verification
    loop-invariant-code-motion loop-invariant-subset-hoisting mem2reg print-ir print-op-stats
    remove-dead-values sccp snapshot-op-locations sroa stablehlo-legalize-to-linalg
    strip-debuginfo symbol-privatize topological-sort trivial-dce view-op-graph
"""
_ON_MODULE = """
    sdy-add-data-flow-edges sdy-aggressive-propagate sdy-basic-propagate sdy-close-shardings
    sdy-export-pipeline sdy-import-pipeline sdy-inline-meshes sdy-lift-inlined-meshes
    sdy-manual-axes-cleanup sdy-op-priority-propagate sdy-propagation-pipeline
    sdy-remove-propagation-debug-info sdy-remove-sharding-groups sdy-sharding-group-import
    sdy-update-non-divisible-input-output-shardings sdy-user-priority-propagate
    stablehlo-compatibility-expander stablehlo-convert-to-signless stablehlo-legalize-to-vhlo
    stablehlo-refine-arguments stablehlo-refine-shapes stablehlo-wrap-in-composite symbol-dce
    vhlo-legalize-to-stablehlo vhlo-to-version
"""
_ON_FUNCTION = """
    chlo-legalize-to-stablehlo sdy-drop-sharding-rules sdy-insert-explicit-reshards
    sdy-populate-op-sharding-rules sdy-reshard-to-collectives
    sdy-sharding-constraint-to-reshard sdy-sink-data-flow-edges shape-legalize-to-stablehlo
    stablehlo-canonicalize-dynamism stablehlo-check-shape-assertions
    stablehlo-complex-math-expander stablehlo-legalize-composite-to-call
    stablehlo-legalize-deprecated-ops stablehlo-legalize-qdq-to-quantized-op
    stablehlo-legalize-quant-to-math stablehlo-legalize-quantized-op-to-qdq
"""
CXX_PASSES: dict[str, str] = {
    name: anchor
    for anchor, names in ((_ANY, _ON_ANY), (MODULE, _ON_MODULE), (FUNCTION, _ON_FUNCTION))
    for name in names.split()
}


def load_passes() -> None:
    """Registers the passes that come with hlo-opt."""
    importlib.import_module("hlo_opt.passes")


@dataclass(frozen=True)
class Node:
    """One element of a parsed pipeline: a pass with options, or an anchor with children."""

    name: str
    options: str = ""
    children: tuple[Node, ...] | None = None

    def __str__(self) -> str:
        options = f"{{{self.options}}}" if self.options else ""
        children = "" if self.children is None else f"({','.join(map(str, self.children))})"
        return f"{self.name}{options}{children}"


def parse_pipeline(text: str) -> Node:
    """Parses MLIR's textual pipeline syntax; a bare list of passes is anchored on the module.

    Raises:
      HloOptError: the text is not a pipeline.
    """
    nodes, rest = _parse_list(text.strip(), text)
    if rest:
        raise _syntax(text, f"unexpected {rest[0]!r}")
    if len(nodes) == 1 and nodes[0].name == MODULE and nodes[0].children is not None:
        return nodes[0]
    return Node(MODULE, children=nodes)


def _syntax(text: str, problem: str) -> HloOptError:
    return HloOptError(f"error: invalid pass pipeline '{text}': {problem}")


def _parse_list(rest: str, text: str) -> tuple[tuple[Node, ...], str]:
    nodes: list[Node] = []
    while rest and not rest.startswith(")"):
        match = re.match(r"\s*([A-Za-z][\w.-]*)\s*", rest)
        if match is None:
            raise _syntax(text, f"expected a pass name at '{rest}'")
        name, rest = match.group(1), rest[match.end() :]
        options, children = "", None
        if rest.startswith("{"):
            options, rest = _braces(rest, text)
        if rest.startswith("("):
            children, rest = _parse_list(rest[1:], text)
            if not rest.startswith(")"):
                raise _syntax(text, "missing ')'")
            rest = rest[1:].lstrip()
        nodes.append(Node(name, options, children))
        if rest.startswith(","):
            rest = rest[1:].lstrip()
            if not rest or rest.startswith(")"):
                raise _syntax(text, "expected a pass name after ','")
        elif rest and not rest.startswith(")"):
            raise _syntax(text, f"expected ',' or ')' at '{rest}'")
    return tuple(nodes), rest


def _braces(rest: str, text: str) -> tuple[str, str]:
    """The text inside balanced braces, and what follows them."""
    depth = 0
    for place, character in enumerate(rest):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return rest[1:place].strip(), rest[place + 1 :].lstrip()
    raise _syntax(text, "missing '}'")


@dataclass(frozen=True)
class CxxPass:
    """A C++ pass (or a nest of them) that goes to MLIR's pass manager as text."""

    text: str

    @property
    def name(self) -> str:
        return self.text

    def __str__(self) -> str:
        return self.text


def resolve(pipeline: str | Node) -> list[Pass | CxxPass]:
    """Checks a pipeline and returns its steps, named pipelines expanded.

    Raises:
      HloOptError: unknown pass, unknown or wrong option, pass under the wrong anchor, bad syntax.
    """
    load_passes()
    root = parse_pipeline(pipeline) if isinstance(pipeline, str) else pipeline
    if root.options:
        raise HloOptError(f"error: '{MODULE}' takes no options")
    return list(_resolve_children(root))


def _resolve_children(root: Node) -> Iterator[Pass | CxxPass]:
    for node in root.children or ():
        if node.children is not None:
            _check_nest(node)
            yield CxxPass(str(node))
        elif node.name in PIPELINES:
            named = _with_options(PIPELINES[node.name], node)
            yield from _resolve_children(parse_pipeline(named.expand()))
        elif node.name in PASSES:
            yield _with_options(PASSES[node.name], node)
        else:
            _check_anchor(node, MODULE)
            yield CxxPass(str(node))


def _check_nest(node: Node) -> None:
    """Checks an anchor with children, all of which must be C++ passes."""
    if node.name not in (FUNCTION, _ANY):
        raise HloOptError(
            f"error: cannot nest a pipeline on '{node.name}': only '{FUNCTION}' and '{_ANY}' "
            f"inside '{MODULE}'"
        )
    for child in node.children or ():
        if child.children is not None:
            raise HloOptError(f"error: cannot nest '{child.name}' inside '{node.name}'")
        if child.name in PASSES or child.name in PIPELINES:
            raise HloOptError(
                f"error: pass '{child.name}' runs on '{MODULE}', not inside '{node.name}'"
            )
        _check_anchor(child, node.name)


def _check_anchor(node: Node, anchor: str) -> None:
    wanted = CXX_PASSES.get(node.name)
    if wanted is None:
        names = [*PASSES, *PIPELINES, *CXX_PASSES]
        close = difflib.get_close_matches(node.name, names, 1)
        hint = f"; did you mean '{close[0]}'?" if close else "; see --list-passes"
        raise HloOptError(f"error: unknown pass '{node.name}'{hint}")
    if wanted not in (_ANY, anchor):
        where = f"'{wanted}({node.name})'" if wanted == FUNCTION else f"directly in '{MODULE}'"
        raise HloOptError(f"error: pass '{node.name}' cannot run on '{anchor}': write it {where}")


T = TypeVar("T", bound=Pass | Pipeline)


def _with_options(cls: type[T], node: Node) -> T:
    """Makes a pass from `key=value` options, checking names and types."""
    known = pass_options(cls)
    values: dict[str, Any] = {}
    for key, value in _split_options(node.options):
        if key not in known:
            listing = ", ".join(known) or "none"
            raise HloOptError(
                f"error: pass '{node.name}' has no option '{key}' (options: {listing})"
            )
        option = known[key]
        values[option.field] = _convert(node.name, option, value)
    return cls(**values)


def _split_options(text: str) -> Iterator[tuple[str, str | None]]:
    for match in re.finditer(r"""([\w-]+)(?:=((?:"[^"]*"|'[^']*'|\{[^}]*\}|[^\s"'])+))?""", text):
        value = match.group(2)
        yield match.group(1), value.strip("\"'") if value is not None else None


@dataclass(frozen=True)
class Option:
    """An option of a pass: dataclass field, its type and its default."""

    field: str
    type: type
    default: Any


def pass_options(cls: type[Any]) -> dict[str, Option]:
    """The options of a pass or named pipeline by their name on the command line."""
    if not dataclasses.is_dataclass(cls):
        return {}
    hints = typing.get_type_hints(cls)
    return {
        f.name.replace("_", "-"): Option(f.name, hints[f.name], f.default)
        for f in dataclasses.fields(cls)
    }


def _convert(pass_name: str, option: Option, text: str | None) -> Any:
    name = option.field.replace("_", "-")
    if option.type is bool:
        if text in (None, "true", "1"):
            return True
        if text in ("false", "0"):
            return False
    elif text is not None:
        try:
            return text if option.type in (str, str | None) else option.type(text)
        except ValueError:
            pass
    wanted = getattr(option.type, "__name__", str(option.type))
    raise HloOptError(
        f"error: option '{name}' of pass '{pass_name}' takes {wanted}, got '{text or ''}'"
    )


def _print_options(instance: Pass) -> str:
    """Options that differ from their defaults, as pipeline text."""
    parts = []
    for name, option in pass_options(type(instance)).items():
        value = getattr(instance, option.field)
        if value != option.default:
            text = str(value).lower() if isinstance(value, bool) else str(value)
            parts.append(f"{name}={text}" if " " not in text else f'{name}="{text}"')
    return f"{{{' '.join(parts)}}}" if parts else ""


def print_pipeline(steps: Sequence[Pass | CxxPass]) -> str:
    """The textual form of resolved steps; `resolve` gives the same steps back."""
    return f"{MODULE}({','.join(map(str, steps))})"


class Instrumentation(Protocol):
    """Watches a run. With one in place, every C++ pass runs by itself."""

    def before(self, name: str, module: ir.Module) -> None:
        """Called before a step."""

    def after(self, name: str, module: ir.Module) -> None:
        """Called after a step that succeeded."""

    def failed(self, name: str, module: ir.Module, rest: str) -> None:
        """Called after a step that failed; `rest` is the pipeline from that step on."""


def run_pipeline(
    module: ir.Module,
    pipeline: str | Sequence[Pass | CxxPass],
    ctx: PassContext,
    *,
    verify_each: bool = True,
    instrumentation: Sequence[Instrumentation] = (),
) -> ir.Module:
    """Runs a pipeline on a copy of a module.

    Args:
      module: left as it is, also when a pass fails.
      pipeline: text, or the steps that `resolve` gave.
      ctx: target, and where remarks go.
      verify_each: verify the module after every step.
      instrumentation: watchers of the run.

    Returns:
      the rewritten copy.

    Raises:
      HloOptError: the pipeline is wrong or a pass failed.
    """
    steps = resolve(pipeline) if isinstance(pipeline, str) else list(pipeline)
    copy = clone(module)
    groups = list(_grouped(steps, single=bool(instrumentation)))
    for number, group in enumerate(groups):
        name = ",".join(map(str, group))
        for watcher in instrumentation:
            watcher.before(name, copy)
        try:
            _run_group(group, copy, ctx)
            if verify_each:
                _verify(copy, name)
        except Exception:
            rest = print_pipeline([step for later in groups[number:] for step in later])
            for watcher in instrumentation:
                watcher.failed(name, module, rest)
            raise
        for watcher in instrumentation:
            watcher.after(name, copy)
    return copy


def _grouped(steps: Sequence[Pass | CxxPass], single: bool) -> Iterator[list[Pass] | list[CxxPass]]:
    run: list[CxxPass] = []
    for step in steps:
        if isinstance(step, CxxPass):
            run.append(step)
            if single:
                yield run
                run = []
            continue
        if run:
            yield run
            run = []
        yield [step]
    if run:
        yield run


def _run_group(
    group: Sequence[Pass] | Sequence[CxxPass], module: ir.Module, ctx: PassContext
) -> None:
    first = group[0]
    if isinstance(first, Pass):
        first.run(module, ctx)
        return
    compat.register_passes()
    text = f"{MODULE}({','.join(map(str, group))})"
    with module.context:
        try:
            manager = passmanager.PassManager.parse(text)
        except (ValueError, ir.MLIRError) as error:
            reason = " ".join(str(error).split())
            raise HloOptError(f"error: invalid pass pipeline '{text}': {reason}") from None
        try:
            manager.run(module.operation)
        except ir.MLIRError as error:
            raise first_diagnostic(error, "-") from None


def _verify(module: ir.Module, name: str) -> None:
    try:
        module.operation.verify()
    except ir.MLIRError as error:
        problem = first_diagnostic(error, "-")
        raise HloOptError(
            f"{problem.message} (after pass '{name}')", location=problem.location
        ) from None
