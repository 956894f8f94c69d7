"""Greedy rewriting with plain Python functions, on top of MLIR's own driver.

A rewrite looks at one op and returns the value that replaces its (single) result, or None to leave
it. New ops go where the op stands. MLIR's driver applies all rewrites until nothing changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from jaxlib.mlir import ir

from hlo_opt import compat

Rewrite = Callable[[ir.Operation], ir.Value | None]


def apply_greedily(root: ir.Operation, rewrites: Iterable[tuple[str, Rewrite]]) -> None:
    """Applies `(op name, rewrite)` pairs to every op inside `root` until a fixed point.

    Nothing found during a rewrite may be kept for the next one: the driver erases and folds ops.
    """
    driver = compat.rewrite()
    with root.context:
        patterns = driver.RewritePatternSet()
        for name, rewrite in rewrites:
            patterns.add(name, _callback(rewrite))
        driver.apply_patterns_and_fold_greedily(root, patterns.freeze())


def _callback(rewrite: Rewrite) -> Callable[[ir.OpView, Any], bool]:
    def callback(op: ir.OpView, rewriter: Any) -> bool:
        with rewriter.ip, op.operation.location:
            replacement = rewrite(op.operation)
        if replacement is None:
            return True  # MLIR's bindings take a true value as "no match"
        rewriter.replace_op(op, [replacement])
        return False

    return callback
