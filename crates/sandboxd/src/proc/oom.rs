//! Out-of-memory kills that the kernel has counted for this sandbox.

use std::{io::Read as _, os::fd::BorrowedFd};

use rustix::fs::{Mode, OFlags};

/// Where the count stands when the delegated cgroup has no memory controller. Only this sandbox's own counters: another's
/// kill must never be taken for ours.
const COUNTERS: [&str; 2] = ["/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"];

/// The count of OOM kills; None where none can be read.
pub fn kills(tree: Option<BorrowedFd<'_>>) -> Option<u64> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let own = tree.and_then(|tree| rustix::fs::openat(tree, "memory.events", flags, Mode::empty()).ok());
    let own = own.and_then(|file| count(std::fs::File::from(file)));
    own.or_else(|| COUNTERS.iter().find_map(|path| count(std::fs::File::open(path).ok()?)))
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
