// RUN: hlo-opt %s --raise-softmax | FileCheck %s
// RUN: hlo-opt %s --raise-softmax --verify-diagnostics

// CHECK-LABEL: @softmax
// CHECK-NEXT: stablehlo.composite "hlo_opt.softmax" %arg0 {composite_attributes = {axis = 1 : i64}, decomposition = @hlo_opt.softmax.impl, version = 1 : i32}
// CHECK-NEXT: return
func.func @softmax(%x: tensor<4x8xf32>) -> tensor<4x8xf32> {
  %low = stablehlo.constant dense<0xFF800000> : tensor<f32>
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  %max = stablehlo.reduce(%x init: %low) applies stablehlo.maximum across dimensions = [1] : (tensor<4x8xf32>, tensor<f32>) -> tensor<4xf32>
  %maxb = stablehlo.broadcast_in_dim %max, dims = [0] : (tensor<4xf32>) -> tensor<4x8xf32>
  %sub = stablehlo.subtract %x, %maxb : tensor<4x8xf32>
  %exp = stablehlo.exponential %sub : tensor<4x8xf32>
  %sum = stablehlo.reduce(%exp init: %zero) applies stablehlo.add across dimensions = [1] : (tensor<4x8xf32>, tensor<f32>) -> tensor<4xf32>
  %sumb = stablehlo.broadcast_in_dim %sum, dims = [0] : (tensor<4xf32>) -> tensor<4x8xf32>
  // expected-remark@+1 {{softmax raised: 4x8, axis 1}}
  %div = stablehlo.divide %exp, %sumb : tensor<4x8xf32>
  return %div : tensor<4x8xf32>
}

// The exponentials are also returned: they have to be computed anyway.
// CHECK-LABEL: @used_elsewhere
// CHECK-NOT: composite
// CHECK: return
func.func @used_elsewhere(%x: tensor<4x8xf32>) -> (tensor<4x8xf32>, tensor<4x8xf32>) {
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  // expected-remark@+1 {{softmax missed: an intermediate result of the softmax is also used elsewhere}}
  %exp = stablehlo.exponential %x : tensor<4x8xf32>
  %sum = stablehlo.reduce(%exp init: %zero) applies stablehlo.add across dimensions = [1] : (tensor<4x8xf32>, tensor<f32>) -> tensor<4xf32>
  %sumb = stablehlo.broadcast_in_dim %sum, dims = [0] : (tensor<4xf32>) -> tensor<4x8xf32>
  %div = stablehlo.divide %exp, %sumb : tensor<4x8xf32>
  return %div, %exp : tensor<4x8xf32>, tensor<4x8xf32>
}
