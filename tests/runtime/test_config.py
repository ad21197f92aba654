"""TOML, environment and --set become one model; errors name the key."""

from pathlib import Path

import pytest
from pydantic import Field, field_validator, model_validator

from flexmarl.core.errors import ErrorReason
from flexmarl.runtime.config import (
    ConfigError,
    Section,
    ServiceConfig,
    UnknownKeyError,
    load_config,
)


class Store(Section):
    path: Path = Path("data")
    cache_bytes: int = Field(default=1, ge=0)
    label: str = ""


class Part(Section):
    rate: float


class Inner(Section):
    depth: int = 1


class Curve(Section):
    start: float


class Named(Section):
    rate: float = 1.0
    inner: Inner = Inner()
    curve: float | Curve = 0.0

    @field_validator("rate")
    @classmethod
    def _positive(cls, value: float) -> float:
        if value < 0:
            raise ValueError("a rate is not negative; use 0")
        return value


class Config(ServiceConfig):
    store: Store = Store()
    parts: tuple[Part, ...] = ()
    by_name: dict[str, Named] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _has_a_path(self) -> "Config":
        if self.store.path == Path("nowhere"):
            raise ValueError("store.path: not there")
        return self


@pytest.fixture
def toml(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "service.toml"
        path.write_text(text)
        return path

    return write


def test_defaults_without_a_file():
    assert load_config(Config) == Config()


def test_set_beats_environment_beats_file(toml):
    path = toml("[store]\npath = 'file'\ncache_bytes = 10\nlabel = 'file'\n")
    environ = {
        "FLEXMARL_X__STORE__PATH": "env",
        "FLEXMARL_X__STORE__CACHE_BYTES": "20",
        "FLEXMARL_XY__STORE__CACHE_BYTES": "99",
    }
    config = load_config(
        Config,
        path=path,
        env_prefix="FLEXMARL_X",
        environ=environ,
        overrides=["store.path = set/it"],
    )
    assert config.store == Store(path=Path("set/it"), cache_bytes=20, label="file")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("127.0.0.1", "127.0.0.1"), ("'quoted'", "quoted"), ('"1"', "1"), ("a=b", "a=b")],
)
def test_bare_text_is_a_string(text, expected):
    assert load_config(Config, overrides=[f"store.label={text}"]).store.label == expected


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("store.label=\udcff", r"store\.label: '\\udcff' has NUL, or"),
        ("store.label=a\0b", r"store\.label: 'a\\x00b' has NUL"),
        ("parts=[{rate='\udcff'}]", r"parts\.rate: '\\udcff'"),
        ("store.l\udcff=1", r"store: 'l\\udcff'"),
    ],
)
def test_what_is_no_text_is_refused_by_the_key(override, said):
    with pytest.raises(ConfigError, match=said):
        load_config(Config, overrides=[override])
    assert load_config(Config, overrides=["store.label=\u00e4"]).store.label == "\u00e4"


def test_a_wait_without_end_is_refused():
    with pytest.raises(ConfigError, match=r"server\.grace_s: .* finite number"):
        load_config(Config, overrides=["server.grace_s=inf"])


@pytest.mark.parametrize("value", ["9" * 5000, "[" * 99999])
def test_values_that_no_reader_takes_are_no_toml(toml, value):
    with pytest.raises(ConfigError, match="not TOML"):
        load_config(Config, path=toml(f"store.cache_bytes = {value}\n"))


def test_toml_values_keep_their_type():
    config = load_config(Config, overrides=["parts=[{rate=0.5},{rate=1}]", "server.port=7002"])
    assert [part.rate for part in config.parts] == [0.5, 1.0]
    assert config.server.port == 7002


@pytest.mark.parametrize(
    ("override", "wrong", "right"),
    [
        ("server.prot=1", "server.prot", "server.port"),
        ("stor.path=x", "stor", "store"),
        ("store.server_port=1", "store.server_port", None),
        ("store.port=1", "store.port", "server.port"),
        ("port=1", "port", "server.port"),
        ("by_name.solver.raet=1", "by_name.solver.raet", "by_name.solver.rate"),
        ("by_name.solver.depth=1", "by_name.solver.depth", "by_name.solver.inner.depth"),
        ("by_name.a.inner.dept=1", "by_name.a.inner.dept", "by_name.a.inner.depth"),
        ("rate=1", "rate", "by_name.<name>.rate"),
        ("by_name.a.curve={strat=1}", "by_name.a.curve.strat", "by_name.a.curve.start"),
    ],
)
def test_unknown_keys_are_named_with_the_closest_one(override, wrong, right):
    with pytest.raises(UnknownKeyError) as caught:
        load_config(Config, overrides=[override])
    message = str(caught.value)
    assert caught.value.reason is ErrorReason.UNKNOWN_CONFIG_KEY
    assert "\n" not in message
    assert repr(wrong) in message
    assert right is None or f"did you mean {right!r}?" in message


def test_an_unknown_environment_key_is_refused():
    with pytest.raises(UnknownKeyError, match=r"server\.prot"):
        load_config(Config, env_prefix="FLEXMARL_X", environ={"FLEXMARL_X__SERVER__PROT": "1"})


def test_the_unknown_key_is_told_before_what_it_causes(toml):
    with pytest.raises(UnknownKeyError, match=r"'parts\.0\.raet', did you mean 'parts\.0\.rate'"):
        load_config(Config, path=toml("[[parts]]\nraet = 1\n"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["server.port=70000"], "server.port"),
        (["store.cache_bytes=many"], "store.cache_bytes"),
        (["store.cache_bytes=-1"], "store.cache_bytes"),
        (["by_name.a.rate=-1"], "config: by_name.a.rate: a rate is not negative; use 0"),
        (["by_name.a.curve={start='x'}"], "config: by_name.a.curve"),
        (["store.path=nowhere"], "config: store.path: not there"),
        (["store"], "section.key=value"),
        (["=1"], "section.key=value"),
        (["store.path=a", "store.path.b=1"], "not a section"),
    ],
)
def test_wrong_values_are_one_line_naming_the_key(overrides, message):
    with pytest.raises(ConfigError) as caught:
        load_config(Config, overrides=overrides)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_missing_or_not_toml_is_named(toml, tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.toml: cannot be read"):
        load_config(Config, path=tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match=r"service\.toml: not TOML"):
        load_config(Config, path=toml("[store"))


def test_config_is_frozen_and_described():
    config = load_config(Config)
    with pytest.raises(ValueError, match="frozen"):
        config.server.port = 1  # type: ignore[misc]
    for section in (type(config.server), type(config.log)):
        assert all(field.description for field in section.model_fields.values())
