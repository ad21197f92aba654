"""Which modules a worker keeps; none of them has memory of its own."""

from __future__ import annotations

from typing import Any, cast

from flexmarl.trainer.rank.groups import GroupKey
from flexmarl.trainer.rank.residence import ModuleKey, Resident, Residents


def key(architecture: str) -> ModuleKey:
    return ModuleKey(
        architecture=architecture,
        compute_dtype="float32",
        checkpointing=False,
        optimizer="adamw",
        adapter="",
        group=GroupKey(members=(0,), prefix=""),
    )


def test_the_module_used_longest_ago_goes_beyond_the_bound() -> None:
    built: list[str] = []

    def use(residents: Residents, name: str) -> Resident:
        def build() -> Resident:
            built.append(name)
            return cast("Resident", cast("Any", object()))

        return residents.get(key(name), build)

    residents = Residents(max_modules=2)
    first = use(residents, "a")
    use(residents, "b")
    assert use(residents, "a") is first
    use(residents, "c")
    assert use(residents, "a") is first
    use(residents, "b")
    assert built == ["a", "b", "c", "b"]
    residents.drop(lambda each, _: each.architecture == "b")
    use(residents, "b")
    assert built == ["a", "b", "c", "b", "b"]


def test_the_one_in_use_stays_whatever_the_bound() -> None:
    residents = Residents(max_modules=0)
    first = residents.get(key("a"), lambda: cast("Resident", cast("Any", object())))
    assert residents.get(key("a"), lambda: cast("Resident", cast("Any", object()))) is first
