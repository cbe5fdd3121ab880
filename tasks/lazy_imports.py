"""What sympy imports only when it is needed: the scorer's worker needs it before it may open no file any more.

Without this, the first honest answer that needs one of these modules would score 0 for the import that is refused.
Found by listing the imports within the functions of sympy 1.14, those of its printers, plots and physics left out. All
of them take about half a second.
"""

from __future__ import annotations

import contextlib
import importlib

_LATE = """
abc assumptions.facts assumptions.handlers.calculus assumptions.handlers.common assumptions.handlers.matrices
assumptions.handlers.ntheory assumptions.handlers.order assumptions.handlers.sets assumptions.lra_satask
assumptions.predicates.matrices assumptions.predicates.sets assumptions.satask assumptions.wrapper combinatorics
combinatorics.coset_table combinatorics.fp_groups combinatorics.free_groups combinatorics.galois
combinatorics.generators combinatorics.homomorphisms combinatorics.named_groups combinatorics.pc_groups
combinatorics.tensor_can concrete.delta discrete.recurrences integrals.heurisch integrals.manualintegrate
integrals.prde integrals.rde integrals.risch logic.algorithms.dpll logic.algorithms.dpll2 logic.algorithms.lra_theory
matrices.expressions.applyfunc parsing.sympy_parser physics physics.units polys.dispersion polys.distributedmodules
polys.domains.old_fractionfield polys.domains.old_polynomialring polys.domains.quotientring
polys.numberfields.resolvent_lookup sets.handlers.add sets.handlers.functions sets.handlers.issubset sets.handlers.mul
sets.handlers.power sets.setexpr tensor.array.array_derivatives tensor.array.expressions tensor.tensor
"""


def import_what_sympy_imports_late() -> None:
    """Import all of it that this release of sympy has; nothing where there is no sympy."""
    for module in _LATE.split():
        with contextlib.suppress(ImportError):  # another release keeps it elsewhere
            importlib.import_module(f"sympy.{module}")
