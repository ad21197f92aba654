"""Drawings of a sample's graph."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Final

from flexmarl.cli.graph.view import Node, SampleView

_SHOWN: Final = 60
_SHAPES: Final = {True: "box", False: "ellipse"}


def draw_text(sample: SampleView) -> str:
    """A tree: each vertex below the last of the vertices it needed, the others named beside it."""
    lines = [
        f"sample {sample.sample_id}  {sample.status}"
        + ("" if sample.team_reward is None else f"  team reward {sample.team_reward:.3f}")
    ]
    if sample.query:
        lines.append(f"query  {sample.query}")
    if sample.failure:
        lines.append(f"failure  {sample.failure}")
    children: dict[str, list[Node]] = {}
    known = {node.path for node in sample.nodes}
    for node in sample.nodes:
        upstream = [path for path in node.upstream if path in known]
        children.setdefault(upstream[-1] if upstream else "", []).append(node)
    lines += _branches(children, "", "")
    if sample.output:
        lines.append(f"output  {sample.output}")
    return "\n".join([*lines, *_critical(sample)])


def _critical(sample: SampleView) -> Iterator[str]:
    if not sample.critical_path:
        return
    total_s = sum(step.total_s for step in sample.critical_path)
    yield f"critical path  {total_s:.3f} s"
    for step in sample.critical_path:
        yield (
            f"   {step.title} {step.path}  {step.total_s:.3f} s = {step.before_s:.3f} before + "
            f"{step.queued_s:.3f} queued + {step.running_s:.3f} running"
        )


def _branches(children: Mapping[str, list[Node]], parent: str, indent: str) -> Iterator[str]:
    nodes = children.get(parent, [])
    for number, node in enumerate(nodes):
        last = number == len(nodes) - 1
        yield f"{indent}{'└─' if last else '├─'} {_line(node)}"
        yield from _branches(children, node.path, indent + ("   " if last else "│  "))


def _line(node: Node) -> str:
    parts = [f"{node.title} {node.path}", f"v{node.version}" if node.policy else "tool"]
    if node.status != "done":
        parts.append(node.status)
    parts.append(f"{_short(node.prompt)} → {_short(node.output)}")
    if len(node.upstream) > 1:
        parts.append(f"(needs {', '.join(node.upstream)})")
    if node.reward is not None:
        parts.append(f"reward {node.reward:.3f}")
    if node.advantage is not None:
        parts.append(f"advantage {node.advantage:+.3f}")
    if node.fate:
        parts.append(node.fate)
    return "  ".join(parts)


def draw_dot(sample: SampleView) -> str:
    """Graphviz DOT."""
    lines = ["digraph sample {", f"  label={_quoted(sample.sample_id)};", "  rankdir=TB;"]
    critical = {step.path for step in sample.critical_path}
    for node in sample.nodes:
        label = _quoted(_label(node, "\n"))
        look = f"shape={_SHAPES[bool(node.policy)]}"
        if node.path in critical:
            look += ", penwidth=3"
        lines.append(f"  {_quoted(node.path)} [{look}, label={label}];")
    for node in sample.nodes:
        lines += [f"  {_quoted(source)} -> {_quoted(node.path)};" for source in node.upstream]
    return "\n".join([*lines, "}"])


def draw_mermaid(sample: SampleView) -> str:
    """A Mermaid flow chart."""
    names = {node.path: f"v{number}" for number, node in enumerate(sample.nodes)}
    lines = ["flowchart TB"]
    for node in sample.nodes:
        label = _label(node, "<br/>").replace('"', "#quot;")
        left, right = ("[", "]") if node.policy else ("([", "])")
        lines.append(f'  {names[node.path]}{left}"{label}"{right}')
    for node in sample.nodes:
        lines += [
            f"  {names[source]} --> {names[node.path]}"
            for source in node.upstream
            if source in names
        ]
    critical = [names[step.path] for step in sample.critical_path if step.path in names]
    if critical:
        lines += ["  classDef critical stroke-width:3px", f"  class {','.join(critical)} critical"]
    return "\n".join(lines)


def draw_json(sample: SampleView) -> str:
    """The sample with its vertices and edges."""
    return json.dumps(sample.to_json(), indent=2, ensure_ascii=False)


DRAWINGS: Final[Mapping[str, Callable[[SampleView], str]]] = MappingProxyType(
    {"text": draw_text, "dot": draw_dot, "mermaid": draw_mermaid, "json": draw_json}
)
"""Drawings by the name of their format."""


def _label(node: Node, newline: str) -> str:
    lines = [f"{node.title} {node.path}", f"{_short(node.prompt)} → {_short(node.output)}"]
    if node.reward is not None:
        lines.append(f"reward {node.reward:.3f}")
    if node.status != "done":
        lines.append(node.status)
    return newline.join(lines)


def _short(text: str) -> str:
    flat = json.dumps(text, ensure_ascii=False)
    return flat if len(flat) <= _SHOWN else f'{flat[:_SHOWN]}…"'


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
