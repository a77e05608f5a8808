import ast
import inspect
from pathlib import Path
from typing import Any

import pytest
import yaml
from megatron_forest_trainer.config import (
    Config,
    ConfigError,
    config_from_mapping,
    config_to_yaml,
    load_config,
    parse_config,
    schema,
)
from megatron_forest_trainer.config.checks import REQUIRED_VALUES
from megatron_forest_trainer.config.load import key_paths
from megatron_forest_trainer.config.policies import resolve
from megatron_forest_trainer.config.reference import keys, markdown

SOURCE_BLOCK = """\
token_capture:
  enabled: true
  forest_training: true
  selection_policy: returned_history
  defer_routed_experts_to_policy: false
policy:
  megatron_cfg:
    enabled: true
  automodel_cfg:
    enabled: false
  sequence_packing:
    enabled: false
  dynamic_batching:
    enabled: false
grpo:
  calculate_advantages_on_gpu: false
loss_fn:
  token_level_loss: true
  sequence_level_importance_ratios: false
async_rl:
  rollout_failure:
    min_step_batch_fraction: 1  # Optional floor; drop budgets must also permit losses.
"""

RUNNABLE = [
    "policy.model_name=/models/tiny",
    "harness.target=simple_agent_with_compaction",
    "server.url=http://127.0.0.1:8000",
    "server.control_token_file=/run/token",
    "data.train.data_path=tasks.jsonl",
]


def problems(text: str = "", *overrides: str, for_training: bool = False) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, overrides, for_training=for_training)
    return {problem.key: problem.message for problem in caught.value.problems}


@pytest.mark.requirement("K11", "K1", "K3")
def test_the_sources_block_loads_verbatim_with_the_rest_defaulted(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(SOURCE_BLOCK)
    config = load_config(path)
    assert config.token_capture.enabled
    assert config.token_capture.forest_training
    assert config.async_rl.rollout_failure.min_step_batch_fraction == 1.0
    assert config.grpo == Config().grpo
    load_config(path, RUNNABLE, for_training=True)


@pytest.mark.requirement("K1")
def test_the_feature_is_off_by_default_and_needed_for_training() -> None:
    assert not parse_config("").token_capture.enabled
    found = problems("", *RUNNABLE, for_training=True)
    assert list(found) == ["token_capture.enabled"]


@pytest.mark.requirement("K10")
def test_a_run_names_everything_that_it_misses() -> None:
    found = problems(SOURCE_BLOCK, for_training=True)
    assert list(found) == [override.partition("=")[0] for override in RUNNABLE]


@pytest.mark.requirement("K2")
@pytest.mark.parametrize("value", ["true", "false"])
def test_context_compaction_is_refused_with_its_migration(value: str) -> None:
    found = problems(f"token_capture: {{enabled: true, context_compaction: {value}}}")
    assert list(found) == ["token_capture.context_compaction"]
    assert f"forest_training: {value}" in found["token_capture.context_compaction"]


@pytest.mark.requirement("K3", "K4", "K6", "K10", "G21", "H7")
@pytest.mark.parametrize("key", REQUIRED_VALUES)
def test_keys_of_the_other_code_base_take_only_the_required_value(key: str) -> None:
    required, _ = REQUIRED_VALUES[key]
    shown = yaml.safe_dump(required).split("\n")[0]
    assert isinstance(parse_config("", [f"{key}={shown}"]), Config)
    wrong = {"true": "false", "false": "true", "null": "1", "1": "2"}[shown]
    found = problems("", f"{key}={wrong}")
    assert list(found) == [key]
    assert found[key].startswith(f"must be {shown}")


@pytest.mark.requirement("K3")
def test_required_values_are_compared_with_their_type() -> None:
    assert list(problems("", "grpo.calculate_advantages_on_gpu=0")) == [
        "grpo.calculate_advantages_on_gpu"
    ]


@pytest.mark.requirement("K10")
def test_every_problem_is_reported_at_once() -> None:
    found = problems(
        """
        grpo: {masked_reward_policy: maybe, num_prompts_per_step: 0, overlong: true, seed: -1}
        loss_fn: {ratio_clip_c: 1}
        policy: {model_nam: x, precision: 16}
        speed: fast
        """
    )
    assert found == {
        "grpo.masked_reward_policy": "must be include | exclude, got maybe",
        "grpo.num_prompts_per_step": "must be an integer at least 1, got 0",
        "grpo.overlong": "unknown key; did you mean grpo.overlong_filtering?",
        "grpo.seed": "must be an integer at least 0 and at most 2147483647, got -1",
        "loss_fn.ratio_clip_c": "must be a number above 1 or null, got 1",
        "policy.model_nam": "unknown key; did you mean policy.model_name?",
        "policy.precision": "must be float32 | bfloat16, got 16",
        "speed": found["speed"],
    }
    assert found["speed"].startswith("unknown key; known here: token_capture, policy")


def test_an_unknown_key_is_looked_for_in_other_sections() -> None:
    found = problems("grpo: {max_staleness: 1}")
    assert found["grpo.max_staleness"] == "unknown key here; did you mean async_rl.max_staleness?"


@pytest.mark.requirement("K8")
def test_there_is_no_key_to_change_how_parents_are_found() -> None:
    assert "token_capture.parent_resolution" in problems(
        "token_capture: {parent_resolution: declared}"
    )


@pytest.mark.parametrize(
    ("text", "value"), [("1e-4", 1e-4), ("5.0e-6", 5e-6), ("1E3", 1e3), (".5e0", 0.5), ("3", 3.0)]
)
def test_numbers_follow_yaml_1_2(text: str, value: float) -> None:
    config = parse_config(f"policy: {{megatron_cfg: {{optimizer: {{lr: {text}}}}}}}")
    assert config.policy.megatron_cfg.optimizer.lr == value
    assert parse_config("", [f"policy.megatron_cfg.optimizer.lr={text}"]) == config


def test_overrides_win_over_the_file_and_later_ones_over_earlier() -> None:
    config = parse_config("grpo: {seed: 1}", ["grpo.seed=2", "++grpo.seed=3"])
    assert config.grpo.seed == 3
    options = parse_config("", ["harness.options.depth.limit=4"]).harness.options
    assert options == {"depth": {"limit": 4}}


def test_bad_overrides_are_reported() -> None:
    assert "has the form" in problems("", "grpo.seed")["grpo.seed"]
    assert "not readable" in problems("", "grpo.seed={")["grpo.seed"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "not readable as YAML"),
        ("[1, 2]", "mapping of sections"),
        ("grpo: {seed: 1, seed: 2}", "repeated key seed"),
    ],
)
def test_unreadable_files_are_refused(text: str, message: str) -> None:
    assert message in problems(text)["<string>"]


def test_a_section_must_be_a_mapping() -> None:
    assert problems("grpo: 3") == {"grpo": "must be a section (a mapping of keys)"}
    assert parse_config("grpo:") == Config()


def test_the_printed_configuration_loads_to_the_same_one() -> None:
    config = parse_config(SOURCE_BLOCK, ["policy.generation.top_k=20", "grpo.seed=7"])
    assert parse_config(config_to_yaml(config)) == config
    assert config_from_mapping(yaml.safe_load(config_to_yaml(config))) == config


def test_every_key_has_a_docstring() -> None:
    tree = ast.parse(inspect.getsource(schema))
    for section in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        for field, after in zip(section.body, [*section.body[1:], None], strict=True):
            if isinstance(field, ast.AnnAssign):
                documented = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                assert documented, f"{section.name}.{ast.unparse(field.target)}"


def test_known_key_paths_are_the_written_ones() -> None:
    """The keys of facts that other parts and users rely on."""
    expected = """
    token_capture.{enabled,forest_training,selection_policy,defer_routed_experts_to_policy,min_valid_fraction_per_group,pending_wait_s}
    policy.megatron_cfg.{enabled,tensor_model_parallel_size,pipeline_model_parallel_size,context_parallel_size,expert_model_parallel_size}
    policy.automodel_cfg.enabled policy.dynamic_batching.enabled
    policy.sequence_packing.{enabled,train_mb_tokens,logprob_mb_tokens,algorithm}
    policy.{train_micro_batch_size,logprob_batch_size,train_global_batch_size,max_total_sequence_length,make_sequence_length_divisible_by}
    grpo.{num_prompts_per_step,num_generations_per_prompt,max_num_steps,use_leave_one_out_baseline,normalize_rewards,advantage_clip_low,advantage_clip_high,seq_logprob_error_threshold,masked_reward_policy,overlong_filtering,calculate_advantages_on_gpu,seed}
    loss_fn.{token_level_loss,sequence_level_importance_ratios,ratio_clip_min,ratio_clip_max,ratio_clip_c,reference_policy_kl_penalty,use_importance_sampling_correction,truncated_importance_sampling_ratio,truncated_importance_sampling_type}
    async_rl.{enabled,max_staleness}
    async_rl.rollout_failure.{min_step_batch_fraction,max_dropped_groups,max_replacements,rollout_timeout_s}
    async_rl.rollout_failure.nemo_gym.rollout_timeout_s
    harness.{target,max_response_retries,max_model_calls}
    context_history.{keep_rounds,max_prompt_tokens,on_exceed}
    """
    known = set(key_paths(Config))
    for pattern in expected.split():
        prefix, _, names = pattern.partition("{")
        for name in names.rstrip("}").split(",") if names else [""]:
            assert prefix + name in known


# Rules between keys


@pytest.mark.parametrize(
    ("overrides", "key", "message"),
    [
        (["policy.train_micro_batch_size=0"], "policy.train_micro_batch_size", "positive integer"),
        (["policy.logprob_batch_size=-1"], "policy.logprob_batch_size", "positive integer"),
        (["policy.train_global_batch_size=9"], "policy.train_global_batch_size", "= 512 logical"),
        (
            ["grpo.num_generations_per_prompt=1"],
            "grpo.num_generations_per_prompt",
            "at least 2",
        ),
        (
            ["grpo.num_generations_per_prompt=1", "grpo.use_leave_one_out_baseline=false"],
            "grpo.num_generations_per_prompt",
            "at least 2",
        ),
        (
            ["grpo.advantage_clip_low=2", "grpo.advantage_clip_high=1"],
            "grpo.advantage_clip_low",
            "above grpo.advantage_clip_high",
        ),
        (
            ["policy.sequence_packing.enabled=true", "policy.sequence_packing.train_mb_tokens=99"],
            "policy.sequence_packing.train_mb_tokens",
            "below policy.max_total_sequence_length 16384",
        ),
        (
            [
                "policy.sequence_packing.enabled=true",
                "policy.sequence_packing.train_mb_tokens=40000",
                "policy.sequence_packing.logprob_mb_tokens=20000",
            ],
            "policy.sequence_packing.logprob_mb_tokens",
            "at least train_mb_tokens",
        ),
        (
            ["policy.forest_execution.enabled=true", "policy.sequence_packing.enabled=true"],
            "policy.forest_execution.enabled",
            "must be false with policy.sequence_packing.enabled",
        ),
        (
            [
                "policy.forest_execution.enabled=true",
                "policy.forest_execution.max_tokens_per_bin=16383",
            ],
            "policy.forest_execution.max_tokens_per_bin",
            "below policy.max_total_sequence_length 16384",
        ),
        (
            ["async_rl.enabled=true"],
            "loss_fn.use_importance_sampling_correction",
            "must be true with async_rl.enabled",
        ),
        (
            ["loss_fn.truncated_importance_sampling_type=icepop"],
            "loss_fn.truncated_importance_sampling_ratio",
            "is needed by",
        ),
        (
            ["token_capture.forest_training=true"],
            "token_capture.enabled",
            "must be true with token_capture.forest_training",
        ),
    ],
)
@pytest.mark.requirement("K10", "H6", "H8")
def test_rules_between_keys(overrides: list[str], key: str, message: str) -> None:
    found = problems("", *overrides)
    assert list(found) == [key]
    assert message in found[key]


@pytest.mark.requirement("I11")
def test_the_rollout_timeout_has_an_alias() -> None:
    alias = "async_rl.rollout_failure.nemo_gym.rollout_timeout_s"
    name = "async_rl.rollout_failure.rollout_timeout_s"
    assert parse_config("", [f"{alias}=30"]).rollout_timeout_s == 30.0
    assert parse_config("", [f"{name}=40"]).rollout_timeout_s == 40.0
    assert parse_config("", [f"{name}=40", f"{alias}=40"]).rollout_timeout_s == 40.0
    assert "alias" in problems("", f"{name}=40", f"{alias}=30")[alias]


@pytest.mark.requirement("H3")
def test_bin_sizes_follow_from_the_microbatch_sizes() -> None:
    config = parse_config(
        "", ["policy.max_total_sequence_length=100", "policy.train_micro_batch_size=3"]
    )
    assert (config.train_mb_tokens, config.logprob_mb_tokens) == (300, 300)
    assert config.forest_bin_tokens == 300
    bin_tokens = ["policy.forest_execution.max_tokens_per_bin=20000"]
    assert parse_config("", bin_tokens).forest_bin_tokens == 20_000
    assert config.rollouts_per_step == 512


# Selection policies


@pytest.mark.requirement("E1", "E27", "E20", "K10")
@pytest.mark.parametrize("policy", ["all_captured", "json:dumps"])
def test_other_policies_need_forest_training(policy: str) -> None:
    found = problems("", "token_capture.enabled=true", f"token_capture.selection_policy={policy}")
    assert "needs token_capture.forest_training: true" in found["token_capture.selection_policy"]
    config = parse_config(SOURCE_BLOCK, [f"token_capture.selection_policy={policy}"])
    assert config.token_capture.selection_policy == policy


@pytest.mark.requirement("E26")
@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (
            "newest_leaf",
            "unknown selection policy 'newest_leaf'; installed: all_captured, returned",
        ),
        ("no_such_module:select", "No module named 'no_such_module'"),
        ("json:no_such_function", "no_such_function"),
        ("json:__name__", "is a str, not a function"),
        ("asyncio:sleep", "is asynchronous"),
    ],
)
def test_unusable_policies_fail_before_the_rollout(policy: str, message: str) -> None:
    found = problems(SOURCE_BLOCK, f"token_capture.selection_policy={policy}")
    assert message in found["token_capture.selection_policy"]


def install(folder: Path, name: str, entry_point: str, code: str = "") -> None:
    """Put an installed distribution with one selection policy on `folder`."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    group = "megatron_forest_trainer.selection_policies"
    (info / "entry_points.txt").write_text(f"[{group}]\n{entry_point}\n")
    if code:
        (folder / f"{name}.py").write_text(code)


@pytest.mark.requirement("E1", "E26")
def test_installed_policies_are_found_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "def newest(records, result):\n    return records[-1:], 'scored'\n"
    install(tmp_path, "newest_policy", "newest = newest_policy:newest", code)
    monkeypatch.syspath_prepend(tmp_path)
    config = parse_config(SOURCE_BLOCK, ["token_capture.selection_policy=newest"])
    policy: Any = resolve(config.token_capture.selection_policy)
    assert policy([1, 2, 3], {}) == ([3], "scored")


@pytest.mark.requirement("E26")
def test_a_name_registered_twice_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "impostor", "returned_history = json:dumps")
    monkeypatch.syspath_prepend(tmp_path)
    found = problems(SOURCE_BLOCK)
    assert "two installed packages register" in found["token_capture.selection_policy"]


def test_the_configuration_reference_is_current() -> None:
    page = Path(__file__).parents[3] / "docs" / "configuration.md"
    assert page.read_text() == markdown(), (
        "run: python -m megatron_forest_trainer.config.reference > docs/configuration.md"
    )
    assert [key.path for key in keys(Config)] == key_paths(Config)


@pytest.mark.requirement("K10")
@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("scheduler.lr_warmup_iters", "4", "must be below lr_decay_iters"),
        ("optimizer.min_lr", "1.0", "above policy.megatron_cfg.optimizer.lr"),
        ("scheduler.lr_warmup_init", "1.0", "above policy.megatron_cfg.optimizer.lr"),
    ],
)
def test_a_schedule_that_megatron_would_refuse(key, value, named):
    path = f"policy.megatron_cfg.{key}"
    with pytest.raises(ConfigError, match=named) as caught:
        load_config(None, [f"{path}={value}", "grpo.max_num_steps=4"])
    assert path in str(caught.value)
