// RUN: hlo-opt %s --cse --symbol-dce --mlir-print-ir-after=cse -o %t 2>&1 | FileCheck %s
// RUN: hlo-opt %s --cse --symbol-dce --mlir-print-ir-after-change -o %t 2>&1 | FileCheck %s --check-prefix=CHANGE
// RUN: hlo-opt %s --cse --mlir-timing --mlir-print-ir-before-all -o %t 2>&1 | FileCheck %s --check-prefix=BEFORE

// CHECK: IR Dump After cse
// CHECK-NOT: IR Dump
// CHANGE: IR Dump After cse
// CHANGE-NOT: IR Dump After symbol-dce
// BEFORE: IR Dump Before cse
// BEFORE: Execution time report
// BEFORE: cse
func.func @main(%a: tensor<2xf32>) -> tensor<2xf32> {
  %0 = stablehlo.add %a, %a : tensor<2xf32>
  %1 = stablehlo.add %a, %a : tensor<2xf32>
  %2 = stablehlo.multiply %0, %1 : tensor<2xf32>
  return %2 : tensor<2xf32>
}
