from flexmarl.core.weight_loads import InstanceWeights, Load, decide_loads, target_version

WEIGHTS = {("p", 3): "h3", ("p", 4): "h4", ("q", 3): "g3"}


def instance(
    name: str = "p-0",
    *,
    policy: str = "p",
    version: int | None = 3,
    weights_hash: str = "h3",
    requested: tuple[int, str] | None = None,
    not_before: float = 0.0,
) -> InstanceWeights:
    return InstanceWeights(name, policy, version, weights_hash, requested, not_before)


def loads(*instances: InstanceWeights, open_versions: dict[int, int], now: float = 1.0):
    return decide_loads(list(instances), open_versions=open_versions, weights=WEIGHTS, now=now)


def test_the_next_version_is_loaded_only_when_no_sample_of_this_one_is_open():
    assert loads(instance(), open_versions={3: 1}) == []
    assert loads(instance(), open_versions={3: 0}) == [
        Load("p", 4, "h4", ("p-0",), "newest_announced")
    ]


def test_a_restarted_instance_loads_what_open_samples_need():
    fresh = instance(version=None, weights_hash="")
    assert loads(fresh, open_versions={3: 2, 4: 0}) == [
        Load("p", 3, "h3", ("p-0",), "open_samples")
    ]


def test_refilled_samples_bring_an_older_version_back():
    ahead = instance(version=4, weights_hash="h4")
    assert loads(ahead, open_versions={3: 1}) == [Load("p", 3, "h3", ("p-0",), "open_samples")]


def test_equal_version_with_other_content_is_loaded_again():
    wrong = instance(version=4, weights_hash="h3")
    assert loads(wrong, open_versions={}) == [Load("p", 4, "h4", ("p-0",), "newest_announced")]


def test_an_order_is_given_once_and_a_refused_one_repeated_after_a_pause():
    assert loads(instance(requested=(4, "h4")), open_versions={}) == []
    assert loads(instance(not_before=2.0), open_versions={}, now=1.0) == []
    assert len(loads(instance(not_before=2.0), open_versions={}, now=2.0)) == 1


def test_an_order_of_other_content_under_the_same_version_is_another_order():
    # As after a move: both policies are at version 4.
    moved = instance(requested=(4, "g4"))
    assert loads(moved, open_versions={}) == [Load("p", 4, "h4", ("p-0",), "newest_announced")]


def test_policies_are_apart_and_unknown_weights_wait():
    other = instance("q-0", policy="q", version=None)
    unknown = instance("r-0", policy="r", version=None)
    assert loads(other, instance(), unknown, open_versions={}) == [
        Load("p", 4, "h4", ("p-0",), "newest_announced"),
        Load("q", 3, "g3", ("q-0",), "newest_announced"),
    ]
    assert loads(other, open_versions={4: 1}) == []


def test_all_instances_of_a_policy_are_told_at_once_but_those_that_do_it_already():
    behind = [instance(f"p-{n}") for n in range(3)]
    ahead = instance("p-3", version=4, weights_hash="h4")
    under_way = instance("p-4", requested=(4, "h4"))
    assert loads(*behind, ahead, under_way, open_versions={}) == [
        Load("p", 4, "h4", ("p-0", "p-1", "p-2"), "newest_announced")
    ]


def test_target():
    assert target_version({}, []) is None
    assert target_version({}, [2, 5]) == 5
    assert target_version({3: 1, 4: 7}, [3, 4]) == 3
    assert target_version({3: 1}, [4]) is None
