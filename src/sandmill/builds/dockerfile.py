"""A Dockerfile: read, split into stages, and checked whole before anything runs.

The grammar is BuildKit's, through `e2b-dockerfile-utils`: a port of its parser, its word lexer and Docker's .dockerignore
patterns, without dependencies. (`dockerfile-parse`, the older package, knows neither heredocs nor flags, nor `${x:-y}`.) It
stops at its first error, so what is wrong with a line is noted here, the line taken out, and the rest read again.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from e2b_dockerfile_utils import DockerfileInstruction, DockerfileSyntaxError, ShellLex, parse_dockerfile_ast

from sandmill.errors import UsageError

FLAGS: Final = {
    "ADD": {"chown", "chmod", "link"},
    "COPY": {"from", "chown", "chmod", "link"},
    "FROM": {"platform"},
    "HEALTHCHECK": {"interval", "timeout", "start-period", "start-interval", "retries"},
    "RUN": {"network"},
}
"""Flags that are understood. `--link` is about caching alone and changes nothing here."""
SWITCHES: Final = {"link"}
"""Flags that need no value."""
UNSUPPORTED: Final = {
    ("RUN", "mount"): "mounts while building are not supported; COPY what is needed, and remove it in the same RUN",
    ("RUN", "security"): "a build has no privileges to give",
    ("COPY", "parents"): "not supported; name the directories in the destination",
    ("COPY", "exclude"): "not supported; use .dockerignore",
    ("ADD", "exclude"): "not supported; use .dockerignore",
    ("ADD", "checksum"): "belongs to URLs, which are not fetched",
    ("ADD", "keep-git-dir"): "belongs to repositories, which are not fetched",
    ("ADD", "unpack"): "not supported; local tar archives are always unpacked",
}
REMOTE: Final = re.compile(r"(?:https?|ftp|git|ssh)://|git@", re.IGNORECASE)
EXPANDED: Final = frozenset({"ADD", "COPY", "ENV", "EXPOSE", "LABEL", "STOPSIGNAL", "USER", "VOLUME", "WORKDIR", "ARG"})
STAGE_NAME: Final = re.compile(r"[a-z][a-z0-9_.-]*")
VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class DockerfileError(UsageError):
    """A Dockerfile that can't be built. `details["problems"]` lists all that is wrong, each as `[line, what]`."""

    default_code = "dockerfile_invalid"


@dataclass(frozen=True)
class Heredoc:
    """A document within the file. `expand`: variables in it are replaced (its name was not quoted)."""

    name: str
    content: str
    expand: bool


@dataclass(frozen=True)
class Instruction:
    """One instruction. Words are as written: quotes and variables are for the build to resolve."""

    line: int
    name: str
    text: str
    """The whole instruction as one line, for people."""
    flags: Mapping[str, str]
    args: tuple[str, ...]
    json: bool
    """Whether the arguments were a JSON array."""
    heredocs: tuple[Heredoc, ...] = ()


@dataclass(frozen=True)
class Stage:
    """From one FROM to the next. `image` is as written."""

    index: int
    name: str | None
    line: int
    image: str
    platform: str | None
    instructions: tuple[Instruction, ...]

    @property
    def label(self) -> str:
        return self.name or str(self.index)


@dataclass(frozen=True)
class Dockerfile:
    """A file that was read and has no error that can be seen without building it."""

    escape: str
    args: tuple[Instruction, ...]
    """ARGs before the first FROM: of FROM lines, and defaults of the stages' own."""
    stages: tuple[Stage, ...]
    warnings: tuple[tuple[int, str], ...] = ()

    def stage(self, name: str) -> Stage | None:
        """By its name (in any case) or number; of several the last."""
        for stage in reversed(self.stages):
            if (stage.name == name.lower()) or (name.isdigit() and stage.index == int(name)):
                return stage
        return None


class Problems:
    """What is wrong, by line."""

    def __init__(self) -> None:
        self.found: list[tuple[int, str]] = []

    def add(self, line: int, what: str) -> None:
        if (line, what) not in self.found:
            self.found.append((line, what))

    def raise_any(self, file: str) -> None:
        """Raises DockerfileError if there are any."""
        if not self.found:
            return
        self.found.sort()
        lines = [f"{file}:{line}: {what}" for line, what in self.found]
        text = lines[0] if len(lines) == 1 else "\n  ".join([f"{len(lines)} problems in {file}:", *lines])
        raise DockerfileError(text, details={"problems": [list(one) for one in self.found]})


def read(text: str, file: str = "Dockerfile") -> Dockerfile:
    """Reads the text of a Dockerfile; `file` is what errors call it. Raises DockerfileError with everything that is wrong."""
    problems = Problems()
    made = examine(text, problems)
    problems.raise_any(file)
    return made


def examine(text: str, problems: Problems) -> Dockerfile:
    """As `read`; what is wrong goes to `problems`."""
    parsed, escape, warnings = _parsed(text, problems)
    instructions = [_instruction(one) for one in parsed]
    for instruction in instructions:
        for what in _problems_of(instruction, escape):
            problems.add(instruction.line, what)
    args: list[Instruction] = []
    stages: list[tuple[Instruction, list[Instruction]]] = []
    for instruction in instructions:
        if instruction.name == "FROM":
            stages.append((instruction, []))
        elif stages:
            stages[-1][1].append(instruction)
        elif instruction.name == "ARG":
            args.append(instruction)
        else:
            problems.add(instruction.line, f"{instruction.name} stands before the first FROM; only ARG may")
    if not stages and not problems.found:
        problems.add(1, "there is no FROM")
    made = tuple(_stage(index, start, body, problems) for index, (start, body) in enumerate(stages))
    file = Dockerfile(escape, tuple(args), made, warnings)
    for stage in made:
        for instruction in stage.instructions:
            _check_from(instruction, stage, file, problems)
    return file


def _parsed(text: str, problems: Problems) -> tuple[list[DockerfileInstruction], str, tuple[tuple[int, str], ...]]:
    lines = text.split("\n")
    for _ in range(len(lines) + 1):
        try:
            ast = parse_dockerfile_ast("\n".join(lines))
        except DockerfileSyntaxError as error:
            at = error.line or 1
            problems.add(at, str(error).partition(": ")[2] or str(error))
            if "unterminated heredoc" in str(error) or not _take_out(lines, at - 1):
                break
            continue
        return ast.instructions, ast.escape_token, tuple((one.line, one.message) for one in ast.warnings)
    return [], "\\", ()


def _take_out(lines: list[str], at: int) -> bool:
    """Empties the instruction that begins at a line, so that the rest can be read. False: there is nothing to empty."""
    begun = False
    while at < len(lines):
        line = lines[at].rstrip()
        begun = begun or bool(line)
        lines[at] = ""
        at += 1
        if not line.endswith(("\\", "`")) and not line.lstrip().startswith("#"):
            break
    return begun


def _instruction(one: DockerfileInstruction) -> Instruction:
    flags: dict[str, str] = {}
    for flag in one.flags:
        name, given, value = flag.removeprefix("--").partition("=")
        flags[name] = value if given else ("true" if name in SWITCHES else "")
    heredocs = tuple(
        Heredoc(doc.name, re.sub(r"(?m)^\t+", "", doc.content) if doc.chomp else doc.content, doc.expand)
        for doc in one.heredocs
    )
    text = " ".join(one.original.split())
    return Instruction(one.start_line, one.name, text, flags, tuple(one.args), one.json, heredocs)


class _Anything(Mapping[str, str]):
    """An environment in which everything is set: for looking at words before their values are known."""

    def __getitem__(self, key: str) -> str:
        return "x"

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


def _problems_of(one: Instruction, escape: str) -> Iterator[str]:
    """What is wrong with an instruction by itself."""
    known = FLAGS.get(one.name, set())
    for flag, value in one.flags.items():
        if (one.name, flag) in UNSUPPORTED:
            yield f"{one.name} --{flag}: {UNSUPPORTED[one.name, flag]}"
        elif flag not in known:
            yield f"{one.name} has no flag --{flag}"
        elif not value:
            yield f"{one.name} --{flag} needs a value"
    if (mode := one.flags.get("chmod")) and "$" not in mode and not re.fullmatch(r"[0-7]{1,4}", mode):
        yield f"--chmod={mode}: only octal modes such as 755 are supported"
    if one.name == "RUN" and one.flags.get("network", "none") not in ("none", "default"):
        yield f"RUN --network={one.flags['network']}: none or default"
    if one.name == "ONBUILD":
        yield "ONBUILD is not supported: it would run when another image is built from this one"
        return
    yield from _shape(one)
    if one.name in EXPANDED and not one.heredocs:
        lex = ShellLex(escape, env=_Anything(), skip_unset_env=False)
        for word in (*one.args, *one.flags.values()):
            try:
                lex.process_word(word)
            except ValueError as error:
                yield str(error)


def _shape(one: Instruction) -> Iterator[str]:
    """The number and kinds of arguments."""
    args = one.args
    if one.name in ("WORKDIR", "USER", "STOPSIGNAL") and len(args) != 1:
        yield f"{one.name} takes one argument"
    elif one.name in ("ENV", "LABEL", "ARG", "EXPOSE", "VOLUME") and not args:
        yield f"{one.name} needs an argument"
    elif one.name == "SHELL" and (not one.json or not args):
        yield 'SHELL takes a JSON array: SHELL ["/bin/bash", "-c"]'
    elif one.name == "RUN" and not any(args):
        yield "RUN has nothing to run"
    elif one.name == "HEALTHCHECK" and (not args or args[0].upper() not in ("CMD", "NONE")):
        yield "HEALTHCHECK is followed by CMD or NONE"
    elif one.name in ("COPY", "ADD"):
        if len(args) < 2:
            yield f"{one.name} needs a source and a destination"
        elif len(args) > 2 and not args[-1].strip("\"'").endswith(("/", ".")) and "$" not in args[-1]:
            yield f"{one.name} of several sources: the destination must end with /"
        for source in args[:-1]:
            if one.name == "ADD" and (REMOTE.match(source) or source.endswith(".git")):
                yield f"ADD {source}: nothing is fetched; RUN a download, or put the file beside the Dockerfile"
        if one.heredocs and "from" in one.flags:
            yield "COPY --from takes no heredoc"
    if one.name == "ARG":
        for arg in args:
            if not VARIABLE.fullmatch(name := arg.partition("=")[0]):
                yield f"ARG: {name!r} is no name of a variable"
    if one.name == "ENV" and any(not name for name in args[::3]):
        yield "ENV: a name is empty"


def _stage(index: int, start: Instruction, body: list[Instruction], problems: Problems) -> Stage:
    words = start.args
    name = None
    if len(words) == 3 and words[1].lower() == "as":
        name = words[2].lower()
        if not STAGE_NAME.fullmatch(name):
            problems.add(start.line, f"{words[2]!r} is no name of a stage: letters, digits and . _ - , a letter first")
    elif len(words) != 1:
        problems.add(start.line, "FROM takes an image, and may go on with AS and a name")
    image = words[0] if words else ""
    return Stage(index, name, start.line, image, start.flags.get("platform"), tuple(body))


def _check_from(one: Instruction, stage: Stage, file: Dockerfile, problems: Problems) -> None:
    source = one.flags.get("from", "")
    if source.isdigit() and int(source) >= stage.index:
        problems.add(one.line, f"COPY --from={source}: no earlier stage has this number")
    elif (named := file.stage(source)) is not None and named.index == stage.index and stage.name == source.lower():
        problems.add(one.line, f"COPY --from={source}: a stage can't copy from itself")
