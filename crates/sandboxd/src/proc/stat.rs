//! /proc/PID/stat.

use std::fs;

/// What of it is used here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stat {
    pub parent: u32,
    pub zombie: bool,
    /// User and system time of the process itself, in clock ticks.
    pub cpu_ticks: u64,
    /// The same with the children that it waited for.
    pub tree_cpu_ticks: u64,
    /// Clock ticks between the machine's start and the process's.
    pub started_ticks: u64,
}

impl Stat {
    pub fn of(pid: u32) -> Option<Self> {
        Self::parse(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
    }

    /// Reads an open /proc/PID/stat again.
    pub fn read(file: &fs::File) -> Option<Self> {
        use std::os::unix::fs::FileExt as _;
        let mut text = [0; 1024];
        let count = file.read_at(&mut text, 0).ok()?;
        Self::parse(std::str::from_utf8(&text[..count]).ok()?)
    }

    /// `pid (name) state ppid …`; the name may hold anything, so what follows its last parenthesis counts.
    fn parse(text: &str) -> Option<Self> {
        let fields: Vec<&str> = text.rsplit_once(')')?.1.split_ascii_whitespace().collect();
        let number = |index: usize| fields.get(index)?.parse::<u64>().ok();
        let cpu_ticks = number(11)? + number(12)?;
        Some(Self {
            parent: number(1)? as u32,
            zombie: matches!(fields[0], "Z" | "X"),
            cpu_ticks,
            tree_cpu_ticks: cpu_ticks + number(13)? + number(14)?,
            started_ticks: number(19)?,
        })
    }
}

/// All processes that can be seen.
pub fn pids() -> Vec<u32> {
    let Ok(directory) = fs::read_dir("/proc") else { return Vec::new() };
    directory.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect()
}

/// Clock ticks in a second.
pub fn ticks_per_second() -> u64 {
    rustix::param::clock_ticks_per_second()
}

/// Clock ticks since the machine's start.
pub fn now_ticks() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    now.tv_sec as u64 * ticks_per_second() + now.tv_nsec as u64 * ticks_per_second() / 1_000_000_000
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_may_hold_parentheses_and_blanks() {
        let stat = Stat::parse("7 (a) Z (b c) S 3 7 7 0 -1 4194304 100 0 0 0 30 12 5 1 20 0 1 0 77 0 0").unwrap();
        let expected = Stat { parent: 3, zombie: false, cpu_ticks: 42, tree_cpu_ticks: 48, started_ticks: 77 };
        assert_eq!(stat, expected);
        assert!(Stat::parse("7 (dead) Z 1").is_none());
        assert!(Stat::parse("").is_none());
    }

    #[test]
    fn this_process_started_before_now() {
        let own = Stat::of(std::process::id()).unwrap();
        assert!(own.started_ticks <= now_ticks());
        assert!(pids().contains(&std::process::id()));
    }
}
