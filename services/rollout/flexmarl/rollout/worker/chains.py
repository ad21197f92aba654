"""Which earlier call of an agent a prompt goes on from, token by token."""

from __future__ import annotations

from flexmarl.rollout.workflow import Output


class Chains:
    """Finished calls of a sample's agents, with all their tokens."""

    def __init__(self) -> None:
        self._turns: dict[str, list[tuple[str, list[int]]]] = {}

    def add(self, output: Output, prompt: list[int]) -> None:
        """Remembers a finished call."""
        whole = [*prompt, *output.tokens]
        self._turns.setdefault(output.agent, []).append((output.vertex_id, whole))

    def extended_by(self, agent: str, prompt: list[int]) -> str:
        """The longest earlier call of the agent that the prompt begins with; empty if none."""
        best, length = "", 0
        for vertex_id, whole in self._turns.get(agent, ()):
            if length < len(whole) <= len(prompt) and prompt[: len(whole)] == whole:
                best, length = vertex_id, len(whole)
        return best
