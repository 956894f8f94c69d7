"""Portable artifacts, `jax.export` files and `--split-input-file`."""

from __future__ import annotations

import io
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jaxlib.mlir.dialects import stablehlo

import hlo_opt
from hlo_opt import ir as hlo_ir
from hlo_opt.driver import Driver
from hlo_opt.errors import HloOptError
from hlo_opt.ir.module import Format, format_of, serialize

S, D = 128, 64
QKV = [jax.ShapeDtypeStruct((1, S, 2, D), jnp.float32)] * 3


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    x = jnp.einsum("bqhd,bkhd->bhqk", q, k) * D**-0.5
    x = jnp.where(jnp.tril(jnp.ones((S, S), bool)), x, -1e30)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(x, axis=-1), v)


def driver(*argv: str, stdin: bytes = b"") -> tuple[int, bytes, str]:
    out, err = io.BytesIO(), io.StringIO()
    status = Driver(argv, stdin=io.BytesIO(stdin), stdout=out, stderr=err).run()
    return status, out.getvalue(), err.getvalue()


def artifact() -> bytes:
    return serialize(hlo_ir.parse(jax.jit(attention).lower(*QKV).as_text()), Format.ARTIFACT)


def exported_file(platform: str = "cpu") -> bytes:
    return bytes(export.export(jax.jit(attention), platforms=[platform])(*QKV).serialize())


QUANT = """func.func @main(%a: tensor<4xf32>) -> tensor<4xf32> {
  %0 = stablehlo.uniform_quantize %a : (tensor<4xf32>) -> tensor<4x!quant.uniform<i8:f32, 0.5>>
  %1 = stablehlo.uniform_dequantize %0 :
    (tensor<4x!quant.uniform<i8:f32, 0.5>>) -> tensor<4xf32>
  return %1 : tensor<4xf32>
}
"""


def test_formats_are_told_apart_by_content() -> None:
    module = hlo_ir.parse(QUANT)
    for format in (Format.MLIR, Format.BYTECODE, Format.ARTIFACT):
        assert format_of(serialize(module, format)) is format
    assert format_of(exported_file()) is Format.JAX_EXPORT


def test_artifact_round_trip_keeps_composites_and_their_functions() -> None:
    status, first, err = driver("-", "--raise", "--emit=artifact", stdin=artifact())
    assert status == 0, err
    status, text, _ = driver("-", stdin=first)
    assert status == 0
    assert b'composite "hlo_opt.attention"' in text
    assert b"score = @hlo_opt.attention.score" in text
    assert serialize(hlo_ir.parse(first), Format.ARTIFACT) == first
    # What was read lowers like what was written.
    status, lowered, _ = driver("-", "--lower", "--target=v5e", stdin=first)
    assert status == 0
    assert b"tpu_custom_call" in lowered


def test_strings_of_artifacts_are_not_taken_for_symbols() -> None:
    """JAX renames functions when it merges modules, the strings keep the old names."""
    module = hlo_ir.parse(driver("-", "--raise", stdin=artifact())[1])
    data = serialize(module, Format.ARTIFACT)
    with_note = hlo_ir.parse(data)
    assert "hlo_opt.symbols" not in str(with_note)
    without = stablehlo.deserialize_portable_artifact(module.context, data)
    del without.operation.attributes["hlo_opt.symbols"]
    plain = stablehlo.serialize_portable_artifact(without, stablehlo.get_current_version())
    result = hlo_opt.apply(plain, "lower", target="v5e")
    (remark,) = result.remarks
    assert remark.kind == "missed"
    assert "attribute" in remark.message


def test_quantized_types_survive_every_format() -> None:
    module = hlo_ir.parse(QUANT)
    for format in (Format.BYTECODE, Format.ARTIFACT):
        back = hlo_ir.parse(serialize(module, format))
        assert "!quant.uniform<i8:f32, 5.000000e-01>" in str(back)


def test_artifact_versions() -> None:
    old = serialize(hlo_ir.parse(QUANT), Format.ARTIFACT, artifact_version="1.0.0")
    assert b"StableHLO_v1.0.0" in old[:32]
    assert hlo_ir.parse(old)
    status, out, err = driver("-", "--emit=artifact", "--artifact-version=1.0.0", stdin=old)
    assert (status, out) == (0, old), err
    status, out, err = driver("-", "--emit=artifact", "--artifact-version=99.0.0", stdin=old)
    assert (status, out) == (1, b"")
    assert "no portable artifact of version 99.0.0" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("kind", ["artifact", "export", "bytecode", "noise"])
@pytest.mark.parametrize("cut", [0.1, 0.5, 0.9])
def test_truncated_files_are_one_clear_error(
    kind: str, cut: float, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    module = hlo_ir.parse(QUANT)
    data = {
        "artifact": lambda: serialize(module, Format.ARTIFACT),
        "export": exported_file,
        "bytecode": lambda: serialize(module, Format.BYTECODE),
        "noise": lambda: b"\xff\x00\xfe" * 200,
    }[kind]()
    path, output = tmp_path / "in", tmp_path / "out"
    path.write_bytes(data[: int(len(data) * cut)])
    status, _, err = driver(str(path), "-o", str(output))
    assert status == 1
    assert err.count("\n") == 1
    assert "error:" in err
    assert str(path) in err
    assert not output.exists()
    assert capfd.readouterr() == ("", "")  # nothing from MLIR itself


def test_jax_export_in_and_out(tmp_path: Path) -> None:
    path, output = tmp_path / "in.jax", tmp_path / "out.jax"
    path.write_bytes(exported_file())
    status, _, err = driver(str(path), "--raise", "--emit=jax-export", "-o", str(output))
    assert status == 0, err
    before, after = (export.deserialize(bytearray(p.read_bytes())) for p in (path, output))
    assert "hlo_opt.attention" in after.mlir_module()
    assert "hlo_opt.attention" not in before.mlir_module()
    random = np.random.default_rng(0)
    values = [random.standard_normal(a.shape, np.float32) for a in QKV]
    np.testing.assert_allclose(after.call(*values), before.call(*values), atol=1e-6)


def test_kernels_need_an_export_for_tpu(tmp_path: Path) -> None:
    for platform, status in (("cpu", 1), ("tpu", 0)):
        path, output = tmp_path / "in.jax", tmp_path / f"{platform}.jax"
        path.write_bytes(exported_file(platform))
        found, _, err = driver(
            str(path), "--inference", "--target=v5e", "--emit=jax-export", "-o", str(output)
        )
        assert found == status, err
        assert output.exists() == (status == 0)
    assert "tpu_custom_call" in export.deserialize(bytearray(output.read_bytes())).mlir_module()


def test_only_an_export_becomes_one_and_only_with_its_signature(tmp_path: Path) -> None:
    status, out, err = driver("-", "--emit=jax-export", stdin=QUANT.encode())
    assert (status, out) == (1, b"")
    assert "needs a jax.export file as input" in err
    text = "func.func @main(%a: tensor<4xf32>) -> tensor<4xf32> { return %a : tensor<4xf32> }"
    exported = export.deserialize(bytearray(exported_file()))
    from hlo_opt.ir.exported import replace_module

    with pytest.raises(HloOptError, match="changed the signature of 'main'"):
        replace_module(exported, hlo_ir.parse(text))


def test_optimize_takes_exports() -> None:
    exported = export.export(jax.jit(attention), platforms=["tpu"])(*QKV)
    rewritten = hlo_opt.optimize(exported, target="v6e")
    assert "tpu_custom_call" in rewritten.mlir_module()
    assert "tpu_custom_call" not in exported.mlir_module()
    with pytest.raises(HloOptError, match="is for cpu, the target is 'v6e'"):
        hlo_opt.optimize(export.deserialize(bytearray(exported_file())), target="v6e")
    assert hlo_opt.apply(exported_file(), "raise").remarks


def test_polymorphic_exports_can_still_be_called() -> None:
    (batch,) = export.symbolic_shape("b")
    shapes = [jax.ShapeDtypeStruct((batch, S, 2, D), jnp.float32)] * 3

    def both(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        fixed = jnp.ones((1, S, 2, D)) * q[0, 0, 0, 0]
        return attention(q, k, v) + attention(fixed, fixed, fixed)

    exported = export.export(jax.jit(both))(*shapes)
    rewritten = hlo_opt.optimize(exported, "raise")
    values = [np.random.default_rng(0).standard_normal((3, S, 2, D), np.float32)] * 3
    np.testing.assert_allclose(rewritten.call(*values), exported.call(*values), atol=1e-6)


TWO = """func.func @main(%a: tensor<4xf32>) -> tensor<4xf32> {
  return %a : tensor<4xf32>
}
// -----
func.func @main(%a: tensor<8xf32>) -> tensor<8xf32> {
  %0 = stablehlo.add %a, %a : tensor<8xf32>
  return %a : tensor<8xf32>
}
"""


def test_split_input_file() -> None:
    status, out, err = driver("--split-input-file", "-", "--cse", stdin=TWO.encode())
    assert status == 0, err
    first, second = out.decode().split("// -----\n")
    assert "tensor<4xf32>" in first
    assert "tensor<8xf32>" in second
    assert "stablehlo.add" not in second
    # What is written can be read the same way.
    assert driver("--split-input-file", "-", "--cse", stdin=out)[1] == out


def test_split_with_another_marker() -> None:
    text = TWO.replace("// -----", "// next")
    assert driver("--split-input-file=// next", "-", stdin=text.encode())[0] == 0
    assert driver("--split-input-file", "-", stdin=text.encode())[0] == 1  # two @main


def test_split_errors_name_the_line_in_the_file_and_the_rest_is_processed(tmp_path: Path) -> None:
    path, output = tmp_path / "in.mlir", tmp_path / "out.mlir"
    bad = "func.func @main() { oops }\n"
    path.write_text(TWO + "// -----\n" + bad + "// -----\n" + bad)
    status, _, err = driver(str(path), "--split-input-file", "-o", str(output))
    assert status == 1
    assert not output.exists()
    assert [line.split(":")[:2] for line in err.splitlines()] == [
        [str(path), "10"],
        [str(path), "12"],
    ]


def test_split_remarks_name_the_file(tmp_path: Path) -> None:
    path, remarks = tmp_path / "in.mlir", tmp_path / "remarks.json"
    body = jax.jit(attention).lower(*QKV).as_text()
    path.write_text(f"{body}\n// -----\n{body}")
    argv = ("--split-input-file", "--raise", "--remarks", f"--remarks-output={remarks}")
    status, _, err = driver(str(path), *argv)
    assert status == 0
    said = [json.loads(line) for line in remarks.read_text().splitlines()]
    lines = [int(r["location"].rsplit(":", 1)[1]) for r in said if r["kind"] == "applied"]
    assert len(lines) == 2
    assert lines[1] - lines[0] == len(body.splitlines()) + 2  # an empty line and the marker
    assert err.count(f"{path}:{lines[1]}: remark: attention raised") == 1


def test_split_verifies_diagnostics_apart() -> None:
    good = "// expected-error@+1 {{custom op 'oops' is unknown}}\nfunc.func @main() { oops }\n"
    text = TWO + "// -----\n" + good
    argv = ("--split-input-file", "--verify-diagnostics", "-")
    assert driver(*argv, stdin=text.encode())[0] == 0
    status, _, err = driver(*argv, stdin=text.replace("oops' is", "ooops' is").encode())
    assert status == 1
    assert "-:11:" in err  # the line in the whole input


def test_only_text_can_be_split() -> None:
    for argv, data in (
        ((), serialize(hlo_ir.parse(QUANT), Format.BYTECODE)),
        (("--emit=bytecode",), QUANT.encode()),
    ):
        status, out, err = driver("--split-input-file", "-", *argv, stdin=data)
        assert (status, out) == (1, b"")
        assert "--split-input-file is for MLIR text" in err
