"""A batch script as sbatch and bash would read it: directives, and the simple commands behind them.

No shell runs here. Commands are found well enough to recognise habits in them (continued lines, quotes over several
lines, here-documents and comments are understood; what a substitution would give is not).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

SHORT = {
    "-A": "account", "-C": "constraint", "-D": "chdir", "-G": "gpus", "-J": "job-name", "-N": "nodes", "-a": "array",
    "-c": "cpus-per-task", "-d": "dependency", "-e": "error", "-n": "ntasks", "-o": "output", "-p": "partition",
    "-q": "qos", "-t": "time", "-w": "nodelist", "-x": "exclude",
}  # fmt: skip
"""Source: sbatch(1), srun(1)."""
_NO_VALUE = frozenset(
    "requeue no-requeue hold wait verbose quiet overcommit oversubscribe contiguous spread-job use-min-nodes parsable "
    "exclusive get-user-env label unbuffered no-kill preserve-env pty multi-prog exact overlap test-only".split()
)
_DIRECTIVE = re.compile(r"#SBATCH[ \t]+(.*)")
_HEREDOC = re.compile(r"<<-?[ \t]*([\"']?)([A-Za-z_][A-Za-z0-9_]*)\1")
_OPERATORS = frozenset([";", "&", "&&", "||", "|", "|&", ";;", "(", ")", "{", "}"])
_PREFIXES = frozenset("if then else elif do while until time ! { exec command nohup env".split())
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")


@dataclass(frozen=True, kw_only=True)
class Directive:
    """One option of a #SBATCH line; `value` is "" for an option without one."""

    line: int
    name: str
    value: str
    ignored: bool
    """It stands behind the first command, where sbatch does not read it."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """One simple command: a program with its words."""

    line: int
    words: tuple[str, ...]
    """Assignments before it, and words such as `exec` and `if`, left out."""
    prefix: tuple[str, ...]
    """Those."""
    text: str
    """The whole logical line that it stands in, comments left out."""
    operator: str
    """What follows it: "&" for one in the background, "|" for one in a pipe, or another of the shell's, or ""."""

    @property
    def program(self) -> str:
        return self.words[0].rpartition("/")[2] if self.words else ""

    @property
    def is_background(self) -> bool:
        return self.operator == "&"

    @property
    def replaces_the_shell(self) -> bool:
        return "exec" in self.prefix


@dataclass(frozen=True, kw_only=True)
class BatchScript:
    """What stands in the file."""

    text: str
    directives: tuple[Directive, ...]
    commands: tuple[Command, ...]

    def given(self, name: str) -> Directive | None:
        """The directive that counts for an option: the last one that sbatch reads."""
        found = [one for one in self.directives if one.name == name and not one.ignored]
        return found[-1] if found else None

    def value(self, name: str) -> str:
        """The value of an option; "" when it is not given."""
        found = self.given(name)
        return found.value if found is not None else ""


def read(text: str) -> BatchScript:
    """The script in a text."""
    logical = list(_logical_lines(text))
    first_command = min((number for number, _ in logical), default=1 << 60)
    directives: list[Directive] = []
    for number, line in enumerate(text.splitlines(), 1):
        match = _DIRECTIVE.match(line)
        if match:
            for name, value in options(_words(match[1])):
                directives.append(Directive(line=number, name=name, value=value, ignored=number > first_command))
    commands = [command for number, line in logical for command in _commands(number, line)]
    return BatchScript(text=text, directives=tuple(directives), commands=tuple(commands))


def options(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The options among the words, by long name, until the first word that is none: "-N2", "--nodes 2", "--nodes=2"."""
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] not in ("-", "--"):
        word = rest.pop(0)
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
        else:
            name, equals, value = SHORT.get(word[:2], word[:2]), "=" if len(word) > 2 else "", word[2:].lstrip("=")
        takes_next = not equals and name not in _NO_VALUE and rest and not rest[0].startswith("-")
        yield name, rest.pop(0) if takes_next else value


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Each command line that is not empty, with the number of its first line; comments are taken out."""
    lines = text.splitlines()
    index = 0
    while index < len(lines):
        number, code = index + 1, ""
        quote = ""
        while index < len(lines):
            part, quote, continued = _without_comment(lines[index], quote)
            code += part
            index += 1
            if not continued and not quote:
                break
            code += "\n" if quote else " "
        for _, end in _HEREDOC.findall(code):
            while index < len(lines) and lines[index].strip() != end:
                index += 1
            index += 1
        if code.strip():
            yield number, code.strip()


def _without_comment(line: str, quote: str) -> tuple[str, str, bool]:
    """The line up to a comment, the quote that is open at its end, and whether a backslash continues it."""
    position = 0
    while position < len(line):
        character = line[position]
        if quote:
            if character == "\\" and quote == '"':
                position += 1
            elif character == quote:
                quote = ""
        elif character == "\\":
            if position == len(line) - 1:
                return line[:position], "", True
            position += 1
        elif character in "\"'":
            quote = character
        elif character == "#" and (position == 0 or line[position - 1] in " \t;&|("):
            return line[:position], "", False
        position += 1
    return line, quote, False


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text, comments=True)
    except ValueError:
        return text.split()


def _commands(number: int, line: str) -> Iterator[Command]:
    lexer = shlex.shlex(line.replace("\n", " "), posix=True, punctuation_chars="();<>|&")
    lexer.whitespace_split = True
    lexer.commenters = ""
    try:
        tokens = list(lexer)
    except ValueError:
        tokens = line.split()
    words: list[str] = []
    for token in [*tokens, ";"]:
        if token not in _OPERATORS:
            words.append(token)
            continue
        prefix: list[str] = []
        while words and (words[0] in _PREFIXES or _ASSIGNMENT.match(words[0])):
            prefix.append(words.pop(0))
        if words or prefix:
            operator = token if token != ";" else ""
            yield Command(line=number, words=tuple(words), prefix=tuple(prefix), text=line, operator=operator)
        words = []
