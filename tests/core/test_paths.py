import pytest

from flexmarl.core.ids import VertexId
from flexmarl.core.paths import PathNode, intent_path, sort_key


def test_tasks_and_calls_are_numbered_apart():
    root = PathNode()
    assert [root.call(), root.call(key="plan"), root.call()] == ["0:0", "0:plan", "0:1"]
    first, second = root.child(), root.child()
    assert (first.path, second.path, second.child().path) == ("0.0", "0.1", "0.1.0")
    assert second.call() == "0.1:0"


def test_a_key_names_one_call_of_its_task():
    root = PathNode()
    root.call(key="plan")
    root.call(key="act")
    assert root.child().call(key="plan") == "0.0:plan"
    with pytest.raises(ValueError, match="used before"):
        root.call(key="plan")


@pytest.mark.parametrize("key", ["", "1st", "a/b", "a b", "__mine", "x" * 57])
def test_malformed_keys_are_refused(key):
    with pytest.raises(ValueError, match="key"):
        PathNode().call(key=key)


@pytest.mark.parametrize("key", [None, "x" * 56])
def test_an_intent_has_a_path_that_no_call_takes(key):
    path = intent_path(PathNode("0.3").call(key))
    assert path == f"0.3:__once__{0 if key is None else key}"
    sample = VertexId.parse("b000000a0-g0000-s000a0/0:0").sample
    assert VertexId(sample, path).path == path


def test_paths_sort_by_task_and_number():
    paths = ["0:10", "0:2", "0.1:0", "0.0:plan", "0.0:3", "0.10:0", "0.2:0"]
    assert sorted(paths, key=sort_key) == [
        "0:2", "0:10", "0.0:3", "0.0:plan", "0.1:0", "0.2:0", "0.10:0",
    ]  # fmt: skip
