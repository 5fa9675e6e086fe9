"""A machine of the spec as a Mermaid state diagram: the text that documents and code reviews show.

Rows between the same two states share one arrow, one line a row; rows that stay in their state are loops.
"""

from dfirst.protocol.specification import SAME_STATE, MachineSpec, TransitionSpec

END_STATE = "FREED"


def state_diagram(machine: MachineSpec) -> str:
    """Return the text of a machine's ``stateDiagram-v2``."""
    lines = ["stateDiagram-v2", f"    [*] --> {machine.initial}"]
    for (source, target), rows in arrows(machine).items():
        label = "<br/>".join(row_label(row) for row in rows)
        lines.append(f"    {source} --> {target} : {label}")
    lines += [f"    {state} --> [*]" for state in end_states(machine)]
    return "\n".join(lines) + "\n"


def arrows(machine: MachineSpec) -> dict[tuple[str, str], list[TransitionSpec]]:
    """Return the rows between each two states, in the order of the spec."""
    found: dict[tuple[str, str], list[TransitionSpec]] = {}
    for row in machine.transitions:
        target = row.source if row.target == SAME_STATE else row.target
        found.setdefault((row.source, target), []).append(row)
    return found


def end_states(machine: MachineSpec) -> list[str]:
    """Return where an object's life ends: FREED, or the states that no row leaves."""
    names = [state.name for state in machine.states]
    if END_STATE in names:
        return [END_STATE]
    left = {source for source, target in arrows(machine) if source != target}
    return [name for name in names if name not in left]


def row_label(row: TransitionSpec) -> str:
    """Return a row in one line: its id, its event, its guards."""
    return f"{row.id} {row.event}{guards_text(row)}"


def guards_text(row: TransitionSpec) -> str:
    """Return the guards as they follow the event, or nothing."""
    return f" [{', '.join(row.guards)}]" if row.guards else ""
