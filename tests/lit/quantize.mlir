// RUN: hlo-opt %s --inference='weights=int8 parameters=0-1' | FileCheck %s
// RUN: hlo-opt %s --inference='weights=int8 parameters=0-1' --quantize | FileCheck %s
// RUN: hlo-opt %s --inference='weights=int8 parameters=0-1' --verify-diagnostics
// RUN: hlo-opt %s --inference='weights=int8 parameters=0-1' --verify-numerics 2>&1 | FileCheck %s --check-prefix=BOUND
// RUN: not hlo-opt %s --quantize 2>&1 | FileCheck %s --check-prefix=ALONE
// RUN: not hlo-opt %s --inference='weights=int4' 2>&1 | FileCheck %s --check-prefix=TYPE

// BOUND: weights were quantized: 5% of the RMS and of the largest value are allowed on top
// BOUND-NEXT: numerical check holds
// ALONE: error: there is no @prepare to quantize weights in: run hoist-weights
// TYPE: error: weights can be quantized to 'int8', not to 'int4'

// CHECK: func.func public @prepare(
// CHECK: applies stablehlo.maximum across dimensions = [1]
// CHECK: stablehlo.round_nearest_even
// CHECK: return {{.*}} : tensor<64x128xi8>, tensor<64x8xf32>, tensor<64xf32>
// CHECK: func.func @main(%arg0: tensor<64x128xi8> {hlo_opt.prepared = "arg0"}, %arg1: tensor<64x8xf32> {hlo_opt.prepared = "arg1"}, %arg2: tensor<64xf32> {hlo_opt.prepared = "arg0"}, %arg3: tensor<4x128xbf16>)
// CHECK-NEXT: [[SCALE:%.*]] = stablehlo.broadcast_in_dim %arg2, dims = [1] : (tensor<64xf32>) -> tensor<4x64xf32>
// CHECK-NEXT: [[W:%.*]] = stablehlo.convert %arg0 : (tensor<64x128xi8>) -> tensor<64x128xbf16>
// CHECK-NEXT: [[DOT:%.*]] = stablehlo.dot_general %arg3, [[W]], contracting_dims = [1] x [1]
// CHECK-NEXT: [[MUL:%.*]] = stablehlo.multiply [[DOT]], [[SCALE]] : tensor<4x64xf32>
// CHECK-NEXT: stablehlo.convert [[MUL]] : (tensor<4x64xf32>) -> tensor<4x64xbf16>

// expected-remark@+1 {{weights hoisted: @prepare turns 2 parameters (18,432 bytes) into the 2 values (18,432 bytes)}}
func.func @main(%w: tensor<64x128xbf16>, %v: tensor<64x8xf32>, %x: tensor<4x128xbf16>) -> tensor<4x8xf32> {
  // expected-remark@+1 {{weight arg0 to int8: 64x128, 16,384 -> 8,448 bytes}}
  %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [1] : (tensor<4x128xbf16>, tensor<64x128xbf16>) -> tensor<4x64xbf16>
  %1 = stablehlo.convert %0 : (tensor<4x64xbf16>) -> tensor<4x64xf32>
  // expected-remark@+1 {{weight missed: arg1: 512 elements, fewer than min-elements=4096}}
  %2 = stablehlo.dot_general %1, %v, contracting_dims = [1] x [0] : (tensor<4x64xf32>, tensor<64x8xf32>) -> tensor<4x8xf32>
  return %2 : tensor<4x8xf32>
}
