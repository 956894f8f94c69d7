// RUN: hlo-opt %s --quantize-constants=min-elements=4 --remarks 2>&1 | FileCheck %s
// RUN: hlo-opt %s --quantize-constants=min-elements=4 --stablehlo-legalize-quant-to-math | FileCheck %s --check-prefix=MATH

// CHECK: remark: constant weights to int8: 2x2, 2 scales, 16 -> 12 bytes
// CHECK: %[[Q:.*]] = stablehlo.constant() <{value = dense<{{\[\[}}127, -64], [0, 127]]> : tensor<2x2xi8>}> : () -> tensor<2x2x!quant.uniform<i8<-127:127>:f32:1, {1.000000e+00,2.000000e+00}>>
// CHECK: %[[W:.*]] = stablehlo.uniform_dequantize %[[Q]]
// CHECK: stablehlo.dot_general %{{.*}}, %[[W]]
// MATH-NOT: quant.uniform
// MATH: dense<{{\[\[}}127, -64], [0, 127]]> : tensor<2x2xi8>
// MATH: stablehlo.dot_general
func.func @main(%x: tensor<3x2xf32>) -> tensor<3x2xf32> {
  %w = stablehlo.constant dense<[[127.0, -128.0], [0.1, 254.0]]> : tensor<2x2xf32>
  %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] : (tensor<3x2xf32>, tensor<2x2xf32>) -> tensor<3x2xf32>
  return %0 : tensor<3x2xf32>
}
