//! Kill groups without a cgroup: a marker in the environment, and descent.
//!
//! A process belongs to a call when its environment holds the call's marker (which children inherit, whoever they are
//! re-parented to), or when it descends from a process that belongs. Only a process that clears its environment *and* loses
//! its parent escapes; where that must not happen, give the sandbox a cgroup.

use std::{
    collections::{HashMap, HashSet},
    fs,
};

use crate::sys;

/// The environment variable that marks a call's processes.
pub const MARKER: &str = "SANDMILL_CALL";
/// Most bytes of an environment that are looked at.
const ENVIRON_LIMIT_BYTES: u64 = 4 << 20;
/// Sweeps that stop a group before it is killed, at most: each finds what was forked before the last one's stop.
const SWEEPS: usize = 20;

struct Entry {
    parent: u32,
    zombie: bool,
}

/// The living processes of the call with this marker; `leader` while it isn't reaped.
pub fn members(nonce: &str, leader: Option<u32>) -> Vec<u32> {
    let own = std::process::id();
    let table = scan();
    let marker = format!("{MARKER}={nonce}");
    let mut belongs: HashSet<u32> = leader.into_iter().collect();
    belongs.extend(table.keys().copied().filter(|pid| *pid != own && *pid != 1 && is_marked(*pid, &marker)));
    // Descent: until a round adds nobody.
    loop {
        let before = belongs.len();
        for (pid, entry) in &table {
            if belongs.contains(&entry.parent) {
                belongs.insert(*pid);
            }
        }
        if belongs.len() == before {
            break;
        }
    }
    belongs.into_iter().filter(|pid| table.get(pid).is_some_and(|entry| !entry.zombie)).collect()
}

/// Kills the call's processes: first all are stopped, so that none forks while the others are looked for.
pub fn kill(nonce: &str, leader: Option<u32>) {
    let mut stopped = HashSet::new();
    for _ in 0..SWEEPS {
        let new: Vec<u32> = members(nonce, leader).into_iter().filter(|pid| stopped.insert(*pid)).collect();
        if new.is_empty() {
            break;
        }
        for pid in new {
            let _ = sys::send(pid, libc::SIGSTOP);
        }
    }
    for pid in stopped {
        let _ = sys::send(pid, libc::SIGKILL);
    }
}

fn scan() -> HashMap<u32, Entry> {
    let Ok(directory) = fs::read_dir("/proc") else { return HashMap::new() };
    let pids = directory.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok());
    pids.filter_map(|pid| Some((pid, parse_stat(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)?))).collect()
}

/// `pid (name) state ppid …`; the name may hold anything, so what follows its last parenthesis counts.
fn parse_stat(text: &str) -> Option<Entry> {
    let mut fields = text.rsplit_once(')')?.1.split_ascii_whitespace();
    let state = fields.next()?;
    Some(Entry { parent: fields.next()?.parse().ok()?, zombie: matches!(state, "Z" | "X") })
}

fn is_marked(pid: u32, marker: &str) -> bool {
    let path = format!("/proc/{pid}/environ");
    let read = || read_limited(&path);
    let environ = read().or_else(|| {
        use std::os::unix::fs::MetadataExt as _;
        let owner = fs::metadata(format!("/proc/{pid}")).ok()?;
        sys::as_user(owner.uid(), owner.gid(), read)
    });
    environ.is_some_and(|environ| environ.split(|byte| *byte == 0).any(|variable| variable == marker.as_bytes()))
}

fn read_limited(path: &str) -> Option<Vec<u8>> {
    use std::io::Read as _;
    let mut environ = Vec::new();
    fs::File::open(path).ok()?.take(ENVIRON_LIMIT_BYTES).read_to_end(&mut environ).ok()?;
    Some(environ)
}

#[cfg(test)]
mod tests {
    use super::parse_stat;

    #[test]
    fn a_name_may_hold_parentheses_and_blanks() {
        let entry = parse_stat("12 (a) Z (b) S 7 12 12 0 -1").unwrap();
        assert_eq!((entry.parent, entry.zombie), (7, false));
        assert!(parse_stat("12 (dead) Z 1 12").unwrap().zombie);
        assert!(parse_stat("").is_none());
    }
}
