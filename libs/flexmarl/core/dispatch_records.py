"""What the dispatcher keeps of a vertex in progress, of an instance, and of a policy."""

from __future__ import annotations

from flexmarl.core.dispatch_events import VertexReady

Lane = tuple[str, int]
"""Policy and version: what a vertex waits for, and what an instance serves."""

Order = tuple[int, int, float, int]
"""Batch, group in it, urgency, number: smaller goes first."""


class Vertex:
    """A vertex between VertexReady and its end.

    Attributes:
        ready: What was asked.
        lane: What it waits for.
        order: Its place among the ready vertices of its lane.
        attempt: Number of its newest attempt; 0 before the first.
        first_valid: Earliest attempt whose result may still be used: one that continued from
            tokens which were given up since then has only an end.
        num_kept: Tokens that moved attempts drew, from which the next attempt goes on.
        request_failures: Attempts that failed for a fault of the request.
        infra_failures: Attempts that failed for a fault of the infrastructure.
        deaths: Attempts whose instance died under them.
        lonely_deaths: Those among them that had the instance for themselves.
        instance: Where it runs.
        load: Tokens that it is expected to cost there, or where it will run.
        avoid: Instance on which it failed last.
        waiting: Whether it is in a queue.
        leaving: Whether its instance was told to give back what it has drawn.
        alone: Whether it has its instance for itself.
    """

    __slots__ = (
        "alone",
        "attempt",
        "avoid",
        "deaths",
        "first_valid",
        "infra_failures",
        "instance",
        "lane",
        "leaving",
        "load",
        "lonely_deaths",
        "num_kept",
        "order",
        "ready",
        "request_failures",
        "waiting",
    )

    def __init__(self, ready: VertexReady, order: Order) -> None:
        self.ready = ready
        self.lane: Lane = (ready.policy, ready.version)
        self.order = order
        self.attempt = 0
        self.first_valid = 1
        self.num_kept = 0
        self.request_failures = 0
        self.infra_failures = 0
        self.deaths = 0
        self.lonely_deaths = 0
        self.instance: Instance | None = None
        self.load = 0
        self.avoid: str | None = None
        self.waiting = False
        self.leaving = False
        self.alone = False

    def start_over(self) -> None:
        """Forgets what moved attempts drew; what continues from it is no result any more."""
        if self.num_kept:
            self.num_kept = 0
            self.first_valid = self.attempt + 1


class Instance:
    """An instance and what it works on.

    Attributes:
        instance_id: Id.
        policies: Policies that it serves.
        capacity: Most requests at once.
        version: Version that it serves.
        weights_hash: Content that it holds.
        usable: Whether it serves.
        load: Outstanding work in tokens.
        stamp: Raised at each change, which outdates its entries in heaps.
        epoch: Raised with each content, which empties its prefix cache.
        vacating: Whether it gives its requests back, to serve another policy.
        reserved: Suspect that waits for it to become empty.
        running: What it works on, by vertex id, oldest first.
    """

    __slots__ = (
        "capacity",
        "epoch",
        "instance_id",
        "load",
        "policies",
        "reserved",
        "running",
        "stamp",
        "usable",
        "vacating",
        "version",
        "weights_hash",
    )

    def __init__(self, instance_id: str) -> None:
        self.instance_id = instance_id
        self.policies: tuple[str, ...] = ()
        self.capacity = 0
        self.version = 0
        self.weights_hash = ""
        self.usable = False
        self.load = 0
        self.stamp = 0
        self.epoch = 0
        self.vacating = False
        self.reserved: Vertex | None = None
        self.running: dict[str, Vertex] = {}

    @property
    def is_open(self) -> bool:
        """Whether it may take one more request now."""
        return (
            self.usable
            and len(self.running) < self.capacity
            and not self.vacating
            and self.reserved is None
        )


class PolicyBook:
    """Running sums of one policy, kept as its vertices come and go: reading them costs nothing.

    Attributes:
        policy: Policy.
        num_waiting: Ready vertices without an instance.
        waiting_tokens: What they are expected to cost.
        num_running: Vertices at instances.
        running_tokens: What they are expected to cost.
        num_instances: Instances that serve it or will, dead ones left aside.
        num_places: Requests that these take at once.
        done_tokens: Tokens of prompts and responses that were done.
        running_s: Seconds at instances, summed over its vertices.
        running_since: Up to when `running_s` counts.
    """

    __slots__ = (
        "done_tokens",
        "num_instances",
        "num_places",
        "num_running",
        "num_waiting",
        "policy",
        "running_s",
        "running_since",
        "running_tokens",
        "waiting_tokens",
    )

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self.num_waiting = 0
        self.waiting_tokens = 0
        self.num_running = 0
        self.running_tokens = 0
        self.num_instances = 0
        self.num_places = 0
        self.done_tokens = 0
        self.running_s = 0.0
        self.running_since = 0.0

    def count_running(self, change: int, tokens: int, now: float) -> None:
        """Accounts the time until now, then one vertex more at an instance, or one less."""
        self.running_s += self.num_running * (now - self.running_since)
        self.running_since = now
        self.num_running += change
        self.running_tokens += tokens
