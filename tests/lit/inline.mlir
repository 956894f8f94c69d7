// RUN: hlo-opt %s --inline --symbol-dce | FileCheck %s
// RUN: hlo-opt %s --inline='max-ops=1' | FileCheck %s --check-prefix=SMALL

// CHECK-LABEL: @main
// CHECK-NOT: call
// CHECK: stablehlo.tanh
// CHECK: stablehlo.tanh
// CHECK-NOT: @helper
// SMALL: call @helper
func.func @main(%a: tensor<2xf32>) -> tensor<2xf32> {
  %0 = call @helper(%a) : (tensor<2xf32>) -> tensor<2xf32>
  %1 = call @helper(%0) : (tensor<2xf32>) -> tensor<2xf32>
  return %1 : tensor<2xf32>
}
func.func private @helper(%a: tensor<2xf32>) -> tensor<2xf32> {
  %0 = stablehlo.tanh %a : tensor<2xf32>
  return %0 : tensor<2xf32>
}
