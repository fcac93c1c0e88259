"""The frame of the command line: finding commands, reading options, messages, exit statuses."""

from __future__ import annotations

import subprocess
import sys
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from undertow.cli import main as cli


@dataclass
class Inner:
    """The inner part."""

    hidden_size: int = 8
    """How wide."""
    names: list[str] = field(default_factory=list)
    """Some names."""


@dataclass
class Config:
    """A command for tests."""

    data: str | list[str] = "stdlib"
    """Text."""
    steps: int | None = None
    """How many."""
    learning_rate: float = 1e-3
    """How fast."""
    resume: bool | str = False
    """Go on."""
    overwrite: bool = False
    """Start anew."""
    kind: Literal["a", "b"] = "a"
    """Which."""
    inner: Inner = field(default_factory=Inner)
    """Nested."""

    def __post_init__(self) -> None:
        if self.steps == 7:
            raise ValueError("seven steps are not allowed")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """Register the command ``probe``; gives the list of the configurations it was run with."""
    seen: list[Config] = []

    def run(config: Config) -> int | None:
        seen.append(config)
        if config.steps == 1:
            raise FileNotFoundError(2, "No such file or directory", "nowhere.txt")
        if config.steps == 2:
            raise ValueError("first line\nsecond line\nthird line")
        if config.steps == 3:
            raise AssertionError("a fault of the program")
        if config.steps == 4:
            raise KeyboardInterrupt
        return 143 if config.steps == 5 else None

    module = types.ModuleType("probe_command", "Probe things.")
    module.Config = Config  # type: ignore[attr-defined]
    module.run = run  # type: ignore[attr-defined]
    module.POSITIONAL = ("data",)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "probe_command", module)
    monkeypatch.setitem(cli.COMMANDS, "probe", ("probe_command", "for tests"))
    return seen


def test_options_in_every_form(calls: list[Config]) -> None:
    words = ["probe", "--steps", "9", "--learning-rate", "3e-4", "--inner.hidden_size=16", "--kind", "b", "--overwrite"]
    assert cli.main(words) == 0
    assert calls == [Config(steps=9, learning_rate=3e-4, kind="b", overwrite=True, inner=Inner(hidden_size=16))]
    assert isinstance(calls[0].inner, Inner)


@pytest.mark.parametrize(
    ("words", "resume", "overwrite", "data"),
    [
        (["--resume"], True, False, "stdlib"),
        (["--resume", "--overwrite", "true"], True, True, "stdlib"),
        (["--resume", "step-00000010"], "step-00000010", False, "stdlib"),
        (["--resume=false", "--overwrite", "false"], False, False, "stdlib"),
        (["--overwrite", "a.txt"], False, True, "a.txt"),
        (["a.txt", "--overwrite"], False, True, "a.txt"),
        (["--data", "a.txt", "b.txt", "--overwrite"], False, True, ["a.txt", "b.txt"]),
        (["--data", "-"], False, False, "-"),
        (["--data", '["x", "y"]'], False, False, ["x", "y"]),
    ],
)
def test_flags_lists_and_positional_words(
    calls: list[Config], words: list[str], resume: bool | str, overwrite: bool, data: str | list[str]
) -> None:
    assert cli.main(["probe", *words]) == 0
    assert (calls[0].resume, calls[0].overwrite, calls[0].data) == (resume, overwrite, data)


def test_list_of_one_or_several_words(calls: list[Config]) -> None:
    assert cli.main(["probe", "--inner.names", "one"]) == 0
    assert cli.main(["probe", "--inner.names", "one", "two"]) == 0
    assert [c.inner.names for c in calls] == [["one"], ["one", "two"]]


def test_config_file_and_override(calls: list[Config], tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("steps: 10\nlearning_rate: 5e-4\ninner:\n  hidden_size: 32\n")
    assert cli.main(["probe", "--config", str(file), "--steps", "11"]) == 0
    assert (calls[0].steps, calls[0].learning_rate, calls[0].inner.hidden_size) == (11, 5e-4, 32)


def test_print_config_can_be_read_back(calls: list[Config], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["probe", "--steps", "12", "--inner.names", "q", "--print_config"]) == 0
    assert calls == []
    file = tmp_path / "printed.yaml"
    file.write_text(capsys.readouterr().out)
    assert cli.main(["probe", "--config", str(file)]) == 0
    assert calls == [Config(steps=12, inner=Inner(names=["q"]))]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["prob"], "there is no command 'prob' (did you mean probe?)"),
        (["probe", "--stepz", "3"], "no option --stepz (did you mean --steps?)"),
        (["probe", "--hidden-size", "3"], "(did you mean --inner.hidden_size?)"),
        (["probe", "--steps", "many"], "--steps takes int or null, not 'many'"),
        (["probe", "--inner.hidden_size", "x"], "--inner.hidden_size takes int, not 'x'"),
        (["probe", "--kind", "c"], "--kind takes a or b, not 'c'"),
        (["probe", "--steps"], "--steps needs a value"),
        (["probe", "--steps", "--overwrite"], "--steps needs a value"),
        (["probe", "--data"], "--data needs a value"),
        (["probe", "a", "b"], "does not know what to do with 'b'"),
        (["probe", "--steps", "7"], "seven steps are not allowed"),
        (["probe", "--config", "missing.yaml"], "missing.yaml: No such file"),
        (["probe", "--steps", "1"], "nowhere.txt: No such file or directory"),
    ],
)
def test_mistakes_are_told_shortly(
    calls: list[Config], words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("undertow: error: ")
    assert message in err
    assert len(err.splitlines()) <= 2
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stepz: 3\n", "there is no option 'stepz' (did you mean steps?)"),
        ("inner:\n  hiden_size: 3\n", "there is no option 'inner.hiden_size' (did you mean inner.hidden_size?)"),
        ("- a\n- b\n", "should hold 'option: value' lines, not a list"),
        ("steps: [1\n", "is not YAML (line 2)"),
        ("steps: many\n", "--steps takes int or null, not 'many'"),
        ("inner: 3\n", "inner"),
    ],
)
def test_mistakes_in_a_config_file(
    calls: list[Config], text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(text)
    assert cli.main(["probe", "--config", str(file)]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert len(err.splitlines()) <= 2
    assert calls == []


def test_config_file_that_is_not_text(calls: list[Config], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "x.yaml"
    file.write_bytes(b"\xff\xfe\x00steps")
    assert cli.main(["probe", "--config", str(file)]) == 2
    assert "not UTF-8" in capsys.readouterr().err


def test_long_messages_are_cut(calls: list[Config], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["probe", "--steps", "2"]) == 2
    err = capsys.readouterr().err
    assert "second line" in err
    assert "third line" not in err
    assert "UNDERTOW_TRACEBACK=1" in err


def test_traceback_on_request(calls: list[Config], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNDERTOW_TRACEBACK", "1")
    with pytest.raises(FileNotFoundError):
        cli.main(["probe", "--steps", "1"])


def test_faults_of_the_program_keep_their_traceback(calls: list[Config]) -> None:
    with pytest.raises(AssertionError, match="a fault of the program"):
        cli.main(["probe", "--steps", "3"])


def test_exit_statuses(calls: list[Config]) -> None:
    assert cli.main(["probe", "--steps", "4"]) == 130
    assert cli.main(["probe", "--steps", "5"]) == 143


def test_help_explains_every_option(calls: list[Config], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["probe", "--help"]) == 0
    text = capsys.readouterr().out
    for word in ("--learning_rate", "How fast.", "--inner.hidden_size", "How wide.", "--config", "Probe things."):
        assert word in text
    assert calls == []


def test_root_help_lists_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    for name, (_, line) in cli.COMMANDS.items():
        assert name in text
        assert line in text
    assert cli.main([]) == 2


def test_root_help_and_version_import_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from undertow.cli.main import main\n"
        "assert main(['--help']) == 0 and main(['--version']) == 0\n"
        "print(sorted({'torch', 'transformers', 'jsonargparse', 'rich', 'numpy'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert done.stdout.splitlines()[-2].startswith("undertow ")


def test_reader_that_goes_away_is_no_error() -> None:
    code = (
        "import sys, undertow.cli.main as cli, types\n"
        "from dataclasses import dataclass\n"
        "@dataclass\nclass Config:\n    '''Nothing.'''\n"
        "def run(config):\n    for _ in range(100000): print('a line of output')\n"
        "sys.modules['chatty'] = types.ModuleType('chatty')\n"
        "sys.modules['chatty'].Config, sys.modules['chatty'].run = Config, run\n"
        "cli.COMMANDS['chatty'] = ('chatty', 'talks')\n"
        "sys.exit(cli.main(['chatty']))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=60) == 141
    assert process.stderr is not None
    assert process.stderr.read() == b""


def test_a_list_given_twice_is_one_list():
    fields = {"data": list[str]}
    assert cli.arrange("train", ["--data", "a", "b", "--data", "c"], fields) == ['--data=["a", "b", "c"]']
    assert cli.arrange("train", ["--data=a", "--data=c"], fields) == ['--data=["a", "c"]']
