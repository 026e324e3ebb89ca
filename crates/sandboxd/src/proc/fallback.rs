//! Kill groups without a cgroup: a marker in the environment, and descent.
//!
//! A process belongs to a call when its environment holds the call's marker (which children inherit, whoever they are
//! re-parented to), or when it descends from a process that belongs. Only a process that clears its environment *and* loses
//! its parent escapes; where that must not happen, give the sandbox a cgroup.

use std::{
    collections::{HashMap, HashSet},
    fs,
};

use super::stat::{pids, Stat};
use crate::sys;

/// The environment variable that marks a call's processes.
pub const MARKER: &str = "SANDMILL_CALL";
/// Most bytes of an environment that are looked at.
const ENVIRON_LIMIT_BYTES: u64 = 4 << 20;
/// Sweeps that stop a group before it is killed, at most: each finds what was forked before the last one's stop.
const SWEEPS: usize = 20;

/// The living processes of the call with this marker; `leader` while it isn't reaped.
pub fn members(nonce: &str, leader: Option<u32>) -> Vec<u32> {
    let own = std::process::id();
    let table: HashMap<u32, Stat> = pids().into_iter().filter_map(|pid| Some((pid, Stat::of(pid)?))).collect();
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
