"""A results file of a comparison as Markdown tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.peers import (
    convolution_case,
    convolution_tables,
    cpu_case,
    cpu_tables,
    language_case,
    language_tables,
    softmax_case,
    softmax_tables,
)
from benchmarks.peers.markdown import provenance
from schedules.core.errors import UsageError

SECTIONS: Mapping[str, Callable[[Mapping[str, Any]], list[str]]] = {
    softmax_case.KIND: softmax_tables.sections,
    convolution_case.KIND: convolution_tables.sections,
    cpu_case.KIND: cpu_tables.sections,
    language_case.KIND: language_tables.sections,
}


def tables(results: Mapping[str, Any], most: int | None = None) -> str:
    """The tables of a results file (`comparison.read_results`), or the first `most` of them, and where they come
    from."""
    parts = SECTIONS[results["kind"]](results)
    if most is not None:
        parts = parts[: 2 * most]  # each after its title
    return "\n\n".join([*parts, provenance(results)])


def selected(results: Mapping[str, Any], where: Mapping[str, str]) -> dict[str, Any]:
    """The results of those cases whose fields (operator, launch, or the problem's) have the values `where`, as text.

    Raises UsageError if there are none.
    """

    def fits(case: Mapping[str, Any]) -> bool:
        fields = {**case["problem"], "operator": case["operator"], "launch": case["launch"]}
        return all(name in fields and str(fields[name]) == value for name, value in where.items())

    found = [case for case in results["cases"] if fits(case)]
    if not found:
        wanted = " ".join(f"{name}={value}" for name, value in where.items())
        raise UsageError(f"no case has {wanted}" if wanted else "there are no cases")
    return {**results, "cases": found}
