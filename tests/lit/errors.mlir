// RUN: not hlo-opt %s 2>&1 | FileCheck %s
// RUN: not hlo-opt %s --no-such-flag 2>&1 | FileCheck %s --check-prefix=FLAG
// RUN: not hlo-opt %s --pass-pipeline='func.func(sdy-propagation-pipeline)' 2>&1 | FileCheck %s --check-prefix=ANCHOR
// RUN: not hlo-opt %s --target=v99 2>&1 | FileCheck %s --check-prefix=TARGET

// FLAG: hlo-opt: error: unrecognized arguments: --no-such-flag
// ANCHOR: error: pass 'sdy-propagation-pipeline' cannot run on 'func.func'
// TARGET: error: unknown target 'v99': expected one of v4, v5e, v5p, v6e, tpu7x, cpu, gpu
// CHECK: errors.mlir:12:8: error: custom op 'stablehlo.ad' is unknown
// CHECK-NOT: Traceback
func.func @main(%a: tensor<2xf32>) -> tensor<2xf32> {
  %0 = stablehlo.ad %a, %a : tensor<2xf32>
  return %0 : tensor<2xf32>
}
