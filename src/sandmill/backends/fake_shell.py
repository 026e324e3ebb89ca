"""The fake's commands: a documented handful, and lists of them as a shell would run them.

Programs: true, false, echo, printf, cat, pwd, env, sleep (on the fake's clock), exit, kill (-9 $$, -SEGV $$), cd, export,
mkdir -p, rm -r, ls, sh -c, touch. Lists: `;` `&&` `||` and newlines, `>` `>>` `2>` `>&2`, quotes, `$NAME`, `$?`, `$$`.
Anything else is "command not found" (127), as in a shell.
"""

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field

PID = 100
"""What `$$` gives."""


@dataclass
class Outcome:
    """How a list ended so far."""

    stdout: bytearray = field(default_factory=bytearray)
    stderr: bytearray = field(default_factory=bytearray)
    exit_code: int = 0
    signal: int | None = None
    timed_out: bool = False
    ended: bool = False


@dataclass
class Shell:
    """One shell: where it stands, its variables, the files it sees."""

    files: dict[str, bytes]
    directories: set[str]
    cwd: str
    env: dict[str, str]
    stdin: bytes
    sleep: Callable[[float], bool]
    """Passes time on the fake's clock; False when the timeout came first."""
    out: Outcome = field(default_factory=Outcome)

    def run(self, line: str) -> Outcome:
        try:
            lexer = shlex.shlex(line.replace("\n", " ; "), posix=True, punctuation_chars=";&|><")
            lexer.whitespace_split = True
            words = list(lexer)
        except ValueError as error:
            self._fail(2, f"sh: syntax error: {error}")
            return self.out
        joint = ";"
        part: list[str] = []
        for word in [*words, ";"]:
            if word in (";", "&&", "||"):
                due = joint == ";" or (joint == "&&") == (self.out.exit_code == 0)
                if part and due and not self.out.ended:
                    self._simple(part)
                joint, part = word, []
            else:
                part.append(word)
        return self.out

    def argv(self, argv: list[str]) -> Outcome:
        self._program(argv, self.out.stdout, self.out.stderr)
        return self.out

    def known(self, name: str) -> bool:
        return hasattr(self, f"do_{name.rsplit('/', 1)[-1]}")

    def _simple(self, words: list[str]) -> None:
        argv: list[str] = []
        stdout: bytearray = bytearray()
        stderr: bytearray = bytearray()
        goals: list[tuple[str, str, str]] = []
        index = 0
        while index < len(words):
            word = words[index]
            if word in (">", ">>") and index + 1 < len(words):
                which = "stdout"
                if argv and argv[-1] in ("1", "2") and word == ">":
                    which = "stderr" if argv.pop() == "2" else "stdout"
                goals.append((which, word, self.expand(words[index + 1])))
                index += 1
            elif word == ">&" and index + 1 < len(words):
                goals.append(("stdout", ">&", words[index + 1]))
                index += 1
            else:
                argv.append(self.expand(word))
            index += 1
        while argv and re.fullmatch(r"[A-Za-z_]\w*=.*", argv[0], re.DOTALL):
            name, _, value = argv.pop(0).partition("=")
            self.env[name] = value
        if argv:
            self._program(argv, stdout, stderr)
        kept = {"stdout": stdout, "stderr": stderr}
        for which, how, goal in goals:
            if how == ">&":
                if goal == "2":
                    stderr += stdout
                    stdout.clear()
                continue
            path = self.path(goal)
            self.files[path] = (self.files.get(path, b"") if how == ">>" else b"") + bytes(kept[which])
            kept[which].clear()
        self.out.stdout += stdout
        self.out.stderr += stderr

    def expand(self, word: str) -> str:
        word = word.replace("$?", str(self.out.exit_code)).replace("$$", str(PID))
        return re.sub(r"\$(\w+)", lambda match: self.env.get(match[1], ""), word)

    def path(self, name: str) -> str:
        parts: list[str] = []
        for part in (name if name.startswith("/") else f"{self.cwd}/{name}").split("/"):
            if part == "..":
                parts = parts[:-1]
            elif part not in ("", "."):
                parts.append(part)
        return "/" + "/".join(parts)

    def _fail(self, code: int, message: str) -> None:
        self.out.exit_code = code
        self.out.stderr += message.encode() + b"\n"

    def _program(self, argv: list[str], stdout: bytearray, stderr: bytearray) -> None:
        action = getattr(self, f"do_{argv[0].rsplit('/', 1)[-1]}", None)
        if action is None:
            self.out.exit_code = 127
            stderr += f"sh: {argv[0]}: not found\n".encode()
            return
        self.out.exit_code = action(argv[1:], stdout, stderr) or 0

    def do_true(self, args: list[str], stdout: bytearray, stderr: bytearray) -> int:
        return 0

    def do_false(self, args: list[str], stdout: bytearray, stderr: bytearray) -> int:
        return 1

    def do_echo(self, args: list[str], stdout: bytearray, stderr: bytearray) -> int:
        newline = b"" if args[:1] == ["-n"] else b"\n"
        stdout += " ".join(args[1:] if not newline else args).encode(errors="surrogateescape") + newline
        return 0

    def do_printf(self, args: list[str], stdout: bytearray, stderr: bytearray) -> int:
        text = args[0] if args else ""
        for value in args[1:]:
            text = text.replace("%s", value, 1)
        stdout += _escapes(text)
        return 0

    def do_cat(self, args: list[str], stdout: bytearray, stderr: bytearray) -> int:
        if not args:
            stdout += self.stdin
        for name in args:
            if (data := self.files.get(self.path(name))) is None:
                stderr += f"cat: {name}: No such file or directory\n".encode()
                return 1
            stdout += data
        return 0

    def do_pwd(self, args: list[str], stdout: bytearray, stderr: bytearray) -> int:
        stdout += self.cwd.encode() + b"\n"
        return 0

    def do_env(self, args: list[str], stdout: bytearray, stderr: bytearray) -> int:
        stdout += "".join(f"{name}={value}\n" for name, value in sorted(self.env.items())).encode()
        return 0

    def do_sleep(self, args: list[str], stdout: bytearray, stderr: bytearray) -> int:
        if not self.sleep(float(args[0]) if args else 0.0):
            self.out.timed_out = self.out.ended = True
        return 0

    def do_exit(self, args: list[str], stdout: bytearray, stderr: bytearray) -> int:
        self.out.ended = True
        return int(args[0]) & 255 if args else self.out.exit_code

    def do_kill(self, args: list[str], stdout: bytearray, stderr: bytearray) -> int:
        signals = {"9": 9, "KILL": 9, "SEGV": 11, "11": 11, "TERM": 15, "15": 15}
        number = signals.get(args[0].lstrip("-"), 15) if args else 15
        if args[-1:] == [str(PID)]:
            self.out.signal = number
            self.out.ended = True
        return 0

    def do_cd(self, args: list[str], stdout: bytearray, stderr: bytearray) -> int:
        goal = self.path(args[0] if args else self.env.get("HOME", "/"))
        if goal not in self.directories:
            stderr += f"sh: cd: {goal}: No such file or directory\n".encode()
            return 2
        self.cwd = goal
        return 0

    def do_export(self, args: list[str], stdout: bytearray, stderr: bytearray) -> int:
        for one in args:
            name, _, value = one.partition("=")
            self.env[name] = value
        return 0

    def do_mkdir(self, args: list[str], stdout: bytearray, stderr: bytearray) -> int:
        for name in args:
            if not name.startswith("-"):
                add_directories(self.directories, self.path(name))
        return 0

    def do_touch(self, args: list[str], stdout: bytearray, stderr: bytearray) -> int:
        for name in args:
            self.files.setdefault(self.path(name), b"")
        return 0

    def do_rm(self, args: list[str], stdout: bytearray, stderr: bytearray) -> int:
        for name in args:
            if not name.startswith("-"):
                remove(self.files, self.directories, self.path(name))
        return 0

    def do_ls(self, args: list[str], stdout: bytearray, stderr: bytearray) -> int:
        path = self.path(args[-1] if args else ".")
        stdout += "".join(f"{name}\n" for name in names(self.files, self.directories, path)).encode()
        return 0

    def do_sh(self, args: list[str], stdout: bytearray, stderr: bytearray) -> int:
        inner = Shell(self.files, self.directories, self.cwd, dict(self.env), self.stdin, self.sleep)
        inner.run(args[1] if args[:1] == ["-c"] and len(args) > 1 else "")
        stdout += inner.out.stdout
        stderr += inner.out.stderr
        self.out.timed_out, self.out.signal = inner.out.timed_out, inner.out.signal
        self.out.ended = self.out.ended or inner.out.timed_out
        return inner.out.exit_code

    do_bash = do_sh


def _escapes(text: str) -> bytes:
    """printf's escapes: \\n, \\t, \\r, octal."""
    plain = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}

    def one(match: re.Match[str]) -> str:
        body = match[1]
        return chr(int(body, 8) & 255) if body[0].isdigit() else plain.get(body, "\\" + body)

    return re.sub(r"\\([0-7]{1,3}|.)", one, text).encode("latin-1", errors="replace")


def add_directories(directories: set[str], path: str) -> None:
    """A directory and all above it."""
    while path not in ("", "/"):
        directories.add(path)
        path = path.rsplit("/", 1)[0]


def remove(files: dict[str, bytes], directories: set[str], path: str) -> bool:
    """A file or a directory with all in it; whether there was one."""
    inside = [name for name in files if name == path or name.startswith(path + "/")]
    below = [name for name in directories if name == path or name.startswith(path + "/")]
    for name in inside:
        del files[name]
    directories.difference_update(below)
    return bool(inside or below)


def names(files: dict[str, bytes], directories: set[str], path: str) -> list[str]:
    """Names right below a directory, sorted."""
    start = "/" if path == "/" else path + "/"
    found = {name[len(start) :].split("/", 1)[0] for name in [*files, *directories] if name.startswith(start)}
    return sorted(found - {""})
