import copy
import math
from pathlib import Path

import pytest
from pydantic import ValidationError

from flexmarl.runtime.algorithm_config import LossConfig, ScheduleConfig
from flexmarl.runtime.run_config import RunConfig

BASE = {
    "name": "t",
    "versions": 1,
    "workflow": {"entry": "team:team", "reward": "team:reward"},
    "dataset": {"path": "q.jsonl"},
    "batch": {"groups": 1, "samples_per_group": 2},
    "policies": {"p": {"model": {"path": "m"}}},
    "agents": {"a": {"policy": "p"}},
}


def with_(path: str, value: object) -> dict:
    config = copy.deepcopy(BASE)
    *parents, leaf = path.split(".")
    node = config
    for parent in parents:
        node = node.setdefault(parent, {})
    node[leaf] = value
    return config


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("agents.a.policy", "q", r"agents\.a\.policy: no policy 'q'; declared policies: p"),
        ("agents", {}, "at least one agent"),
        ("policies.q", {"model": {"path": "m"}}, r"policies\.q: no agent uses it"),
        ("batch.staleness", 1, "staleness above 0 is not built"),
        ("policies.p.sampling", {"top_p": 0.9}, "allow_truncated"),
        ("policies.p.sampling", {"top_k": 5}, "allow_truncated"),
        ("policies.p.sampling", {"min_p": 0.1}, "allow_truncated"),
        ("policies.p.sampling", {"temperature": 0}, "greedy"),
        ("policies.p.sampling", {"temperature": 1e-3}, r"below 0\.01, where vLLM"),
        ("policies.p.rollout", {"engine": "simulated"}, r"a section rollout\.simulated"),
        ("policies.p.rollout", {"engine": "external"}, r"a section rollout\.external"),
        (
            "policies.p.rollout",
            {"engine": "external", "external": {"url": "http://h", "model": "m"}},
            'kind = "frozen"',
        ),
        ("agents.a.stop", ["\n"], r"agents\.a\.stop: engine \"transformers\""),
        ("agents.a.structured", {"regex": "a+"}, r"agents\.a\.structured: engine"),
        ("agents.a.structured", {"regex": "a", "choices": ["b"]}, "exactly one"),
        ("policies.p.trainer", {"world_size": 2}, r"exceeds trainer\.slots = 1"),
        ("name", "a/b", "letters, digits"),
        ("policies.p", {"kind": "frozen", "model": {"path": "m"}, "lora": {}}, "frozen policy"),
        *(
            (
                "policies.p",
                {"kind": "frozen", "model": {"path": "m"}, "trainer": {key: 2}},
                "a frozen policy needs one slot",
            )
            for key in ("world_size", "max_world_size")
        ),
        ("policies.p.loss", {"kind": "nonsense"}, "not one of ppo_clip, dual_clip, gspo, cispo"),
        ("policies.p.loss", {"aggregation": "dr_grpo"}, "response_limit: .* divides by it"),
        (
            "policies.p.loss",
            {"old": "behaviour", "correction_cap": 2},
            "correction_cap: .* already",
        ),
        ("policies.p.optimizer", {"schedule": "cosine"}, "total_updates = 0"),
        ("policies.p.optimizer", {"betas": [1.0, 0.999]}, "less than 1"),
        ("policies.p.optimizer", {"betas": [0.9, -0.1]}, "greater than or equal to 0"),
        ("policies.p.lora", {"targets": []}, "at least 1 item"),
        ("advantage", {"estimator": "ppo"}, "there are: grpo, dr_grpo"),
        ("advantage", {"estimator": "rloo", "normalize_std": True}, "rloo never divides"),
        ("advantage.overlong", {"max_tokens": 5, "buffer_tokens": 9}, "buffer_tokens exceeds"),
        ("nonsense", 1, "nonsense"),
        ("agents.a.timeout_s", math.inf, "finite number"),
        ("policies.p.sampling.temperature", math.inf, "finite number"),
        ("workflow.reward_args", {"low": [-math.inf]}, "reward_args: a number that JSON has not"),
        ("workflow.tools", {"a/../b": "m:f"}, "tool 'a/../b': use letters"),
        ("agents.a.max_tokens", 1 << 31, "less than or equal"),
        ("agents.a.stop_token_ids", [-1], "greater than or equal"),
        ("agents.a.stop", [""], "at least 1 character"),
        ("agents.a.stop", [*"abcde"], "at most 4 items"),
        ("agents.a.structured", {"json_schema": "{"}, r"structured\.json_schema is not JSON"),
        ("agents.a.structured", {"json_schema": "3"}, "a schema is an object or a boolean"),
        *(
            ("agents.a.chat_options", {name: True}, f"chat_options.{name}: every call sets it")
            for name in ("messages", "tools", "add_generation_prompt")
        ),
    ],
)
def test_bad_settings_are_refused_by_name(path, value, message):
    with pytest.raises(ValidationError, match=message):
        RunConfig.model_validate(with_(path, value))


def test_static_allocation_needs_slots_for_every_trained_policy():
    config = with_("pipeline.allocation", "static")
    config["policies"]["q"] = {"model": {"path": "m"}, "trainer": {"world_size": 2}}
    config["agents"]["b"] = {"policy": "q"}
    config["trainer"] = {"slots": 3}
    RunConfig.model_validate(config)
    config["trainer"] = {"slots": 2}
    with pytest.raises(ValidationError, match=r"1 \+ 2 = 3 needed, trainer\.slots = 2"):
        RunConfig.model_validate(config)


def test_truncated_sampling_is_possible_where_it_is_meant():
    sampling = {"top_p": 0.9, "allow_truncated": True}
    assert RunConfig.model_validate(with_("policies.p.sampling", sampling))
    frozen = {"kind": "frozen", "model": {"path": "m"}, "sampling": {"temperature": 0}}
    config = RunConfig.model_validate(with_("policies.p", frozen))
    assert config.trained_policies() == []


def test_forms_of_a_trained_policys_responses_are_refused_unless_meant():
    config = with_("policies.p.rollout", {"engine": "vllm"})
    config["agents"]["a"]["structured"] = {"choices": ["yes", "no"]}
    with pytest.raises(ValidationError, match="allow_truncated"):
        RunConfig.model_validate(config)
    config["policies"]["p"]["sampling"] = {"allow_truncated": True}
    assert RunConfig.model_validate(config)


def test_relative_paths_are_taken_from_the_config_folder(tmp_path):
    config = RunConfig.model_validate(with_("dataset.path", "/abs/q.jsonl")).relative_to(tmp_path)
    assert config.dataset.path == Path("/abs/q.jsonl")
    assert config.policies["p"].model.path == tmp_path / "m"
    assert config.workflow.package == tmp_path


def test_entropy_schedule_is_linear_and_then_constant():
    loss = LossConfig(entropy=ScheduleConfig(start=0.1, end=0.0, until=42))
    assert loss.entropy_at(0) == pytest.approx(0.1)
    assert loss.entropy_at(21) == pytest.approx(0.05)
    assert loss.entropy_at(42) == loss.entropy_at(100) == 0
    assert LossConfig(entropy=0.3).entropy_at(7) == 0.3


def test_the_resolved_form_reads_back():
    config = RunConfig.model_validate(BASE)
    assert RunConfig.model_validate_json(config.model_dump_json()) == config


def test_a_response_with_a_form_must_be_able_to_end() -> None:
    config = with_("policies.p.rollout", {"engine": "vllm"})
    config["policies"]["p"]["sampling"] = {"allow_truncated": True}
    config["agents"]["a"]["structured"] = {"regex": "a"}
    RunConfig.model_validate(config)
    config["agents"]["a"]["ignore_eos"] = True
    with pytest.raises(ValidationError, match=r"agents\.a\.ignore_eos: .* ends with the model's"):
        RunConfig.model_validate(config)
