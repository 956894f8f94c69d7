"""Numerical checks of a rewrite: original and rewritten run on the same inputs against float64.

The rule, for every output: RMS and maximum error against float64 at most 1.5 times the original's
plus one unit in the last place at the output's RMS; integers and the places of NaN and infinity
equal. A check in which no kernel ran although the pipeline was meant to lower has failed.
"""

from hlo_opt.verify.compare import FACTOR, OutputErrors, Report, compare, verify_pipeline
from hlo_opt.verify.float64 import to_float64
from hlo_opt.verify.inputs import infer_inputs, load_inputs

__all__ = [
    "FACTOR",
    "OutputErrors",
    "Report",
    "compare",
    "infer_inputs",
    "load_inputs",
    "to_float64",
    "verify_pipeline",
]
