// RUN: hlo-opt %s --normalize | FileCheck %s

// CHECK-LABEL: @true_mask
// CHECK-NEXT: return %arg0
func.func @true_mask(%m: tensor<4xi1>) -> tensor<4xi1> {
  %one = stablehlo.constant dense<1> : tensor<i32>
  %ones = stablehlo.broadcast_in_dim %one, dims = [] : (tensor<i32>) -> tensor<4xi32>
  %zero = stablehlo.constant dense<0> : tensor<4xi32>
  %valid = stablehlo.compare NE, %ones, %zero, SIGNED : (tensor<4xi32>, tensor<4xi32>) -> tensor<4xi1>
  %0 = stablehlo.and %m, %valid : tensor<4xi1>
  return %0 : tensor<4xi1>
}

// CHECK-LABEL: @mask_through_numbers
// CHECK-NEXT: return %arg0
func.func @mask_through_numbers(%m: tensor<4xi1>) -> tensor<4xi1> {
  %0 = stablehlo.convert %m : (tensor<4xi1>) -> tensor<4xf32>
  %zero = stablehlo.constant dense<0.0> : tensor<4xf32>
  %1 = stablehlo.compare GT, %0, %zero, FLOAT : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xi1>
  return %1 : tensor<4xi1>
}

// Equal to zero is the opposite: it must stay.
// CHECK-LABEL: @negated_mask
// CHECK: stablehlo.compare EQ
func.func @negated_mask(%m: tensor<4xi1>) -> tensor<4xi1> {
  %0 = stablehlo.convert %m : (tensor<4xi1>) -> tensor<4xf32>
  %zero = stablehlo.constant dense<0.0> : tensor<4xf32>
  %1 = stablehlo.compare EQ, %0, %zero, FLOAT : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xi1>
  return %1 : tensor<4xi1>
}

// CHECK-LABEL: @neutral
// CHECK-NEXT: return %arg0
func.func @neutral(%x: tensor<4xf32>) -> tensor<4xf32> {
  %low = stablehlo.constant dense<0xFF800000> : tensor<4xf32>
  %one = stablehlo.constant dense<1.0> : tensor<4xf32>
  %0 = stablehlo.maximum %low, %x : tensor<4xf32>
  %1 = stablehlo.multiply %0, %one : tensor<4xf32>
  %2 = stablehlo.convert %1 : tensor<4xf32>
  return %2 : tensor<4xf32>
}

// A finite bound is not neutral.
// CHECK-LABEL: @bounded
// CHECK: stablehlo.maximum
func.func @bounded(%x: tensor<4xf32>) -> tensor<4xf32> {
  %low = stablehlo.constant dense<-3.40282347E+38> : tensor<4xf32>
  %0 = stablehlo.maximum %low, %x : tensor<4xf32>
  return %0 : tensor<4xf32>
}

// A matmul that contracts nothing is a product; its batch dimension comes first.
// CHECK-LABEL: @outer
// CHECK-NOT: dot_general
// CHECK: stablehlo.convert %arg0 : (tensor<3xi32>) -> tensor<3xf32>
// CHECK: stablehlo.multiply {{.*}} : tensor<3x2x4xf32>
func.func @outer(%m: tensor<3xi32>, %x: tensor<2x3x4xf32>) -> tensor<3x2x4xf32> {
  %0 = stablehlo.dot_general %m, %x, batching_dims = [0] x [1], contracting_dims = [] x [] : (tensor<3xi32>, tensor<2x3x4xf32>) -> tensor<3x2x4xf32>
  return %0 : tensor<3x2x4xf32>
}

// Rounded to bf16 before they are multiplied, the factors would lose what the matmul keeps.
// CHECK-LABEL: @narrow
// CHECK: stablehlo.dot_general
func.func @narrow(%a: tensor<3xf32>, %b: tensor<4xf32>) -> tensor<3x4xbf16> {
  %0 = stablehlo.dot_general %a, %b, contracting_dims = [] x [] : (tensor<3xf32>, tensor<4xf32>) -> tensor<3x4xbf16>
  return %0 : tensor<3x4xbf16>
}
