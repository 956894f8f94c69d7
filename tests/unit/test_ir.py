"""Reading, writing, and symbolic indices."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxlib.mlir import ir

from hlo_opt import ir as hlo_ir
from hlo_opt.errors import HloOptError
from hlo_opt.ir.index import Index, Opaque, Space, Split, pull_back, shape_of
from hlo_opt.ir.walk import defining_op, functions, reduction, splat

IDENTITY = """func.func @main(%a: tensor<2xf32>) -> tensor<2xf32> {
  return %a : tensor<2xf32>
}
"""
QUANTIZED = IDENTITY.replace("2xf32", "2x!quant.uniform<i8:f32, 0.5>")


@pytest.mark.parametrize("text", [IDENTITY, QUANTIZED])
def test_round_trips(text: str) -> None:
    module = hlo_ir.parse(text)
    for format in set(hlo_ir.Format) - {hlo_ir.Format.JAX_EXPORT}:
        again = hlo_ir.parse(hlo_ir.serialize(module, format))
        assert str(again) == str(module)


def test_formats_are_detected_from_content(tmp_path: Path) -> None:
    path = tmp_path / "module.txt"
    path.write_bytes(hlo_ir.serialize(hlo_ir.parse(IDENTITY), hlo_ir.Format.BYTECODE))
    assert "@main" in str(hlo_ir.read(path))


def test_locations_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "model.mlir"
    path.write_text(IDENTITY)
    (function,) = functions(hlo_ir.read(path))
    assert f'"{path}":1' in str(function.location)


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("func.func @f( {", "-:1:14: error: expected non-function type"),
        (
            hlo_ir.serialize(hlo_ir.parse(IDENTITY), hlo_ir.Format.BYTECODE)[:60],
            "attempting to parse",
        ),
        (b"\xff\xfe\x00", "not MLIR text, MLIR bytecode, a StableHLO"),
        (IDENTITY.replace("-> tensor<2xf32>", "-> tensor<3xf32>"), "doesn't match"),
    ],
)
def test_bad_input(source: str | bytes, problem: str) -> None:
    with pytest.raises(HloOptError) as error:
        hlo_ir.parse(source)
    assert problem in str(error.value)
    assert "\n" not in str(error.value)


def test_clone_is_a_module_of_its_own() -> None:
    module = hlo_ir.parse("module @m attributes {a.b = 1 : i32} {" + IDENTITY + "}")
    copy = hlo_ir.clone(module)
    assert str(copy) == str(module)
    next(functions(copy)).erase()
    assert len(list(functions(module))) == 1


def test_walk_helpers() -> None:
    module = hlo_ir.parse("""
    func.func @main(%x: tensor<2x3xf32>) -> (tensor<2xf32>, tensor<4xf32>) {
      %c = stablehlo.constant dense<2.5> : tensor<f32>
      %b = stablehlo.broadcast_in_dim %c, dims = [] : (tensor<f32>) -> tensor<4xf32>
      %z = stablehlo.constant dense<0.0> : tensor<f32>
      %r = stablehlo.reduce(%x init: %z) applies stablehlo.add across dimensions = [1]
        : (tensor<2x3xf32>, tensor<f32>) -> tensor<2xf32>
      return %r, %b : tensor<2xf32>, tensor<4xf32>
    }""")
    (function,) = functions(module)
    returned = list(function.regions[0].blocks[0].operations)[-1].operation
    reduce, broadcast = returned.operands
    assert splat(broadcast) == 2.5
    assert splat(function.regions[0].blocks[0].arguments[0]) is None
    assert reduction(defining_op(reduce)) == ("stablehlo.add", [1])


def evaluate(index: Index, values: dict[int, int]) -> int:
    return index.offset + sum(stride * values[atom] for atom, stride in index.terms)


def source_element(value: ir.Value, position: tuple[int, ...]) -> tuple[int, ...]:
    """Where element `position` of `value` comes from, by the definition of each op."""
    op = defining_op(value)
    if op is None:
        return position
    operand = shape_of(op.operands[0])
    if op.name == "stablehlo.transpose":
        permutation = list(ir.DenseI64ArrayAttr(op.attributes["permutation"]))
        source = [0] * len(operand)
        for here, there in enumerate(permutation):
            source[there] = position[here]
    elif op.name == "stablehlo.reshape":
        flat = np.ravel_multi_index(position, shape_of(value)) if position else 0
        source = list(np.unravel_index(flat, operand)) if operand else []
    elif op.name == "stablehlo.broadcast_in_dim":
        dims = list(ir.DenseI64ArrayAttr(op.attributes["broadcast_dimensions"]))
        source = [0 if s == 1 else position[d] for d, s in zip(dims, operand, strict=True)]
    else:
        starts = ir.DenseI64ArrayAttr(op.attributes["start_indices"])
        strides = ir.DenseI64ArrayAttr(op.attributes["strides"])
        source = [a + p * s for a, p, s in zip(starts, position, strides, strict=True)]
    return source_element(op.operands[0], tuple(int(i) for i in source))


@st.composite
def layout_chains(draw: st.DrawFn) -> str:
    """A function that applies random layout ops to its argument."""
    shape = draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=3))
    lines, value, first = [], "%arg", f"tensor<{'x'.join(map(str, shape))}xf32>"
    current = first
    for number in range(draw(st.integers(1, 5))):
        kind = draw(st.sampled_from(["transpose", "reshape", "broadcast", "slice"]))
        if kind == "transpose":
            order = draw(st.permutations(range(len(shape))))
            shape = [shape[i] for i in order]
            text = f"stablehlo.transpose {value}, dims = {list(order)}"
        elif kind == "reshape":
            factors = [f for s in shape for f in ([2, 2] if s == 4 else [s])]
            cuts = draw(st.lists(st.booleans(), min_size=len(factors), max_size=len(factors)))
            shape = []
            for factor, cut in zip(factors, cuts, strict=True):
                if cut or not shape:
                    shape.append(factor)
                else:
                    shape[-1] *= factor
            text = f"stablehlo.reshape {value}"
        elif kind == "broadcast":
            place = draw(st.integers(0, len(shape)))
            dims = [d for d in range(len(shape) + 1) if d != place]
            shape = [*shape[:place], draw(st.sampled_from([1, 2, 3])), *shape[place:]]
            text = f"stablehlo.broadcast_in_dim {value}, dims = {dims}"
        else:
            limits = [(draw(st.integers(0, s - 1)), s) for s in shape]
            shape = [high - low for low, high in limits]
            text = f"stablehlo.slice {value} [{', '.join(f'{a}:{b}' for a, b in limits)}]"
        result = f"tensor<{'x'.join(map(str, shape))}xf32>"
        lines.append(f"%{number} = {text} : ({current}) -> {result}")
        value, current = f"%{number}", result
    body = "\n".join(lines)
    return f"func.func @main(%arg: {first}) -> {current} {{\n{body}\nreturn {value} : {current}\n}}"


@settings(max_examples=200, deadline=None)
@given(layout_chains())
def test_pull_back_finds_the_source_of_every_element(text: str) -> None:
    module = hlo_ir.parse(text)
    (function,) = functions(module)
    value = list(function.regions[0].blocks[0].operations)[-1].operation.operands[0]
    space = Space()
    start = [space.new(size) for size in shape_of(value)]
    while True:
        index, current = [space.refine(i) for i in start], value
        try:
            while (op := defining_op(current)) is not None:
                index, current = pull_back(op, index, space), op.operands[0]
            break
        except Split as request:
            space.split(request)
        except Opaque:
            return  # refusing is always right
    refined = [space.refine(i) for i in start]
    atoms = sorted({atom for i in refined for atom in i.atoms})
    for choice in itertools.product(*(range(space.sizes[atom]) for atom in atoms)):
        values = dict(zip(atoms, choice, strict=True))
        position = tuple(evaluate(i, values) for i in refined)
        assert source_element(value, position) == tuple(evaluate(i, values) for i in index)
