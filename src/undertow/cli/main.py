"""The command line: finds the command, reads its options into a dataclass, and turns mistakes into short messages.

A command is a module with a dataclass ``Config`` (one docstring a field) and ``run(config) -> int | None``. It may
name in ``POSITIONAL`` the fields that can also be given without their option name, and add to what was typed with
``complete(words) -> words``. Modules are imported only when
their command is called, so that ``undertow --help`` answers at once.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
import os
import re
import sys
import types
import typing
from collections.abc import Sequence
from typing import Any

COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("undertow.cli.train", "train a language model on text, from scratch or from a saved model"),
    "retrofit": ("undertow.cli.retrofit", "give a pretrained model a recurrence: any length in constant memory"),
    "eval": ("undertow.cli.eval", "bits per byte and perplexity of a saved model on text"),
    "generate": ("undertow.cli.generate", "write text with a saved model"),
    "read": ("undertow.cli.read", "read a long text once and keep what the model remembers of it"),
    "tokenizer": ("undertow.cli.tokenizer", "train a vocabulary on text"),
    "info": ("undertow.cli.info", "what is installed, which backend runs, and why"),
    "demo": ("undertow.cli.demo", "train, evaluate and sample a small model in a few minutes, no download"),
    "bench": ("undertow.cli.bench", "speed and memory against peers, paired in one run"),
}

# What a person can cause by what they typed or by the state of their files. Anything else is a fault of the program
# and keeps its traceback.
MISTAKES = (ValueError, OSError, FloatingPointError, ImportError, NotImplementedError)


class UsageError(ValueError):
    """A command line or configuration that cannot be understood; the message says what to type instead."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status.

    0 all well; 2 a mistake in the input, told in one or two lines; 1 a fault of the program, with its traceback;
    130 and 143 stopped by Ctrl-C and SIGTERM. ``UNDERTOW_TRACEBACK=1`` shows the traceback of mistakes too.

    Args:
        argv: the words after ``undertow``; None: those of the process.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        status = _run(words)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print("undertow: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read our output has gone (``undertow … | head``). Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except MISTAKES as error:
        if os.environ.get("UNDERTOW_TRACEBACK", "0") not in ("", "0"):
            raise
        print(f"undertow: error: {_message(error)}", file=sys.stderr)
        return 2


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_root_help())
        return 0 if words else 2
    if words[0] in ("--version", "-V", "version"):
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"undertow {version('undertow')}")
        except PackageNotFoundError:  # run from a checkout that was never installed
            print("undertow (not installed)")
        return 0
    name, rest = words[0], words[1:]
    if "OMP_WAIT_POLICY" not in os.environ:
        # Read when torch is loaded. GNU OpenMP lets threads wait for one another in a busy loop of milliseconds, ten
        # times slower than sleeping as soon as another program takes a core; so short a loop costs little.
        os.environ.setdefault("GOMP_SPINCOUNT", "5000")
    if name not in COMMANDS:
        raise UsageError(f"there is no command {name!r}{_nearest(name, COMMANDS)}; undertow --help lists them")
    module = importlib.import_module(COMMANDS[name][0])
    config = parse(name, module, rest)
    if config is None:  # --help, --print_config
        return 0
    status = module.run(config)
    return int(status or 0)


def _root_help() -> str:
    width = max(map(len, COMMANDS))
    lines = [
        "usage: undertow COMMAND [options]",
        "",
        "Language models that carry a state from window to window.",
        "",
        *(f"  {name:<{width}}  {line}" for name, (_, line) in COMMANDS.items()),
        "",
        "undertow COMMAND --help explains a command's options; each can also stand in a file given by --config x.yaml.",
        "undertow --version prints the version.",
    ]
    return "\n".join(lines)


def parse(name: str, module: types.ModuleType, words: list[str]) -> Any:
    """The command's ``Config`` from the words after its name, or None where the words only asked to print something."""
    import jsonargparse

    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
    config_class = module.Config
    fields = flat_fields(config_class)
    positional: Sequence[str] = getattr(module, "POSITIONAL", ())
    parser = jsonargparse.ArgumentParser(
        prog=f"undertow {name}",
        usage=" ".join(
            [f"undertow {name}", *(_shown(field, fields[field]) for field in positional), "[--option value ...]"]
        ),
        description=(module.__doc__ or COMMANDS[name][1]).strip(),
        formatter_class=_help_formatter(),
        exit_on_error=False,
    )
    parser.add_argument("--config", action="config", help="A YAML file with any of these options.")
    for part, others in _parts(config_class):
        parser.add_class_arguments(part, None, skip=others)
    arranged = arrange(name, words, fields, positional)
    if (complete := getattr(module, "complete", None)) is not None:
        arranged = complete(arranged)
    for word in arranged:
        if word.startswith("--config="):
            check_yaml(word.partition("=")[2], fields)
    try:
        parsed = parser.parse_args(arranged)
    except SystemExit as stop:
        if stop.code:
            raise
        return None
    except Exception as error:
        if type(error).__name__ not in ("ArgumentError", "ParserError"):
            raise
        raise UsageError(_parse_message(name, str(error), fields)) from error
    made = parser.instantiate(parsed) if hasattr(parser, "instantiate") else parser.instantiate_classes(parsed)
    return config_class(**{field.name: made[field.name] for field in dataclasses.fields(config_class) if field.init})


def _shown(field: str, hint: Any) -> str:
    return f"[{field.upper()}{' ...' if _takes_all(hint) else ''}]"


def _parts(config_class: type) -> list[tuple[type, set[str]]]:
    """The dataclasses that a configuration is put together from, each with the fields it leaves to the others.

    Each becomes a section of the help.
    """
    parts = [base for base in reversed(config_class.__mro__) if dataclasses.is_dataclass(base)]
    owner = {name: part for part in parts for name in inspect.get_annotations(part)}
    return [(part, {f.name for f in dataclasses.fields(part) if owner[f.name] is not part}) for part in parts]


def _help_formatter() -> Any:
    import jsonargparse

    class Formatter(jsonargparse.DefaultHelpFormatter):
        """Keeps the line breaks of a command's description, for the examples in it."""

        def _fill_text(self, text: str, width: int, indent: str) -> str:
            return "\n".join(indent + line for line in text.splitlines())

    return Formatter


def flat_fields(config_class: type, prefix: str = "") -> dict[str, Any]:
    """Every option name of a dataclass with its type; nested dataclasses give ``outer.inner``."""
    hints = typing.get_type_hints(config_class)
    names: dict[str, Any] = {}
    for field in dataclasses.fields(config_class):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            names[prefix + field.name] = hint
            names |= flat_fields(typing.cast(type, hint), prefix + field.name + ".")
        elif field.init:
            names[prefix + field.name] = hint
    return names


def _admits(hint: Any, kind: type) -> bool:
    """Whether a type hint is, or has among its alternatives, ``kind``."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return any(_admits(part, kind) for part in typing.get_args(hint))
    return hint is kind or typing.get_origin(hint) is kind


def arrange(name: str, words: list[str], fields: dict[str, Any], positional: Sequence[str] = ()) -> list[str]:
    """Turn what people type into ``--name=value`` words that the parser takes without guessing.

    Dashes in names may stand for underscores, a flag may stand without a value, an option that takes a list takes all
    the words that follow (what a shell makes of ``--data *.txt``), and the first words without a name go to the
    fields named in ``positional``, a list taking them all.
    """
    known = {*fields, "config", "print_config", "help"}
    free = list(positional)
    arranged: list[str] = []
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if word == "-h":
            arranged.append("--help")
            continue
        if not word.startswith("--") or word == "--":
            if word == "--":
                continue
            if not free:
                hint = "" if not positional else f" beside {' and '.join(p.upper() for p in positional)}"
                raise UsageError(f"undertow {name} does not know what to do with {word!r}{hint}")
            if _takes_all(fields[free[0]]):
                _gather(arranged, free[0], _as_json([word]))  # and the words after it, too
            else:
                arranged.append(f"--{free.pop(0)}={word}")
            continue
        key, equals, value = word[2:].partition("=")
        key = key.replace("-", "_")
        if key not in known:
            near = _nearest(key, list(fields), dashes=True)
            raise UsageError(f"undertow {name} has no option --{key}{near}; undertow {name} --help lists them")
        if key in free:
            free.remove(key)
        if dataclasses.is_dataclass(fields.get(key)):
            raise UsageError(f"--{key} has options of its own: --{key}.…; undertow {name} --help lists them")
        if key in ("help", "print_config"):
            arranged.append(word.replace("-", "_").replace("__", "--", 1) if equals else f"--{key}")
            continue
        hint = fields.get(key, str)
        if not equals:
            following = words[at] if at < len(words) and not _is_option(words[at]) else None
            if _admits(hint, bool):
                value = following if following is not None and _is_value(following, hint) else "true"
                at += following is not None and _is_value(following, hint)
            elif following is None:
                raise UsageError(f"--{key} needs a value: --{key} {_type_name(hint).upper()}")
            elif _admits(hint, list):
                gathered = []
                while at < len(words) and not _is_option(words[at]):
                    gathered.append(words[at])
                    at += 1
                value = gathered[0] if len(gathered) == 1 else _as_json(gathered)
            else:
                value = following
                at += 1
        if _takes_all(hint) and not value.startswith("["):
            value = _as_json([value])
        if _admits(hint, list) and not _admits(hint, bool):
            _gather(arranged, key, value)
        else:
            arranged.append(f"--{key}={value}")
    return arranged


def _takes_all(hint: Any) -> bool:
    """Whether a field can only be a list, and so takes all words that have no name."""
    return _admits(hint, list) and not _admits(hint, str)


def _gather(arranged: list[str], key: str, value: str) -> None:
    """Give a list a value; given again, it adds to what was given before."""
    before = [word for word in arranged if word.startswith(f"--{key}=")]
    if before:
        arranged.remove(before[0])
        value = _as_json([*_as_list(before[0].partition("=")[2]), *_as_list(value)])
    arranged.append(f"--{key}={value}")


def _as_list(value: str) -> list[str]:
    import json

    return json.loads(value) if value.startswith("[") else [value]


def _is_option(word: str) -> bool:
    return word.startswith("--") or word == "-h"


def _is_value(word: str, hint: Any) -> bool:
    """Whether the word after a flag belongs to it: anything where it may be a string, else only true and false."""
    return _admits(hint, str) or word.lower() in ("true", "false", "yes", "no", "on", "off", "0", "1")


def _as_json(words: list[str]) -> str:
    import json

    return json.dumps(words)


def check_yaml(path: str, fields: dict[str, Any]) -> None:
    """Refuse a configuration file that is missing, is not YAML, or has a key nobody reads (with the nearest one)."""
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            tree = yaml.safe_load(file)
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text: {error}") from error
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f" (line {where.line + 1})" if where is not None else ""
        raise UsageError(f"{path} is not YAML{line}: {getattr(error, 'problem', error)}") from error
    if tree is None:
        return
    if not isinstance(tree, dict):
        raise UsageError(f"{path} should hold 'option: value' lines, not a {type(tree).__name__}")

    def walk(branch: dict[str, Any], prefix: str) -> None:
        for key, value in branch.items():
            full = f"{prefix}{key}"
            if full not in fields:
                raise UsageError(f"{path}: there is no option {full!r}{_nearest(full, fields)}")
            if dataclasses.is_dataclass(fields[full]):
                if not isinstance(value, dict):
                    raise UsageError(f"{path}: {full} should hold options of its own, not {value!r}")
                walk(value, f"{full}.")

    walk(tree, "")


def _nearest(word: str, names: typing.Iterable[str], dashes: bool = False) -> str:
    """`` (did you mean …?)``, or nothing where no name is near."""
    names = list(names)
    found = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if not found:  # the inner name alone, as in --hidden_size for --model.hidden_size
        inner = {name.rpartition(".")[2]: name for name in names}
        found = [inner[near] for near in difflib.get_close_matches(word.rpartition(".")[2], inner, n=1, cutoff=0.6)]
    if not found:
        return ""
    return f" (did you mean {'--' if dashes else ''}{found[0]}?)"


def _type_name(hint: Any) -> str:
    if hint is type(None):
        return "null"
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type_name(part) for part in typing.get_args(hint))
    if origin is typing.Literal:
        return " or ".join(map(str, typing.get_args(hint)))
    if origin is not None:
        inner = ", ".join(_type_name(part) for part in typing.get_args(hint) if part is not Ellipsis)
        return f"{origin.__name__} of {inner}"
    return getattr(hint, "__name__", str(hint))


def _parse_message(name: str, text: str, fields: dict[str, Any]) -> str:
    """The parser's message in a person's words."""
    found = re.search(r'key "([\w.]+)"', text)
    if found and found.group(1) in fields:
        key = found.group(1)
        given = re.search(r"(?:Given value|Got value): (.*)", text)
        value = f", not {given.group(1).strip()!r}" if given else ""
        return f"--{key} takes {_type_name(fields[key])}{value}"
    return f"undertow {name}: {' '.join(text.split())}"


def _message(error: BaseException) -> str:
    """At most two lines."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None and len(error.args) >= 2:
        return f"{error.filename}: {error.strerror}"
    lines = [line.rstrip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    if len(lines) > 2:
        lines = [*lines[:2]]
        lines[1] += " … (UNDERTOW_TRACEBACK=1 shows the rest)"
    return "\n".join(lines)
