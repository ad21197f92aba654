import pytest

from flexmarl.core.agent_learning import AgentLearning
from flexmarl.core.dispatch_records import Instance
from flexmarl.core.prefix_index import BLOCK_TOKENS, PrefixIndex, prefix_keys


def finished(learning, name, *, agent, upstream=(), tokens=10, policy="p", prompt=5, sample="s"):
    learning.finished(
        sample, name, agent=agent, policy=policy, upstream_ids=tuple(upstream),
        num_prompt_tokens=prompt, num_tokens=tokens,
    )  # fmt: skip


def test_a_path_is_the_longest_way_to_the_end():
    learning = AgentLearning(rate=0.5)
    assert learning.path_tokens("plan", default=7.0) == 7.0
    finished(learning, "v0", agent="plan", tokens=10)
    finished(learning, "v1", agent="write", upstream=["v0"], tokens=100)
    finished(learning, "v2", agent="check", upstream=["v0"], tokens=3, policy="q")
    finished(learning, "v3", agent="sum", upstream=["v1", "v2"], tokens=20)
    learning.sample_ended("s", whole=True)
    assert learning.path_tokens("plan", default=0.0) == 130
    assert learning.path_tokens("write", default=0.0) == 120
    assert learning.path_tokens("check", default=0.0) == 23
    assert learning.path_tokens("sum", default=0.0) == 20
    assert dict(learning.demands) == {"p": 145, "q": 8}


def test_cut_samples_teach_no_paths_but_lengths():
    learning = AgentLearning(rate=0.5)
    finished(learning, "v0", agent="a", tokens=10)
    learning.sample_ended("s", whole=False)
    learning.sample_ended("unheard-of", whole=True)
    assert learning.path_tokens("a", default=1.0) == 1.0
    assert learning.response_tokens("a", default=1.0) == 10
    finished(learning, "v0", agent="a", tokens=20, sample="")
    assert learning.response_tokens("a", default=1.0) == 15
    assert learning.demands == {}


def test_a_policy_that_samples_no_longer_call_is_forgotten_by_and_by():
    learning = AgentLearning(rate=0.5)
    for n in range(2):
        finished(learning, "v", agent="a", tokens=5, policy="q" if n == 0 else "p")
        learning.sample_ended("s", whole=True)
    assert learning.demands["q"] == pytest.approx(5)
    assert learning.demands["p"] == pytest.approx(10)


def test_open_samples_are_expected_to_cost_what_others_did():
    learning = AgentLearning(rate=0.5)

    def coming() -> dict[str, float]:
        return {policy: learning.coming(policy) for policy in "pq"}

    assert coming() == {"p": 0, "q": 0}
    finished(learning, "v0", agent="a", tokens=15)
    finished(learning, "v1", agent="b", tokens=35, policy="q")
    assert coming() == {"p": 0, "q": 0}  # no sample has ended yet
    learning.sample_ended("s", whole=True)
    assert coming() == {"p": 0, "q": 0}
    learning.called("t")
    learning.called("t")
    learning.called("u")
    learning.called("")
    assert coming() == {"p": 40, "q": 80}
    finished(learning, "v2", agent="a", tokens=15, sample="t")
    assert coming() == {"p": 20, "q": 80}
    # A sample that costs more than others do does not make what is left negative.
    finished(learning, "v3", agent="a", tokens=95, sample="u")
    assert coming() == {"p": 0, "q": 80}
    learning.sample_ended("u", whole=False)
    assert coming() == {"p": 0, "q": 40}
    learning.sample_ended("t", whole=False)
    assert coming() == {"p": 0, "q": 0}


def test_prefix_keys_name_whole_blocks_and_all_before_them():
    tokens = list(range(5 * BLOCK_TOKENS))
    keys = prefix_keys(tokens)
    assert len(keys) == 4  # the last block holds the last token
    assert prefix_keys(tokens[: 2 * BLOCK_TOKENS + 1]) == keys[:2]
    other = [9, *tokens[1:]]
    assert not set(prefix_keys(other)) & set(keys)
    assert prefix_keys(range(10)) == ()
    assert len(prefix_keys(range(1 << 14))) == 64


def test_the_index_finds_the_longest_prefix_that_is_still_there():
    index = PrefixIndex(max_entries=3)
    first, second = Instance("i0"), Instance("i1")
    index.add("p", (1, 2), first)
    index.add("p", (1,), second)
    assert index.find("p", (1, 2, 3)) == (first, 2 * BLOCK_TOKENS)
    assert index.find("p", (1, 9)) == (second, BLOCK_TOKENS)
    assert index.find("q", (1, 2)) == (None, 0)
    first.epoch += 1  # other weights: its cache is gone
    assert index.find("p", (1, 2)) == (second, BLOCK_TOKENS)
    index.add("p", (7, 8, 9), second)
    assert index.find("p", (1,)) == (None, 0)
