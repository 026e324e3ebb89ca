"""Folds `perf script -F comm,ip,sym` (standard input) into shares by program and, within it, by system call."""

import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

SYSTEM_CALL = re.compile(r"__(?:x64|arm64|do|se)_sys_(\w+)")
# The first that a stack holds names what was going on outside of system calls.
ELSE = [("page faults", "exc_page_fault"), ("exit", "do_exit"), ("exit", "exit_to_user_mode"), ("interrupts", "irq")]
LIBC_START = re.compile(
    r"intel_check_word|handle_intel|init_cpu_features|update_active|get_common_indices|init_cacheinfo"
)


def samples(lines: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
    """Program and stack of each sample, innermost first."""
    program, stack = "", []
    for line in lines:
        if not line.strip():
            if program:
                yield program, stack
            program, stack = "", []
        elif line[0].isspace():
            stack.append(line.split(None, 1)[-1].strip())
        else:
            program = line.strip()
    if program:
        yield program, stack


def activity(stack: list[str]) -> str:
    for symbol in reversed(stack):
        if found := SYSTEM_CALL.match(symbol):
            return found[1]
    for name, part in ELSE:
        if any(part in symbol for symbol in stack):
            return name
    if any("ret_from_fork" in symbol for symbol in stack):
        return "kernel thread"
    if any(LIBC_START.match(symbol) for symbol in stack):
        return "libc asking for the CPU's caches"
    return "its own code" if not any("entry_SYSCALL" in symbol for symbol in stack) else "entering the kernel"


def main() -> None:
    programs: Counter[str] = Counter()
    within: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for program, stack in samples(sys.stdin):
        name = re.sub(r"/.*", "", program)
        programs[name] += 1
        within[name][activity(stack)] += 1
    total = programs.total()
    for name, count in programs.most_common(9):
        parts = ", ".join(f"{what} {100 * n / total:.1f}" for what, n in within[name].most_common(8))
        print(f"{100 * count / total:5.1f} %  {name:16} {parts}")


if __name__ == "__main__":
    main()
