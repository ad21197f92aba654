"""State that goes from worker to worker over gloo, without a segment being read."""

from __future__ import annotations

import uuid
from pathlib import Path

import numpy as np
import pytest
from trainer.harness import Policy, Ranks, flat, make_rows, policy_config, saved

from flexmarl.api.trainer.v1 import rank_pb2

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]


def meeting(ranks: Ranks) -> rank_pb2.Handover:
    return rank_pb2.Handover(
        prefix=f"handover/{uuid.uuid4().hex}", store_host="127.0.0.1", store_port=ranks.store_port
    )


async def is_kept(
    ranks: Ranks, keeper: int, state: rank_pb2.RankSaved, place: rank_pb2.Handover
) -> bool:
    """Asks a worker for all of a state, to be handed over there."""
    give = rank_pb2.RankGive(
        state=rank_pb2.KeptState(
            master_key=state.master_key, moments_key=state.moments_key, members=[keeper]
        ),
        rank=0,
        meeting=place,
    )
    (reply,) = await ranks.call([keeper], give=give)
    return reply.giving.kept


def unreadable(state: rank_pb2.RankSaved, place: rank_pb2.Handover) -> rank_pb2.RankSaved:
    """The same state, which cannot be had but from a keeper."""
    elsewhere = rank_pb2.RankSaved()
    elsewhere.CopyFrom(state)
    elsewhere.giver.CopyFrom(place)
    for segment in elsewhere.segments:
        segment.path = "/nowhere"
    return elsewhere


async def test_state_goes_from_worker_to_worker_beside_what_those_do(
    ranks: Ranks, tiny_model: Path
) -> None:
    first = Policy(ranks, policy_config(tiny_model), tiny_model, [0])
    await first.bind()
    await first.add(make_rows(4))
    trained, _ = await first.apply(4.0)  # its moments are not zero
    await first.unbind()
    state = saved(trained["master"], trained["moments"])
    busy = Policy(ranks, policy_config(tiny_model), tiny_model, [0], seed=8)
    await busy.bind()

    place = meeting(ranks)
    assert await is_kept(ranks, 0, state, place)
    second = Policy(ranks, policy_config(tiny_model), tiny_model, [1])
    bound = await second.bind(unreadable(state, place))
    assert bound.has_moments
    assert bound.loaded_bytes["device"] > 0
    assert bound.loaded_bytes.keys() == {"device"}
    again = await second.export("master", "moments")
    for kind, segment in again.items():
        assert np.array_equal(flat(segment), flat(trained[kind])), kind
    assert (await busy.add(make_rows(4)))[0].finite
    await busy.unbind()
    # What it handed over it keeps: bound again, it loads nothing.
    assert (await first.bind(unreadable(state, place))).loaded_bytes.keys() == {"kept"}
    await first.unbind()
    await second.unbind()


async def test_what_a_worker_does_not_keep_any_more_is_read(ranks: Ranks, tiny_model: Path) -> None:
    first = Policy(ranks, policy_config(tiny_model), tiny_model, [0])
    await first.bind()
    files = await first.export("master", "moments")
    await first.unbind()
    state = saved(*files.values())
    place = meeting(ranks)
    assert not await is_kept(ranks, 1, state, place)
    assert await is_kept(ranks, 0, state, place)
    await first.bind(state)  # it is in use now, and about to change
    await first.add(make_rows(3))
    await first.apply(3.0)

    state.giver.CopyFrom(place)
    second = Policy(ranks, policy_config(tiny_model), tiny_model, [1])
    assert (await second.bind(state)).loaded_bytes.keys() == {"segments"}
    for kind, segment in (await second.export("master", "moments")).items():
        assert np.array_equal(flat(segment), flat(files[kind])), kind
    await first.unbind()
    await second.unbind()
