"""Memory of a worker: nothing in use after suspension, content found again, groups destroyed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from trainer.harness import Policy, Ranks, flat, make_rows, policy_config, saved, write_model

from flexmarl.api.trainer.v1 import rank_pb2
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.core.process_groups import SECOND_HAND
from flexmarl.trainer.rank.memory import DeviceMemory
from scripts.peak_memory import own_bytes

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

MIB = 1 << 20


def unloaded(*segments: rank_pb2.MappedSegment) -> rank_pb2.RankSaved:
    """Saved state whose files are gone: it can only be bound where it still lies."""
    named = saved(*segments)
    for segment in named.segments:
        segment.path = "/nowhere"
    return named


def cut_short(segment: rank_pb2.MappedSegment) -> rank_pb2.MappedSegment:
    torn = rank_pb2.MappedSegment()
    torn.CopyFrom(segment)
    torn.path = f"{segment.path}-torn"
    content = Path(segment.path).read_bytes()
    Path(torn.path).write_bytes(content[: len(content) // 2])
    return torn


def renamed(
    state: dict[str, rank_pb2.MappedSegment], name: str
) -> dict[str, rank_pb2.MappedSegment]:
    """The same files under other names, so that their content is not found where it lies."""
    return {
        kind: rank_pb2.MappedSegment(
            kind=kind,
            key=f"{segment.key}-{name}",
            path=segment.path,
            buffers=segment.buffers,
            in_memory=True,
        )
        for kind, segment in state.items()
    }


def prefetch_of(state: dict[str, rank_pb2.MappedSegment]) -> rank_pb2.RankPrefetch:
    return rank_pb2.RankPrefetch(
        rank=0,
        state=rank_pb2.KeptState(
            master_key=state["master"].key, moments_key=state["moments"].key, members=[0]
        ),
        segments=list(state.values()),
    )


async def test_a_policy_that_needs_more_memory_than_is_allowed_is_refused_with_both_sizes() -> None:
    memory = DeviceMemory(size_bytes=4096, max_bytes=8192, device=torch.device("cpu"))
    for _ in range(2):
        with pytest.raises(
            DomainError, match=r"needs 12288 bytes .* allows 8192; .*slots"
        ) as caught:
            memory.take(12_288)
        assert caught.value.reason is ErrorReason.OUT_OF_MEMORY
        assert memory.used_bytes == 0
        room = memory.take(8192)
        assert room is not None
        assert memory.take(64) is None  # what is in use is not moved
        memory.leave(room, None)


@pytest.mark.parametrize("cycles", [8, pytest.param(200, marks=pytest.mark.long)])
async def test_memory_returns_to_its_baseline_after_every_suspension(
    ranks: Ranks, tmp_path: Path, cycles: int, proves: Callable[[str], None]
) -> None:
    model = write_model(tmp_path / "m", vocab_size=20_000)  # 10 MiB of state: a leak is seen
    policies = [Policy(ranks, policy_config(model), model, [0, 1], seed=seed) for seed in (1, 2)]
    states = []
    for policy in policies:
        await policy.bind()
        states.append(await policy.export("master", "moments"))
        await policy.unbind()

    async def cycle() -> None:
        for policy, state in zip(policies, states, strict=True):
            await policy.bind(saved(*state.values()))
            await policy.add(make_rows(3))
            left = await policy.unbind()
            assert [item.used_bytes for item in left] == [0, 0]

    processes = [psutil.Process(ranks.workers[member].pid) for member in (0, 1)]

    async def least() -> list[int]:
        """What allocators keep goes up and down by many MiB; a leak lifts the lowest reading."""
        readings = []
        for _ in range(4):
            await cycle()
            readings.append([own_bytes(process) for process in processes])
        return [min(of_process) for of_process in zip(*readings, strict=True)]

    await cycle()  # what is made once
    await cycle()
    before = await least()
    for _ in range(cycles - 4):
        await cycle()
    after = await least()
    grown = [(b - a) / MIB for a, b in zip(before, after, strict=True)]
    if cycles >= 200:
        change = " and ".join(f"{mib:+.1f} MiB" for mib in grown)
        proves(f"{cycles} suspensions of each of two policies: two ranks changed by {change}")
    assert max(grown) < 24, grown


async def test_state_that_nobody_displaced_is_bound_again_without_loading(
    ranks: Ranks, tiny_model: Path
) -> None:
    policies = [
        Policy(ranks, policy_config(tiny_model), tiny_model, [0], seed=seed) for seed in (1, 2)
    ]
    states = []
    for policy in policies:
        await policy.bind()
        states.append(await policy.export("master", "moments"))
        await policy.unbind()
    for policy, state in zip(policies, states, strict=True):
        await policy.bind(unloaded(*state.values()))
        again = await policy.export("master", "moments")
        for kind, segment in state.items():
            assert np.array_equal(flat(again[kind]), flat(segment))
        await policy.unbind()
    # Changed weights have no name until they are saved: they are not found under the old one.
    await policies[0].bind(saved(*states[0].values()))
    await policies[0].add(make_rows(3))
    await policies[0].apply(3.0)
    await policies[0].unbind()
    with pytest.raises(DomainError) as caught:
        await policies[0].bind(unloaded(*states[0].values()))
    assert caught.value.reason is ErrorReason.SEGMENT_NOT_FOUND


HELD = """
import time
from pathlib import Path

HERE = Path(__file__).parent

def held(inputs, config):
    (HERE / "begun").touch()
    while not (HERE / "goes_on").exists():
        time.sleep(0.01)
    return -inputs.advantage * inputs.log_ratio.exp()
"""
"""A loss that is computed until it is let."""


async def test_the_next_policys_state_is_loaded_while_the_present_one_computes(
    ranks: Ranks, tiny_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "long.py").write_text(HELD)
    endless = policy_config(tiny_model, loss={"kind": "long:held"})
    present = Policy(ranks, endless, tiny_model, [0], seed=1, package=str(tmp_path))
    following = Policy(ranks, policy_config(tiny_model), tiny_model, [0], seed=2)
    await following.bind()
    state = await following.export("master", "moments")
    await following.unbind()
    again = renamed(state, "again")
    await present.bind()
    computing = asyncio.ensure_future(present.add(make_rows(4), "long"))
    while not (tmp_path / "begun").exists():
        assert not computing.done(), computing
        await asyncio.sleep(0.01)
    # Loading that waited for the computation would wait in vain.
    (reply,) = await ranks.call([0], prefetch=prefetch_of(again))
    assert reply.prefetched.loaded_bytes > 0
    (reply,) = await ranks.call([0], prefetch=prefetch_of(again))
    assert reply.prefetched.loaded_bytes == 0, "it is there"
    assert not computing.done()
    (tmp_path / "goes_on").touch()
    assert (await computing)[0].finite
    await following.bind(unloaded(*again.values()))
    assert np.array_equal(flat((await following.export("master"))["master"]), flat(state["master"]))


async def test_a_policy_whose_kept_state_was_displaced_ahead_of_anothers_turn_is_bound(
    ranks: Ranks, tiny_model: Path
) -> None:
    async def load_ahead(name: str) -> int:
        (reply,) = await ranks.call([0], prefetch=prefetch_of(renamed(state, name)))
        return reply.prefetched.loaded_bytes

    policy = Policy(ranks, policy_config(tiny_model), tiny_model, [0])
    await policy.bind()
    state = await policy.export("master", "moments")
    await policy.unbind()
    await policy.bind(unloaded(*state.values()))  # it is kept
    await policy.unbind()
    assert await load_ahead("first") > 0
    number = 0
    while not await load_ahead("first"):  # until that one has been displaced, which came later
        assert await load_ahead(str(number)) > 0
        number += 1
    with pytest.raises(DomainError) as caught:
        await policy.bind(unloaded(*state.values()))
    assert caught.value.reason is ErrorReason.SEGMENT_NOT_FOUND
    await policy.bind(saved(*state.values()))
    assert np.array_equal(flat((await policy.export("master"))["master"]), flat(state["master"]))


@pytest.mark.parametrize("members", [[0], [0, 1]], ids=["one_rank", "two_ranks"])
async def test_moments_stay_out_of_swaps_until_the_update(
    ranks: Ranks, tiny_model: Path, members: list[int]
) -> None:
    policy = Policy(ranks, policy_config(tiny_model), tiny_model, members)
    await policy.bind()
    await policy.add(make_rows(5))
    state, _ = await policy.apply(5.0)
    ends = []
    for left_out in (False, True):
        await policy.unbind()
        whole = saved(state["master"], state["moments"])
        if left_out:
            del whole.segments[1]
        assert (await policy.bind(whole)).has_moments is not left_out
        await policy.add(make_rows(6, seed=1))
        if left_out:  # a swap in the middle of the batch
            whole.segments.append((await policy.export("gradients"))["gradients"])
            await policy.unbind()
            assert not (await policy.bind(whole)).has_moments
            gone = rank_pb2.MappedSegment(
                kind="moments", path="/nowhere", buffers=state["moments"].buffers
            )
            with pytest.raises(DomainError) as caught:
                await policy.apply(6.0, num_updates=1, sources=[gone])
            assert caught.value.reason is ErrorReason.SEGMENT_NOT_FOUND
        targets, _ = await policy.apply(
            6.0, num_updates=1, sources=[state["moments"]] if left_out else []
        )
        ends.append(np.concatenate([flat(targets[kind]) for kind in ("master", "moments")]))
    assert np.array_equal(*ends)
    await policy.unbind()


async def test_moments_that_one_rank_cannot_read_stop_the_update_on_both(
    ranks: Ranks, tiny_model: Path
) -> None:
    policy = Policy(ranks, policy_config(tiny_model), tiny_model, [0, 1])
    await policy.bind()
    state = renamed(await policy.export("master", "moments"), "elsewhere")
    await policy.unbind()
    whole = saved(state["master"], state["moments"])
    del whole.segments[1]
    await policy.bind(whole)
    await policy.add(make_rows(4))
    torn = cut_short(state["moments"])
    target = policy.segment("master")
    outcomes = await asyncio.gather(
        *(
            ranks.call(
                [member],
                apply=rank_pb2.RankApply(denominator=4.0, targets=[target], sources=[source]),
            )
            for member, source in ((0, state["moments"]), (1, torn))
        ),
        return_exceptions=True,
    )
    assert all(isinstance(outcome, DomainError) for outcome in outcomes), outcomes
    heard, found = outcomes
    assert heard.reason is found.reason is ErrorReason.CHECKSUM_MISMATCH
    assert SECOND_HAND in heard.metadata
    assert found.metadata == {"segment": torn.key, "path": torn.path}
    assert np.array_equal(flat((await policy.export("master"))["master"]), flat(state["master"]))
    await policy.apply(4.0, sources=[state["moments"]])
    await policy.unbind()


async def test_state_of_another_model_is_refused_and_nothing_stays_bound(
    ranks: Ranks, tiny_model: Path, tmp_path: Path
) -> None:
    other = write_model(tmp_path / "other", vocab_size=9)
    stranger = Policy(ranks, policy_config(other), other, [0])
    await stranger.bind()
    state = await stranger.export("master", "moments")
    await stranger.unbind()
    policy = Policy(ranks, policy_config(tiny_model), tiny_model, [0])
    with pytest.raises(DomainError, match=r"another model: .*embed_tokens") as caught:
        await policy.bind(saved(*state.values()))
    assert caught.value.reason is ErrorReason.CONTENT_MISMATCH
    assert (await policy.unbind())[0].used_bytes == 0
    await policy.bind()


async def test_a_full_tier_at_a_save_leaves_the_sum_on_all_ranks(
    ranks: Ranks, tiny_model: Path
) -> None:
    policy = Policy(ranks, policy_config(tiny_model), tiny_model, [0, 1])
    await policy.bind()
    await policy.add(make_rows(6))
    before = flat((await policy.export("gradients"))["gradients"])
    full = policy.segment("gradients")
    full.path = "/dev/full"
    with pytest.raises(DomainError, match=r"no room|another rank") as caught:
        await ranks.call([0, 1], export=rank_pb2.RankExport(targets=[full]))
    assert caught.value.reason is ErrorReason.DISK_FULL
    assert np.array_equal(flat((await policy.export("gradients"))["gradients"]), before)


async def test_groups_that_are_not_kept_are_destroyed_and_those_of_a_member_that_is_gone(
    ranks: Ranks, tiny_model: Path
) -> None:
    policy = Policy(ranks, policy_config(tiny_model), tiny_model, [0, 1])
    process = psutil.Process(ranks.workers[0].pid)
    counts = []
    for _ in range(8):
        ranks.groups.forget("1")  # given up: the next binding makes another one
        await policy.bind()
        counts.append((process.num_fds(), process.num_threads()))
    assert max(counts[4:]) <= max(counts[:4]), counts
    await ranks.call([0], forget=rank_pb2.RankForget(position=1))
    await ranks.call([1], forget=rank_pb2.RankForget(position=0))
    assert process.num_fds() < counts[-1][0]
    ranks.groups.forget("1")
    await policy.bind()
    assert (await policy.add(make_rows(4)))[0].finite
    await policy.unbind()
