// RUN: hlo-opt %s --hoist-weights='parameters=0-1' | FileCheck %s
// RUN: hlo-opt %s --hoist-weights='parameters=0-1' --hoist-weights | FileCheck %s
// RUN: hlo-opt %s --hoist-weights='parameters=0-1' --verify-diagnostics
// RUN: hlo-opt %s --hoist-weights='parameters=0-1' --verify-numerics
// RUN: not hlo-opt %s --hoist-weights 2>&1 | FileCheck %s --check-prefix=NONE

// NONE: error: no argument of 'main' is known to be a parameter: name them with parameters=

// CHECK: func.func public @prepare(%arg0: tensor<16x8xf32> {hlo_opt.parameter = "arg0"}, %arg1: tensor<16xf32> {hlo_opt.parameter = "arg1"}) -> (tensor<8x16xbf16>, tensor<16xf32>) attributes {hlo_opt.parameters = array<i64: 0, 1>} {
// CHECK-NEXT: stablehlo.transpose
// CHECK-NEXT: stablehlo.convert
// CHECK-NEXT: return

// CHECK: func.func @main(%arg0: tensor<8x16xbf16> {hlo_opt.prepared = "arg0"}, %arg1: tensor<16xf32> {hlo_opt.prepared = "arg1"}, %arg2: tensor<4x8xbf16>) -> tensor<4x16xf32> {
// CHECK-NEXT: stablehlo.broadcast_in_dim %arg1
// CHECK-NEXT: stablehlo.dot_general %arg2, %arg0
// CHECK-NEXT: stablehlo.add
// CHECK-NEXT: return

// expected-remark@+1 {{weights hoisted: @prepare turns 2 parameters (576 bytes) into the 2 values (320 bytes) that @main takes}}
func.func @main(%w: tensor<16x8xf32>, %b: tensor<16xf32>, %x: tensor<4x8xbf16>) -> tensor<4x16xf32> {
  %0 = stablehlo.transpose %w, dims = [1, 0] : (tensor<16x8xf32>) -> tensor<8x16xf32>
  %1 = stablehlo.convert %0 : (tensor<8x16xf32>) -> tensor<8x16xbf16>
  %2 = stablehlo.broadcast_in_dim %b, dims = [1] : (tensor<16xf32>) -> tensor<4x16xf32>
  %3 = stablehlo.dot_general %x, %1, contracting_dims = [1] x [0] : (tensor<4x8xbf16>, tensor<8x16xbf16>) -> tensor<4x16xf32>
  %4 = stablehlo.add %3, %2 : tensor<4x16xf32>
  return %4 : tensor<4x16xf32>
}
