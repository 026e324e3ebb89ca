"""The command line. `main` is the entry point; every command's module is loaded only when that command runs."""

import sys


def main() -> None:
    """Runs the command line of this process and ends it with the command's exit code."""
    words = sys.argv[1:]
    if words == ["--version"]:
        from sandmill.control.version import version

        print(f"sandmill {version()}")
        return
    if words[:2] == ["serve", "--embedded"]:
        # Started by the SDK while somebody waits for their first sandbox: no option parser on this path.
        from sandmill.cli.embedded import serve_embedded

        sys.exit(serve_embedded(words[2:]))
    from sandmill.cli.root import run

    sys.exit(run(words))
