//! Out-of-memory kills that the kernel has counted for this sandbox.

use std::{io::Read as _, os::fd::BorrowedFd};

use rustix::fs::{Mode, OFlags};

/// Where the count stands when the delegated cgroup has no memory controller, the most exact first. The last one counts the
/// whole machine's: good enough to tell an OOM kill from others, as it is asked only about a process that got SIGKILL from
/// nobody here.
const COUNTERS: [&str; 3] =
    ["/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control", "/proc/vmstat"];

/// The count of OOM kills; 0 where none can be read.
pub fn kills(tree: Option<BorrowedFd<'_>>) -> u64 {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let own = tree.and_then(|tree| rustix::fs::openat(tree, "memory.events", flags, Mode::empty()).ok());
    let own = own.and_then(|file| count(std::fs::File::from(file)));
    let known = own.or_else(|| COUNTERS.iter().find_map(|path| count(std::fs::File::open(path).ok()?)));
    known.unwrap_or(0)
}

fn count(mut file: std::fs::File) -> Option<u64> {
    let mut text = String::new();
    file.read_to_string(&mut text).ok()?;
    parse(&text)
}

fn parse(text: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::parse;

    #[test]
    fn all_three_forms() {
        assert_eq!(parse("low 0\nhigh 0\nmax 3\noom 1\noom_kill 2\noom_group_kill 0\n"), Some(2));
        assert_eq!(parse("oom_kill_disable 0\nunder_oom 0\noom_kill 4\n"), Some(4));
        assert_eq!(parse("nr_free 1\n"), None);
    }
}
