"""Builds an image: the stages that its target needs, instruction by instruction.

Each instruction that changes files is one prepared environment (control/environments.py) on top of the one before: a layer of
its own, under the hash of its parent image, the instruction after substitution, and the digest of what it copies. Who builds
the same waits for the same work. What is configuration alone (ENV, CMD, LABEL, …) is gathered and laid on top at the end; it
never makes an earlier layer anew.
"""

import base64
import posixpath
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sandmill.builds.context import Context, Parcel, archive_items, text_item
from sandmill.builds.dockerfile import Dockerfile, DockerfileError, Instruction, Problems, Stage, read
from sandmill.builds.state import State, argument, command, pairs
from sandmill.builds.variables import UNDECLARED, Scope, is_this_platform, platform_args, this_platform
from sandmill.control.environments import SCRATCH
from sandmill.control.steps import SCRIPT
from sandmill.errors import ImageError, NotFoundError, PreparationError, SandmillError, UsageError
from sandmill.sdk.control import Control, Prepared
from sandmill.sdk.sandbox import Sandbox, control_for
from sandmill.wire import ImageConfig, ImageInfo

TAIL_LINES: Final = 20
"""How much of a failed command's output its error shows."""
NAME: Final = re.compile(r"(?!host$|host:|sha256:)[A-Za-z0-9][A-Za-z0-9._\-/:@+]{0,254}")
HEREDOC: Final = re.compile(r"<<-?\s*(['\"]?)[^\s'\"<]+\1")

Listener = Callable[[bytes], object]


class BuildError(PreparationError):
    """An instruction failed. `details` has its `line`, the `command`, and what it wrote (`log`, the latest part of it)."""

    default_code = "build_failed"


@dataclass(frozen=True)
class Built:
    """What a build made. `image` is what sandboxes are made from: the name it was given, else one by its content."""

    image: str
    id: str
    layers: int
    """Instructions that change files, of all stages that were needed."""
    cached: int
    """How many of these were there already."""
    build_s: float
    warnings: tuple[str, ...] = ()


def build(
    context: str | Path,
    dockerfile: str | Path | None = None,
    *,
    name: str | None = None,
    target: str | None = None,
    build_args: Mapping[str, str] | None = None,
    network: str = "all",
    no_cache: bool = False,
    on_output: Listener | None = None,
    cancelled: threading.Event | None = None,
    api_url: str | None = None,
    api_key: str | None = None,
) -> Built:
    """Builds an image from a Dockerfile, and gives what to make sandboxes from.

    Args:
        context: The folder that COPY and ADD copy from, with its .dockerignore.
        dockerfile: Default: the context's own `Dockerfile`.
        name: What to call the image; one of that name loses it.
        target: The stage to build, by name or number. Default: the last.
        build_args: Values of ARGs.
        network: Of RUN: `all` or `none`. Nothing else has one.
        no_cache: Runs everything anew.
        on_output: Is given what a person should see, as it comes.
        cancelled: When it is set, the build ends within seconds, and what it runs with it.

    Raises:
        DockerfileError: with all that is wrong with the file, by line. BuildError: an instruction failed, or an image that
        it names is neither in the store nor in its registry. UsageError, and what the server raises.
    """
    root = Path(context)
    path = Path(dockerfile) if dockerfile is not None else root / "Dockerfile"
    if name is not None and not NAME.fullmatch(name):
        raise UsageError(f"{name!r} can't name an image", hint="letters, digits and . _ - / : @ +; not host")
    if network not in ("none", "all"):
        raise UsageError(f"network is {network!r}", hint="none or all")
    try:
        text = path.read_text()
    except FileNotFoundError as error:
        raise UsageError(f"there is no {path}", hint="-f names another file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} can't be read: {error}") from error
    file = read(text, path.name)
    files = Context.open(root, path)
    control = control_for(api_url, api_key)
    run = _Build(
        file, path.name, files, control, dict(build_args or {}), network, no_cache, on_output or _nobody, cancelled
    )
    return run.to_its_end(target, name, api_url, api_key)


def _nobody(data: bytes) -> None:
    pass


class _Build:
    def __init__(
        self,
        file: Dockerfile,
        file_name: str,
        context: Context,
        control: Control,
        given: dict[str, str],
        network: str,
        no_cache: bool,
        say: Listener,
        cancelled: threading.Event | None,
    ) -> None:
        self._file = file
        self._file_name = file_name
        self._context = context
        self._control = control
        self._given = given
        self._network = network
        self._no_cache = no_cache
        self._say = say
        self._cancelled = cancelled
        self._stages: dict[int, State] = {}
        self._global = Scope(file.escape, given, {})
        self._layers = 0
        self._cached = 0

    def to_its_end(self, target: str | None, name: str | None, api_url: str | None, api_key: str | None) -> Built:
        began = time.monotonic()
        warnings = self._warnings()
        for warning in warnings:
            self._tell(f"warning: {warning}")
        self._global.args.update(platform_args(target or "default"))
        for arg in self._file.args:
            with _At(self, arg):
                for declaration in arg.args:
                    self._global.declare(declaration)
        stage = self._file.stages[-1] if target is None else self._file.stage(target)
        if stage is None:
            there = ", ".join(one.label for one in self._file.stages)
            raise UsageError(f"{self._file_name} has no stage {target!r}", hint=f"it has {there}")
        self._check_sources(stage)
        state = self._stage(stage)
        image = self._configured(state)
        if name is not None:
            box = Sandbox(image=image, api_url=api_url, api_key=api_key)
            image_id = box.commit(name).id
        else:
            image_id = self._control.image(image).id
        return Built(name or image, image_id, self._layers, self._cached, time.monotonic() - began, warnings)

    def _warnings(self) -> tuple[str, ...]:
        declared = {one.partition("=")[0] for arg in self._file.args for one in arg.args}
        for stage in self._file.stages:
            declared |= {one.partition("=")[0] for arg in stage.instructions if arg.name == "ARG" for one in arg.args}
        unused = sorted(set(self._given) - declared - UNDECLARED - set(platform_args("")))
        lines = tuple(f"{self._file_name}:{line}: {what}" for line, what in self._file.warnings)
        return (*lines, *(f"no ARG takes the build argument {name}" for name in unused))

    def _check_sources(self, target: Stage) -> None:
        """Raises DockerfileError for what is to be copied from the context and isn't there, as far as that is known now."""
        problems = Problems()
        nothing = Scope(self._file.escape, {}, {})
        for stage in self._needed(target):
            for one in stage.instructions:
                if one.name not in ("COPY", "ADD") or "from" in one.flags:
                    continue
                for word in one.args[:-1]:
                    if "$" in word or word.startswith("<<"):
                        continue
                    try:
                        self._context.find(nothing.expand(word))
                    except UsageError as error:
                        problems.add(one.line, error.message)
        problems.raise_any(self._file_name)

    def _needed(self, stage: Stage) -> list[Stage]:
        """A stage, and those that it begins with or copies from."""
        names = [one.flags["from"] for one in stage.instructions if "from" in one.flags]
        base = stage.image.split("$")[
            0
        ]  # a variable's value may name a stage, too; that one is checked when it is built
        names += [base] if base == stage.image and not base.isdigit() else []
        found = [stage]
        for name in names:
            earlier = self._file.stage(name)
            if earlier is not None and earlier.index < stage.index:
                found += [one for one in self._needed(earlier) if one not in found]
        return found

    def _stage(self, stage: Stage) -> State:
        if stage.index not in self._stages:
            state = self._begin(stage)
            for instruction in stage.instructions:
                self._look()
                with _At(self, instruction):
                    self._apply(instruction, stage, state)
            self._stages[stage.index] = state
        return self._stages[stage.index]

    def _look(self) -> None:
        """Raises SandmillError if nobody wants the build any more."""
        if self._cancelled is not None and self._cancelled.is_set():
            raise SandmillError("the build was cancelled", code="cancelled")

    def _begin(self, stage: Stage) -> State:
        start = Instruction(stage.line, "FROM", f"FROM {stage.image}", {}, (), False)
        with _At(self, start):
            image = self._global.expand(stage.image)
            if not image:
                raise UsageError(f"{stage.image} is empty", hint="give it a value: --build-arg, or ARG with a default")
            if stage.platform is not None:
                wanted = self._global.expand(stage.platform)
                if not is_this_platform(wanted):
                    raise UsageError(
                        f"platform {wanted}: only this machine's, {'/'.join(this_platform()[:2])}, can be built"
                    )
            base = self._file.stage(image) if not image.isdigit() else None
            if base is not None and base.index < stage.index:
                return self._stage(base).child()
            scope = Scope(self._file.escape, self._given, self._global.args | {"TARGETSTAGE": stage.label})
            if image == SCRATCH:
                return State.of(SCRATCH, ImageConfig(), scope)
            found = self._find(image)
            return State.of("host" if image == "host" else found.id, found.config, scope)

    def _apply(self, one: Instruction, stage: Stage, state: State) -> None:
        scope = state.scope
        match one.name:
            case "RUN":
                self._run(one, state)
            case "COPY" | "ADD":
                self._copy(one, stage, state)
            case "ENV":
                # All values see the variables as they were before this line.
                scope.env |= pairs(one, scope)
            case "LABEL":
                state.labels |= pairs(one, scope)
            case "ARG":
                for declaration in one.args:
                    scope.declare(declaration)
            case "WORKDIR":
                state.workdir = posixpath.normpath(posixpath.join(state.workdir, argument(one, scope)))
                if state.workdir != "/":
                    self._layer(one, state, {"mkdir": state.workdir, "owner": state.user or "root"})
            case "USER":
                state.user = argument(one, scope)
            case "SHELL":
                state.shell = one.args
            case "CMD":
                state.cmd, state.has_cmd = command(one, state), True
            case "ENTRYPOINT":
                state.entrypoint = command(one, state)
                if not state.has_cmd:
                    state.cmd = []
            case "VOLUME":
                state.volumes += [volume for arg in one.args if (volume := scope.expand(arg)) not in state.volumes]
            case _:
                pass  # EXPOSE, HEALTHCHECK, STOPSIGNAL, MAINTAINER: a sandbox has no use for them

    def _run(self, one: Instruction, state: State) -> None:
        step: dict[str, Any] = {"cwd": state.workdir, "user": state.user or "root", "env": state.scope.of_commands()}
        if one.json:
            step["argv"] = list(one.args)
        elif one.heredocs and HEREDOC.fullmatch(one.args[0]):
            text = one.heredocs[0].content
            if text.startswith("#!"):
                program, _, argument = text.partition("\n")[0].removeprefix("#!").strip().partition(" ")
                step |= {"argv": [program, *([argument.strip()] if argument else []), SCRIPT], "script": text}
            else:
                step["argv"] = [*state.shell, text]
        else:
            documents = "".join(f"\n{doc.content}{doc.name}" for doc in one.heredocs)
            step["argv"] = [*state.shell, one.args[0] + documents]
        network = "none" if one.flags.get("network") == "none" else self._network
        self._layer(one, state, step, network)

    def _copy(self, one: Instruction, stage: Stage, state: State) -> None:
        scope = state.scope
        *sources, to = [scope.expand(arg) for arg in one.args]
        target = posixpath.normpath(posixpath.join(state.workdir, to))
        if (to.endswith(("/", "/.")) or to in (".", "")) and target != "/":
            target += "/"
        step: dict[str, Any] = {}
        if chown := scope.expand(one.flags.get("chown", "")):
            step["owner"] = chown
        if mode := scope.expand(one.flags.get("chmod", "")):
            if not re.fullmatch(r"[0-7]{1,4}", mode):
                raise UsageError(f"--chmod={mode}: only octal modes such as 755 are supported")
            step["mode"] = mode
        if (source := one.flags.get("from")) is not None:
            step["take"] = {
                "image": self._source(source, stage),
                "paths": [posixpath.join("/", one) for one in sources],
            }
            step["to"] = target
            step["keep_owners"] = "owner" not in step
            self._layer(one, state, step)
            return
        parcel, single = self._parcel(one, sources, target, scope)
        if step.pop("mode", ""):
            for item in parcel.items:
                if not item.info.issym():
                    item.info.mode = int(mode, 8)
        step |= {"to": "/", "digest": parcel.digest(), "keep_owners": "owner" not in step}
        if single is not None:
            step["single"] = single
        self._layer(one, state, step, content=parcel)

    def _source(self, name: str, stage: Stage) -> str:
        """The image that COPY --from means: an earlier stage, else one of the store."""
        earlier = self._file.stage(name)
        if earlier is not None and earlier.index < stage.index:
            return self._stage(earlier).image
        if name == SCRATCH:
            raise UsageError("there is nothing in scratch to copy")
        return "host" if name == "host" else self._find(name).id

    def _find(self, name: str) -> ImageInfo:
        """An image of the store, else of its registry. A missing one is a failure of the build, which may succeed later."""
        try:
            return self._control.image(name)
        except NotFoundError:
            pass
        try:
            return self._control.pull_image(name)
        except (NotFoundError, ImageError) as error:
            message = f"there is no image {name!r} here, and it can't be pulled: {error.message}"
            raise BuildError(message, hint=error.hint, retryable=error.retryable) from error

    def _parcel(self, one: Instruction, sources: list[str], target: str, scope: Scope) -> tuple[Parcel, str | None]:
        """What is copied, and, where it is one file to a name without a slash, that file's own name."""
        documents = {doc.name: doc for doc in one.heredocs}
        parcel = Parcel()
        base = target.strip("/")
        files: list[tuple[str, Any]] = []
        for word, source in zip(one.args, sources, strict=False):
            if (
                documents
                and (doc := documents.get(word.lstrip("<-").strip("\"'"))) is not None
                and word.startswith("<<")
            ):
                text = scope.document(doc.content) if doc.expand else doc.content
                files.append((doc.name, text.encode()))
                continue
            for path in self._context.find(source):
                real = self._context.place(path)
                if real.is_dir():
                    parcel.items += self._context.tree(path, base)
                elif one.name == "ADD" and (held := archive_items(real, base)) is not None:
                    parcel.items += held
                else:
                    files.append((posixpath.basename(path), path))
        into = target.endswith("/") or len(files) + len(parcel.items) > 1
        for name, source in files:
            at = posixpath.join(base, name) if into else base
            parcel.items.append(text_item(at, source) if isinstance(source, bytes) else self._context.file(source, at))
        return parcel, files[0][0] if len(files) == 1 and not into else None

    def _layer(
        self,
        one: Instruction,
        state: State,
        step: dict[str, Any],
        network: str = "none",
        content: Parcel | None = None,
    ) -> None:
        self._tell(f"{self._file_name}:{one.line} {one.text[:200]}")
        body = {
            "image": state.image,
            "steps": [step | {"about": f"line {one.line}"}],
            "network": network,
            "fresh": self._no_cache,
        }
        listener = _Body(self._say, self._look)
        try:
            try:
                made = self._control.prepare_live(body, listener)
            except NotFoundError as error:
                if error.code != "content_needed" or content is None:
                    raise
                # Read once more, and named by what was read.
                body["steps"] = [
                    step
                    | {"digest": content.digest(), "tar": base64.b64encode(content.archive()).decode()}
                    | {"about": f"line {one.line}"}
                ]
                made = self._control.prepare_live(body, listener)
        except PreparationError as error:
            raise self._failed(one, step, error) from error
        finally:
            listener.end()
        self._layers += 1
        self._cached += made.cached
        self._tell("  cached" if made.cached else f"  {made.prepare_s:.1f} s")
        state.image = made.image

    def _configured(self, state: State) -> str:
        body = {
            "image": state.image,
            "env": state.scope.env,
            "workdir": state.workdir,
            "user": state.user,
            "network": "none",
            "config": {
                "entrypoint": state.entrypoint,
                "cmd": state.cmd,
                "volumes": state.volumes,
                "labels": state.labels,
            },
        }
        made: Prepared = self._control.prepare_live(body, _nobody)
        return made.image

    def _failed(self, one: Instruction, step: dict[str, Any], error: PreparationError) -> BuildError:
        details = error.details
        log = str(details.get("log", ""))
        output = log.partition("\n")[2]  # its first line is ours
        lines = output.strip().splitlines()
        how = str(details.get("how") or error.message)
        text = f"{self._file_name}:{one.line}: {one.text[:500]}: {how}"
        if lines:
            text = "\n  ".join([text, *lines[-TAIL_LINES:]])
        return BuildError(
            text,
            hint=error.hint if "exit_code" not in details else None,
            details={
                "line": one.line,
                "command": step.get("argv", one.text),
                "exit_code": details.get("exit_code"),
                "reason": details.get("reason"),
                "log": output,
            },
            retryable=error.retryable,
        )

    def _tell(self, line: str) -> None:
        self._say(f"{line}\n".encode())

    def at(self, one: Instruction, error: SandmillError | ValueError) -> SandmillError:
        """An error of an instruction, with its line."""
        where = f"{self._file_name}:{one.line}: "
        if isinstance(error, ValueError):
            return DockerfileError(f"{where}{error}", details={"problems": [[one.line, str(error)]]})
        if isinstance(error, DockerfileError) or error.message.startswith(f"{self._file_name}:"):
            return error
        if type(error) is UsageError:
            return DockerfileError(
                f"{where}{error.message}", hint=error.hint, details={"problems": [[one.line, error.message]]}
            )
        return type(error)(
            f"{where}{error.message}",
            code=error.code,
            hint=error.hint,
            retryable=error.retryable,
            details=error.details,
            status=error.status,
        )


class _At:
    """Gives what goes wrong in its block the line of the instruction."""

    def __init__(self, build: _Build, one: Instruction) -> None:
        self._build = build
        self._one = one

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (SandmillError, ValueError)):
            told = self._build.at(self._one, error)
            if told is not error:
                raise told from error


class _Body:
    """What a step says without its first line, which is the server's heading; ends with a whole line."""

    def __init__(self, say: Listener, look: Callable[[], None]) -> None:
        self._say = say
        self._look = look
        self._headed = False
        self._last = b"\n"

    def __call__(self, data: bytes) -> None:
        self._look()
        if not self._headed:
            _, line, data = data.partition(b"\n")
            self._headed = bool(line)
        if data:
            self._say(data)
            self._last = data[-1:]

    def end(self) -> None:
        if self._last != b"\n":
            self._say(b"\n")
