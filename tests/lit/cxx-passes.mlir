// RUN: hlo-opt %s --cse | FileCheck %s
// RUN: hlo-opt %s --pass-pipeline='builtin.module(func.func(cse,canonicalize{max-iterations=3}))' | FileCheck %s
// RUN: hlo-opt < %s --cse - | FileCheck %s

// CHECK-LABEL: @main
// CHECK: stablehlo.add
// CHECK-NOT: stablehlo.add
func.func @main(%a: tensor<2xf32>) -> tensor<2xf32> {
  %0 = stablehlo.add %a, %a : tensor<2xf32>
  %1 = stablehlo.add %a, %a : tensor<2xf32>
  %2 = stablehlo.multiply %0, %1 : tensor<2xf32>
  return %2 : tensor<2xf32>
}
