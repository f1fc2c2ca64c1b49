"""The calls that a schedule made, as short text with the names that loops and blocks had at the time."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from schedules.core.tvm import Schedule, tvm

_LOOKS = ("Get", "EnterPostproc")  # instructions that leave the program as it is
_DEFAULTS = (
    ", preserve_unit_iters=True",
    ", disable_predication=False",
    ", preserve_unit_loops=True",
    ", index=-1",
    ", pad_value=None",
    ", buffer_index=0",
)
_HANDLE = re.compile(r"\b[blv]\d+\b")


def calls(program: tvm.IRModule, schedule: Schedule) -> tuple[list[str], tvm.IRModule]:
    """One text for each instruction of the trace of `schedule`, empty where it only looks at the program, and what the
    trace makes of `program`.

    The trace names loops and blocks by numbers; it is replayed for the names that they have in the program.
    """
    from tvm.s_tir import Schedule as NewSchedule

    replayed = NewSchedule(program)
    statements = [str(line).partition("sch.") for line in schedule.trace.as_python()]
    kinds = [str(instruction.kind.name) for instruction in schedule.trace.insts]
    handles: dict[str, Any] = {}  # the trace's name -> what it stands for in the replay
    texts: list[str] = []

    def named(text: str) -> str:
        return _HANDLE.sub(lambda match: _name(replayed, handles.get(match[0]), match[0]), text)

    def results() -> None:
        """Name what the last instruction made."""
        if not texts:
            return
        names = _HANDLE.findall(statements[len(texts) - 1][0])
        handles.update(zip(names, replayed.trace.insts[len(texts) - 1].outputs, strict=True))
        if texts[-1] and names:
            texts[-1] = f"{', '.join(map(named, names))} = {texts[-1]}"

    def before(_instruction: Any, _inputs: Sequence[Any], _attributes: Any, decision: Any) -> Any:
        results()
        number = len(texts)
        looks = kinds[number].startswith(_LOOKS)
        texts.append("" if looks else _short(named(statements[number][2])))
        return decision

    schedule.trace.apply_to_schedule(replayed, remove_postproc=False, decision_provider=before)
    results()
    return texts, replayed.mod


def _name(schedule: Schedule, handle: Any, otherwise: str) -> str:
    if handle is None:
        return otherwise
    found = schedule.get(handle)
    if hasattr(found, "name_hint"):
        return str(found.name_hint)
    return str(found.loop_var.name) if hasattr(found, "loop_var") else str(found)


def _short(call: str) -> str:
    for default in _DEFAULTS:
        call = call.replace(default, "")
    return re.sub(r"\((loop|block|block_or_loop)=", "(", call, count=1)
