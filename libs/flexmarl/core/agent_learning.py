"""What is learnt per agent and policy: response lengths, paths to the end, work per sample.

Averages move by a fixed share with each new value, so they follow a policy that learns to answer
shorter. What open samples have cost so far is summed beside, so that what they will still cost is
known without a walk over them. All lengths are tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

_Step = tuple[str, str, str, tuple[str, ...], int, int]
"""Vertex, agent, policy, upstream, prompt, response."""


class AgentLearning:
    """Averages over finished vertices and samples.

    Args:
        rate: Share of the newest value in an average.
    """

    def __init__(self, *, rate: float) -> None:
        self._rate = rate
        self._responses: dict[str, float] = {}
        self._paths: dict[str, float] = {}
        self._demands: dict[str, float] = {}
        self._samples: dict[str, list[_Step]] = {}
        self._spent: dict[str, int] = {}

    def response_tokens(self, agent: str, *, default: float) -> float:
        """Expected length of an agent's response; `default` before the first."""
        return self._responses.get(agent, default)

    def path_tokens(self, agent: str, *, default: float) -> float:
        """Expected tokens from an agent's call to the end of its sample, the call included."""
        return self._paths.get(agent, default)

    @property
    def demands(self) -> Mapping[str, float]:
        """Average tokens, prompts included, that a sample costs of each policy."""
        return self._demands

    def coming(self, policy: str) -> float:
        """Tokens that open samples are expected to cost yet of a policy; 0 while that is unknown.

        What is ready or running counts as coming. A sample is open from its first call on; one that
        costs more than the average takes from what others are expected to cost, never below 0.
        """
        whole = len(self._samples) * self._demands.get(policy, 0.0)
        return max(whole - self._spent.get(policy, 0), 0.0)

    def called(self, sample_id: str) -> None:
        """A sample has made a call; empty when it is nobody's."""
        if sample_id:
            self._samples.setdefault(sample_id, [])

    def finished(
        self,
        sample_id: str,
        vertex_id: str,
        *,
        agent: str,
        policy: str,
        upstream_ids: tuple[str, ...],
        num_prompt_tokens: int,
        num_tokens: int,
    ) -> None:
        """Learns from a vertex that was made.

        Args:
            sample_id: Its sample; empty when it is nobody's.
            vertex_id: Vertex.
            agent: Agent that was called.
            policy: Policy that answered.
            upstream_ids: Vertices whose output it needed.
            num_prompt_tokens: Length of its prompt.
            num_tokens: Length of its response.
        """
        self._learn(self._responses, agent, num_tokens)
        if sample_id:
            step = (vertex_id, agent, policy, upstream_ids, num_prompt_tokens, num_tokens)
            self._samples.setdefault(sample_id, []).append(step)
            self._spent[policy] = self._spent.get(policy, 0) + num_prompt_tokens + num_tokens

    def sample_ended(self, sample_id: str, *, whole: bool) -> None:
        """Learns from the paths of a sample.

        Args:
            sample_id: Sample.
            whole: False for one that was cut or failed: its paths are shorter than they are.
        """
        steps = self._samples.pop(sample_id, ())
        for _, _, policy, _, num_prompt_tokens, num_tokens in steps:
            self._spent[policy] -= num_prompt_tokens + num_tokens
        if not steps or not whole:
            return
        behind: dict[str, int] = {}  # longest path after a vertex
        costs = dict.fromkeys(self._demands, 0)
        # What needs a vertex finished after it did: backwards, all of it has been seen.
        for vertex_id, agent, policy, upstream_ids, num_prompt_tokens, num_tokens in reversed(
            steps
        ):
            path = num_tokens + behind.get(vertex_id, 0)
            self._learn(self._paths, agent, path)
            for upstream_id in upstream_ids:
                behind[upstream_id] = max(behind.get(upstream_id, 0), path)
            costs[policy] = costs.get(policy, 0) + num_prompt_tokens + num_tokens
        for policy, cost in costs.items():
            self._learn(self._demands, policy, cost)

    def _learn(self, averages: dict[str, float], name: str, value: float) -> None:
        known = averages.get(name, value)
        averages[name] = known + self._rate * (value - known)
