"""Dockerfiles: what is read, and that all that is wrong is said at once, by line."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandmill.builds import Dockerfile, DockerfileError, read
from sandmill.builds.dockerfile import Problems, examine


def problems(text: str) -> list[tuple[int, str]]:
    with pytest.raises(DockerfileError) as caught:
        read(text)
    return [(line, what) for line, what in caught.value.details["problems"]]


def only(text: str) -> str:
    """The one problem of a file whose second line is wrong."""
    ((line, what),) = problems(f"FROM a\n{text}\n")
    assert line == 2
    return what


def test_stages_and_what_comes_before() -> None:
    file = read(
        "ARG V=1\nFROM a:$V AS one\nRUN x\nFROM --platform=linux/amd64 One as Two\nCOPY --from=one a b\nFROM 0\n"
    )
    assert [(stage.name, stage.image, len(stage.instructions)) for stage in file.stages] == [
        ("one", "a:$V", 1),
        ("two", "One", 1),
        (None, "0", 0),
    ]
    assert (file.args[0].args, file.stages[1].platform) == (("V=1",), "linux/amd64")
    found = [file.stage(name) for name in ("TWO", "0", "no")]
    assert [stage and stage.index for stage in found] == [1, 0, None]


def test_lines_comments_and_escapes() -> None:
    file = read("# escape=`\n\nFROM a\n# not this\nRUN one && `\n  # nor this\n\n  two\nENV P=C:\\x\n")
    run, env = file.stages[0].instructions
    assert (run.line, run.args, run.text) == (5, ("one &&   two",), "RUN one && two")
    assert (env.line, env.args) == (9, ("P", "C:\\x", "="))


def test_a_directive_after_a_comment_is_a_comment() -> None:
    assert read("# hello\n# escape=`\nFROM a\n").escape == "\\"


def test_forms_of_commands() -> None:
    shell, program, words = read('FROM a\nRUN echo "a b"\nRUN ["echo", "a b"]\nRUN [echo]\n').stages[0].instructions
    assert (shell.json, shell.args) == (False, ('echo "a b"',))
    assert (program.json, program.args) == (True, ("echo", "a b"))
    assert (words.json, words.args) == (False, ("[echo]",))


def test_heredocs() -> None:
    text = "FROM a\nRUN <<A cat - <<-'B'\none\nA\n\ttwo $x\n\tB\nUSER u\n"
    run, user = read(text).stages[0].instructions
    assert [(doc.name, doc.content, doc.expand) for doc in run.heredocs] == [
        ("A", "one\n", True),
        ("B", "two $x\n", False),
    ]
    assert user.line == 7


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("RUN --mount=type=cache,target=/x true", "--mount: mounts while building"),
        ("RUN --security=insecure true", "privileges"),
        ("RUN --network=host true", "none or default"),
        ("RUN --colour=red true", "no flag --colour"),
        ("RUN", "nothing to run"),
        ("ADD https://example.com/x /x", "nothing is fetched"),
        ("ADD git@example.com:a/b.git /x", "nothing is fetched"),
        ("COPY a", "a source and a destination"),
        ("COPY a b c", "must end with /"),
        ("COPY --chmod=u+x a b", "octal"),
        ("COPY --parents a b", "name the directories"),
        ("COPY --from=0 a b", "no earlier stage"),
        ("ONBUILD RUN x", "ONBUILD is not supported"),
        ("SHELL /bin/sh", "JSON array"),
        ("WORKDIR", "takes one argument"),
        ("ENV a", "must have two arguments"),
        ("ENV a=b c", "can't find = in"),
        ("ENV a=${b", "missing '}'"),
        ("ENV a=${b!c}", "unsupported modifier"),
        ("LABEL a='b", "single-quote"),
        ("ARG 1=2", "no name of a variable"),
        ("HEALTHCHECK true", "CMD or NONE"),
        ("FRMO b", "unknown instruction"),
        ("RUN <<E", "unterminated heredoc"),
    ],
)
def test_what_can_not_be(line: str, said: str) -> None:
    assert said in only(line)


def test_every_problem_at_once() -> None:
    text = "RUN early\nFROM a b\nBAD one \\\n  two\nRUN --mount=type=bind true\nENV x\nRUN fine\nONBUILD RUN y\n"
    assert [line for line, _ in problems(text)] == [1, 2, 3, 5, 6, 8]


@pytest.mark.parametrize("text", ["", "# nothing\n", "ARG a\n"])
def test_no_stage(text: str) -> None:
    assert problems(text) == [(1, "there is no FROM")]


def test_what_means_nothing_here_is_accepted() -> None:
    lines = "EXPOSE 80/tcp\nSTOPSIGNAL 9\nHEALTHCHECK --interval=5s CMD true\nHEALTHCHECK NONE\nMAINTAINER me\nVOLUME /a /b\n"
    assert len(read(f"FROM a\n{lines}").stages[0].instructions) == 6


LINES = st.lists(
    st.one_of(
        st.sampled_from(
            [
                "FROM a",
                "FROM a AS b",
                "RUN x \\",
                "RUN <<E",
                "E",
                "# c",
                "",
                "ENV a=b",
                'COPY ["a", "b"]',
                "COPY a b",
                "ARG x=${y}",
            ]
        ),
        st.text(alphabet="RUNENVCOPY abc=$\"'\\{}<-:`#[]", max_size=30),
    ),
    max_size=12,
)


@given(LINES)
def test_any_text_is_read_or_said_to_be_wrong(lines: list[str]) -> None:
    found = Problems()
    made = examine("\n".join(lines), found)
    assert isinstance(made, Dockerfile)
    assert made.stages or found.found
    for line, what in found.found:
        assert 1 <= line <= len(lines) + 1
        assert what


@given(LINES)
def test_instructions_stand_in_the_order_of_their_lines(lines: list[str]) -> None:
    made = examine("\n".join(["FROM a", *lines]), Problems())
    at = [one.line for stage in made.stages for one in stage.instructions]
    assert at == sorted(set(at))
    assert all(2 <= line <= len(lines) + 1 for line in at)
