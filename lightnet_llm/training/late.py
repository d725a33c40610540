"""Which ranks the others wait for, from what every rank says about itself."""

from __future__ import annotations

from typing import Any

Record = dict[str, Any]


def late_ranks(records: dict[int, Record], silent: set[int]) -> list[int]:
    """Ranks that have not arrived where others wait for them.

    A rank waits for another when both belong to a process group and it has entered more of the group's collectives. Those
    that are waited for and wait for nobody are late; one that sits in a collective itself (a receive, which has no number)
    is late only if no other is. Without numbers to tell, those outside any collective are late, if others are inside.

    Args:
        records: of every rank that was heard: ``groups`` ({name: [number, ranks]}), ``collective`` (name or None), ``step``.
        silent: ranks of which nothing is heard any more: they are late whatever they last said.

    Returns:
        Ranks in order; empty when nothing tells them apart.
    """
    if silent:
        return sorted(silent)
    numbers: dict[str, dict[int, int]] = {}
    for rank, record in records.items():
        for name, (number, _) in record.get("groups", {}).items():
            numbers.setdefault(name, {})[rank] = number
    waits, waited_for = set(), set()
    for entered in numbers.values():
        most = max(entered.values())
        behind = {rank for rank, number in entered.items() if number < most}
        waited_for |= behind
        waits |= set(entered) - behind if behind else set()
    roots = waited_for - waits
    outside = {rank for rank, record in records.items() if not record.get("collective")}
    if roots:
        return sorted(roots & outside or roots)
    if outside and outside != set(records):
        return sorted(outside)
    slowest = min((record.get("step", 0) for record in records.values()), default=0)
    behind = {rank for rank, record in records.items() if record.get("step", 0) == slowest}
    return sorted(behind) if behind != set(records) else []


def describe(records: dict[int, Record], late: list[int], silent: set[int]) -> str:
    """One line: who is late and where, and where the others wait."""
    parts = []
    for rank in late[:4]:
        record = records.get(rank)
        if record is None:
            parts.append(f"rank {rank} never reported")
            continue
        who = f"rank {rank} (host {record['host']}, pid {record['pid']})"
        if rank in silent:
            state = f", process state {record['state']}" if record.get("state") else ""
            parts.append(f"{who} gives no sign of life since {record['at']}{state}")
        else:
            inside = f" in {record['collective']}" if record.get("collective") else ""
            parts.append(
                f"{who} has not arrived: {record['at']}{inside} at {record.get('place') or 'an unknown place'}"
            )
    if len(late) > 4:
        parts.append(f"and {len(late) - 4} more")
    waiting: dict[str, list[int]] = {}
    for rank, record in sorted(records.items()):
        if rank not in late:
            where = record.get("collective") or "no known collective"
            waiting.setdefault(f"{where} at {record.get('place') or 'an unknown place'} ({record['at']})", []).append(
                rank
            )
    for where, ranks in waiting.items():
        named = ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")
        parts.append(f"rank{'s' if len(ranks) > 1 else ''} {named} wait{'' if len(ranks) > 1 else 's'} in {where}")
    return "; ".join(parts)
