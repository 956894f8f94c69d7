// RUN: hlo-opt %s --raise-attention | FileCheck %s
// RUN: hlo-opt %s --raise-attention --verify-diagnostics

// The division stands behind the second matmul: the composite ends there.
// CHECK-LABEL: @divided_after
// CHECK-NEXT: %0 = stablehlo.composite "hlo_opt.attention" %arg0, %arg1, %arg2
// CHECK-SAME: out_dims = ["query", "value_depth"]
// CHECK-SAME: (tensor<4x8xf32>, tensor<6x8xf32>, tensor<6x2xf32>) -> tensor<4x2xf32>
// CHECK-NEXT: return %0
func.func @divided_after(%q: tensor<4x8xf32>, %k: tensor<6x8xf32>, %v: tensor<6x2xf32>) -> tensor<4x2xf32> {
  %low = stablehlo.constant dense<0xFF800000> : tensor<f32>
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  %x = stablehlo.dot_general %q, %k, contracting_dims = [1] x [1] : (tensor<4x8xf32>, tensor<6x8xf32>) -> tensor<4x6xf32>
  %max = stablehlo.reduce(%x init: %low) applies stablehlo.maximum across dimensions = [1] : (tensor<4x6xf32>, tensor<f32>) -> tensor<4xf32>
  %maxb = stablehlo.broadcast_in_dim %max, dims = [0] : (tensor<4xf32>) -> tensor<4x6xf32>
  %sub = stablehlo.subtract %x, %maxb : tensor<4x6xf32>
  %exp = stablehlo.exponential %sub : tensor<4x6xf32>
  %sum = stablehlo.reduce(%exp init: %zero) applies stablehlo.add across dimensions = [1] : (tensor<4x6xf32>, tensor<f32>) -> tensor<4xf32>
  %pv = stablehlo.dot_general %exp, %v, contracting_dims = [1] x [0] : (tensor<4x6xf32>, tensor<6x2xf32>) -> tensor<4x2xf32>
  %sumb = stablehlo.broadcast_in_dim %sum, dims = [0] : (tensor<4xf32>) -> tensor<4x2xf32>
  // expected-remark@+1 {{attention raised: 1 heads, 4 x 6, depth 8}}
  %out = stablehlo.divide %pv, %sumb : tensor<4x2xf32>
  return %out : tensor<4x2xf32>
}

// Others merge it with more keys: maximum and sum are results.
// CHECK-LABEL: @part
// CHECK-NEXT: %0:3 = stablehlo.composite "hlo_opt.attention" %arg0, %arg1, %arg2
// CHECK-SAME: max_dims = ["query"]
// CHECK-SAME: sum_dims = ["query"]
// CHECK-NEXT: return %0#0, %0#1, %0#2
func.func @part(%q: tensor<4x8xf32>, %k: tensor<6x8xf32>, %v: tensor<6x2xf32>) -> (tensor<4x2xf32>, tensor<4xf32>, tensor<4xf32>) {
  %low = stablehlo.constant dense<0xFF800000> : tensor<f32>
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  %x = stablehlo.dot_general %q, %k, contracting_dims = [1] x [1] : (tensor<4x8xf32>, tensor<6x8xf32>) -> tensor<4x6xf32>
  %max = stablehlo.reduce(%x init: %low) applies stablehlo.maximum across dimensions = [1] : (tensor<4x6xf32>, tensor<f32>) -> tensor<4xf32>
  %maxb = stablehlo.broadcast_in_dim %max, dims = [0] : (tensor<4xf32>) -> tensor<4x6xf32>
  %sub = stablehlo.subtract %x, %maxb : tensor<4x6xf32>
  %exp = stablehlo.exponential %sub : tensor<4x6xf32>
  %pv = stablehlo.dot_general %exp, %v, contracting_dims = [1] x [0] : (tensor<4x6xf32>, tensor<6x2xf32>) -> tensor<4x2xf32>
  // expected-remark@+1 {{attention raised: 1 heads, 4 x 6, depth 8}}
  %sum = stablehlo.reduce(%exp init: %zero) applies stablehlo.add across dimensions = [1] : (tensor<4x6xf32>, tensor<f32>) -> tensor<4xf32>
  return %pv, %max, %sum : tensor<4x2xf32>, tensor<4xf32>, tensor<4xf32>
}

// One more column, cut off behind the softmax, is a sink.
// CHECK-LABEL: @sink
// CHECK-NEXT: stablehlo.composite "hlo_opt.attention" %arg0, %arg1, %arg2, %arg3
// CHECK-SAME: extra_dims = {{\[\[\]\]}}
// CHECK-SAME: sink = @hlo_opt.attention.sink
func.func @sink(%q: tensor<4x8xf32>, %k: tensor<6x8xf32>, %v: tensor<6x2xf32>, %s: tensor<f32>) -> tensor<4x2xf32> {
  %low = stablehlo.constant dense<0xFF800000> : tensor<f32>
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  %l = stablehlo.dot_general %q, %k, contracting_dims = [1] x [1] : (tensor<4x8xf32>, tensor<6x8xf32>) -> tensor<4x6xf32>
  %column = stablehlo.broadcast_in_dim %s, dims = [] : (tensor<f32>) -> tensor<4x1xf32>
  %x = stablehlo.concatenate %l, %column, dim = 1 : (tensor<4x6xf32>, tensor<4x1xf32>) -> tensor<4x7xf32>
  %max = stablehlo.reduce(%x init: %low) applies stablehlo.maximum across dimensions = [1] : (tensor<4x7xf32>, tensor<f32>) -> tensor<4xf32>
  %maxb = stablehlo.broadcast_in_dim %max, dims = [0] : (tensor<4xf32>) -> tensor<4x7xf32>
  %sub = stablehlo.subtract %x, %maxb : tensor<4x7xf32>
  %exp = stablehlo.exponential %sub : tensor<4x7xf32>
  %sum = stablehlo.reduce(%exp init: %zero) applies stablehlo.add across dimensions = [1] : (tensor<4x7xf32>, tensor<f32>) -> tensor<4xf32>
  %sumb = stablehlo.broadcast_in_dim %sum, dims = [0] : (tensor<4xf32>) -> tensor<4x7xf32>
  %p = stablehlo.divide %exp, %sumb : tensor<4x7xf32>
  %cut = stablehlo.slice %p [0:4, 0:6] : (tensor<4x7xf32>) -> tensor<4x6xf32>
  // expected-remark@+1 {{attention raised: 1 heads, 4 x 6, depth 8}}
  %out = stablehlo.dot_general %cut, %v, contracting_dims = [1] x [0] : (tensor<4x6xf32>, tensor<6x2xf32>) -> tensor<4x2xf32>
  return %out : tensor<4x2xf32>
}

// The first logit is cut off, not the column: no sink.
// CHECK-LABEL: @wrong_end
// CHECK-NOT: composite
// CHECK: return
func.func @wrong_end(%q: tensor<4x8xf32>, %k: tensor<6x8xf32>, %v: tensor<6x2xf32>, %s: tensor<f32>) -> tensor<4x2xf32> {
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  %l = stablehlo.dot_general %q, %k, contracting_dims = [1] x [1] : (tensor<4x8xf32>, tensor<6x8xf32>) -> tensor<4x6xf32>
  %column = stablehlo.broadcast_in_dim %s, dims = [] : (tensor<f32>) -> tensor<4x1xf32>
  %x = stablehlo.concatenate %l, %column, dim = 1 : (tensor<4x6xf32>, tensor<4x1xf32>) -> tensor<4x7xf32>
  %exp = stablehlo.exponential %x : tensor<4x7xf32>
  %sum = stablehlo.reduce(%exp init: %zero) applies stablehlo.add across dimensions = [1] : (tensor<4x7xf32>, tensor<f32>) -> tensor<4xf32>
  %sumb = stablehlo.broadcast_in_dim %sum, dims = [0] : (tensor<4xf32>) -> tensor<4x7xf32>
  %p = stablehlo.divide %exp, %sumb : tensor<4x7xf32>
  // expected-remark@+1 {{attention missed: the column that is cut off behind the softmax is no sink}}
  %cut = stablehlo.slice %p [0:4, 1:7] : (tensor<4x7xf32>) -> tensor<4x6xf32>
  %out = stablehlo.dot_general %cut, %v, contracting_dims = [1] x [0] : (tensor<4x6xf32>, tensor<6x2xf32>) -> tensor<4x2xf32>
  return %out : tensor<4x2xf32>
}
