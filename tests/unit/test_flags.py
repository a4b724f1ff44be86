"""Flags from config fields: spellings, sizes, the config file, --technique, and what a mistake is told."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from headrace import flags
from headrace.config import ENGINE_PARTS, EngineConfig, ServerConfig
from headrace.engine.resolve import create_config
from headrace.errors import ConfigError
from headrace.flags import elsewhere


def make_parser() -> flags.CommandParser:
    parser = flags.CommandParser(prog="headrace serve")
    flags.add_model_argument(parser)
    flags.add_config_flags(parser, EngineConfig, ServerConfig)
    parser.add_argument("--of-the-command", type=int, default=3)
    return parser


def engine(*words: str) -> EngineConfig:
    return flags.engine_config(make_parser().parse_args(words))


def server(*words: str) -> ServerConfig:
    return flags.server_config(make_parser().parse_args(words))


def usage_error(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as caught:
        engine(*words)
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("headrace: ")
    return err


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4096", 4096), ("32k", 32_000), ("32K", 32_768), ("2M", 2 * 2**20), ("2m", 2_000_000), ("20GiB", 20 * 2**30),
        ("20GB", 20 * 10**9), ("1.5GiB", 3 * 2**29), ("1.5k", 1500), (" 7 kB ", 7000), ("3T", 3 * 2**40), ("12B", 12),
    ],
)  # fmt: skip
def test_sizes_read_as_people_write_them(text: str, value: int) -> None:
    assert flags.parse_size(text) == value
    assert engine("--kv-cache-memory", text).cache.kv_cache_memory == value


@pytest.mark.parametrize("text", ["", "k", "1.0001k", "-3", "3x", "1e3", "0x10", "3 k k", "nan"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        flags.parse_size(text)


def test_vllm_spellings_reach_their_fields() -> None:
    config = engine(
        "org/name", "--dtype", "bfloat16", "--max-model-len=32k", "--gpu-memory-utilization", "0.5", "--max-num-seqs", "8",
        "--no-enable-prefix-caching", "-tp", "1", "-pp=1", "--load-format", "dummy", "--seed", "-1", "--enforce-eager",
        "--scheduling-policy", "priority", "--served-model-name", "a", "b", "--kv-cache-dtype", "float32",
    )  # fmt: skip
    assert (config.model.model, config.model.dtype, config.model.max_model_len, config.model.seed) == (
        "org/name",
        "bfloat16",
        32_000,
        -1,
    )
    assert config.model.served_model_name == ("a", "b") and config.model.load_format == "dummy"
    assert (config.cache.gpu_memory_utilization, config.cache.enable_prefix_caching, config.cache.kv_cache_dtype) == (
        0.5,
        False,
        "float32",
    )
    assert (config.scheduler.max_num_seqs, config.scheduler.scheduling_policy, config.device.enforce_eager) == (
        8,
        "priority",
        True,
    )


def test_without_flags_the_fields_keep_their_defaults() -> None:
    assert engine() == EngineConfig() and server() == ServerConfig()


def test_auto_leaves_an_optional_number_to_the_engine() -> None:
    assert engine("--max-model-len", "auto", "--overlap", "auto") == EngineConfig()


def test_model_as_argument_and_as_flag() -> None:
    assert (
        engine("a").model.model == engine("--model", "a").model.model == engine("a", "--model", "a").model.model == "a"
    )
    with pytest.raises(ConfigError, match=r"MODEL is 'a' and --model is 'b'; give one of them"):
        engine("a", "--model", "b")


def test_api_key_from_the_environment_unless_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_API_KEY", "from-env")
    assert server().api_key == ("from-env",)
    assert server("--api-key", "x", "y").api_key == ("x", "y")


@pytest.mark.parametrize("words", [("--max_num_seqs", "3"), ("--max_num_seqs=3",)])
def test_underscores_are_hyphens(words: tuple[str, ...]) -> None:
    assert engine(*words).scheduler.max_num_seqs == 3
    assert not engine("--no-enable_prefix_caching").cache.enable_prefix_caching
    assert engine("--served-model-name", "my_model", "--chat-template=a_b--c_d").model.served_model_name == (
        "my_model",
    )  # values are left alone


@pytest.mark.parametrize(
    ("word", "dtype"), [("half", "float16"), ("bf16", "bfloat16"), ("fp16", "float16"), ("float", "float32")]
)
def test_other_words_for_precisions(tmp_path: Path, word: str, dtype: str) -> None:
    assert engine("--dtype", word, "--kv-cache-dtype", word).model.dtype == dtype
    assert engine("--config", write(tmp_path, f"dtype: {word}\n")).model.dtype == dtype
    assert create_config(None, dtype=word).model.dtype == dtype


def test_technique_reaches_every_switch_by_both_spellings() -> None:
    entries = ("chunked-prefill=off", "kv_caching=false", "prefix-caching=off", "overlap=2")
    config = engine(*(f"--technique={entry}" for entry in entries))
    assert (
        not config.scheduler.chunked_prefill and not config.cache.kv_caching and not config.cache.enable_prefix_caching
    )
    assert config.device.overlap == 2
    assert [engine("--technique", f"overlap={word}").device.overlap for word in ("on", "off", "auto")] == [1, 0, None]
    assert engine("--technique", "kv_caching=off", "--technique", "kv_caching=on").cache.kv_caching


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("chunked_prefil=off", "no such switch; did you mean chunked_prefill?"),
        ("max_num_seqs=3", "no such switch"),
        ("kv_caching", "write it as kv_caching=on, kv_caching=off"),
        ("kv_caching=maybe", "give on or off"),
        ("overlap=some", "give one of 0, 1, 2"),
        ("overlap=7", "give one of 0, 1, 2"),
    ],
)
def test_a_wrong_technique_is_explained(entry: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        engine("--technique", entry)
    assert words in str(caught.value)


def test_technique_and_flag_must_not_disagree() -> None:
    with pytest.raises(ConfigError, match="--overlap says 2 and --technique says 0"):
        engine("--overlap", "2", "--technique", "overlap=off")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--max-num-seq", "3"), "unknown flag --max-num-seq; did you mean --max-num-seqs?"),
        (("--max_num_seq=3",), "did you mean --max-num-seqs?"),
        (("--cpu-offload-gb",), "--cpu-offload-gb: offloading is not supported yet"),
        (("--trust-remote-code",), "code from a model's directory is never run"),
        (("--dtype", "fp8"), "choose from"),
        (("--max-num-seqs", "many"), "invalid int value: 'many'"),
        (("--max-model-len", "long"), "'long' is not a size"),
        (("one", "two"), "unexpected argument 'two'"),
    ],
)
def test_a_wrong_flag_is_one_line_with_a_remedy(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], told: str
) -> None:
    assert told in usage_error(capsys, *words)


def write(folder: Path, text: str) -> str:
    path = folder / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


FILE = """
model: from-file
max-num-seqs: 7
served_model_name: [one, two]
max_model_len: 32k
enable-prefix-caching: off
enforce_eager: true
tp: 1
seed: -5
dtype: null
technique:
  chunked-prefill: off
  overlap: 2
of-the-command: 9
port: 0
"""


def test_config_file_holds_any_flag(tmp_path: Path) -> None:
    args = make_parser().parse_args(["--config", write(tmp_path, FILE)])
    config = flags.engine_config(args)
    assert (config.model.model, config.model.served_model_name, config.model.max_model_len) == (
        "from-file",
        ("one", "two"),
        32_000,
    )
    assert (config.model.seed, config.model.dtype, config.device.enforce_eager) == (-5, "auto", True)
    assert (
        not config.cache.enable_prefix_caching and not config.scheduler.chunked_prefill and config.device.overlap == 2
    )
    assert args.of_the_command == 9 and flags.server_config(args).port == 0


def test_command_line_wins_over_the_file_wherever_it_stands(tmp_path: Path) -> None:
    path = write(tmp_path, FILE)
    words = (
        "--max-num-seqs",
        "8",
        "--served-model-name",
        "three",
        "--enable-prefix-caching",
        "--technique",
        "chunked_prefill=on",
    )
    for order in ((f"--config={path}", *words), (*words, "--config", path)):
        config = engine(*order)
        assert (config.scheduler.max_num_seqs, config.model.served_model_name) == (8, ("three",))
        assert config.cache.enable_prefix_caching and config.scheduler.chunked_prefill
    assert (
        engine("--config", path, "positional").model.model
        == engine("positional", "--config", path).model.model
        == "positional"
    )
    assert engine("--config", path, "--model", "option").model.model == "option"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("max-nums-seqs: 3", "unknown key 'max-nums-seqs'; did you mean max-num-seqs?"),
        ("max_num_sequences: 3", "did you mean max-num-seqs?"),
        ("swap-space: 4", "swap-space: a preempted request is recomputed"),
        ("dtype: fp8", "invalid choice: 'fp8'"),
        ("max-num-seqs: [1, 2]", "max-num-seqs is [1, 2], which --max-num-seqs cannot take"),
        ("max-num-seqs: yes", "max-num-seqs is True, which --max-num-seqs cannot take"),
        ("enforce-eager: 3", "enforce-eager is 3, which --enforce-eager cannot take"),
        ("model: {name: x}", "which --model cannot take"),
        ("config: other.yaml", "unknown key 'config'"),
        ("help: true", "unknown key 'help'"),
    ],
)
def test_a_wrong_entry_of_the_file_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, told: str
) -> None:
    err = usage_error(capsys, "--config", write(tmp_path, text))
    assert told in err


@pytest.mark.parametrize(
    ("text", "told"),
    [("[1, 2]", "holds a list"), ("a: [", "is not YAML"), ("a: !!python/object:os.x {}", "is not YAML")],
)
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        engine("--config", write(tmp_path, text))


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"no/such\.yaml cannot be read: No such file or directory"):
        engine("--config", "no/such.yaml")


def test_empty_file_changes_nothing(tmp_path: Path) -> None:
    assert engine("--config", write(tmp_path, "# nothing\n")) == EngineConfig()


def test_every_field_has_a_flag_or_is_a_switch() -> None:
    """A new config field is reachable from the command line without anybody wiring it."""
    known: dict[str, Any] = make_parser().options()
    for part in (*ENGINE_PARTS.values(), ServerConfig):
        for field in flags.config_fields(part):
            has_flag = f"--{field.name.replace('_', '-')}" in known
            assert has_flag != (field.metadata.get("flag") is False), field.name


def test_flags_known_from_elsewhere_are_not_flags_of_ours() -> None:
    """When one of them is built, its sentence must go."""
    assert not elsewhere("flags").keys() & set(make_parser().options())


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        make_parser().parse_args(words)
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_help_shows_what_most_people_need_and_says_how_to_see_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "--help")
    assert (
        15 <= text.count("\n  -") <= 26
        and "--port" in text
        and "--of-the-command" in text
        and "--block-size" not in text
    )
    hidden = len(make_parser().rare)
    assert (
        text.endswith(f"\n{hidden} more flags: headrace serve --help=all, or --help=WORD for those about a word.\n")
        and hidden > 40
    )
    whole = shown(capsys, "--help=all")
    assert all(flag in whole for flag in make_parser().options())
    assert "more flags" not in whole


def test_help_about_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "--help=kv_cache")
    assert "--kv-cache-dtype" in text and "--kv-cache-memory" in text and "--port" not in text
    assert shown(capsys, "-h", "--block-size").count("--block-size") == 0  # a flag of its own, not a word
    assert "No flag is about 'xyzzy'." in shown(capsys, "--help=xyzzy") and "--port" in shown(capsys, "--help", "xyzzy")


def test_common_fields_exist() -> None:
    parts = (*ENGINE_PARTS.values(), ServerConfig)
    assert {each.name for part in parts for each in flags.config_fields(part)} >= flags.COMMON_FIELDS
