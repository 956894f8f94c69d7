// RUN: hlo-opt %s | FileCheck %s
// RUN: hlo-opt %s --emit=bytecode | hlo-opt | FileCheck %s
// RUN: hlo-opt %s --mlir-print-op-generic | FileCheck %s --check-prefix=GENERIC

// CHECK-LABEL: func.func @main
// CHECK-NEXT: stablehlo.add
// GENERIC: "stablehlo.add"
func.func @main(%a: tensor<2xf32>) -> tensor<2xf32> {
  %0 = stablehlo.add %a, %a : tensor<2xf32>
  return %0 : tensor<2xf32>
}

// CHECK-LABEL: func.func @quantized
// CHECK-SAME: !quant.uniform<i8:f32, 5.000000e-01>
func.func @quantized(%a: tensor<2x!quant.uniform<i8:f32, 0.5>>) -> tensor<2x!quant.uniform<i8:f32, 0.5>> {
  return %a : tensor<2x!quant.uniform<i8:f32, 0.5>>
}
