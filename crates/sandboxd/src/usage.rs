//! What the sandbox consumes, as far as it can be seen from inside; noded knows the rest.

use std::{fs, io::Read as _, os::fd::BorrowedFd};

use rustix::fs::{Mode, OFlags};
use serde::Serialize;

use crate::{
    app::App,
    proc::{self, Stat},
    sys,
};

#[derive(Debug, Clone, Default, Serialize)]
pub struct Usage {
    /// CPU time of all processes of the sandbox since its start, those that ended too.
    pub cpu_s: f64,
    /// Processes now, zombies and this daemon included.
    pub pids: u64,
    /// Bytes that processes which ended have moved to and from disks; those that run are not in it yet.
    pub io_read_bytes: u64,
    pub io_write_bytes: u64,
    /// Used and whole size of the root's file system: the sandbox's own where it has a disk limit, else the machine's.
    pub disk_bytes: u64,
    pub disk_limit_bytes: Option<u64>,
}

/// Looks now. It costs a scan of /proc.
pub fn snapshot(app: &App) -> Usage {
    let consumed = sys::consumed();
    let pids = proc::pids();
    let group_cpu = app.procs.groups().tree().and_then(cpu_of_group);
    let running_cpu = || {
        // This daemon's own is in `consumed`.
        let others = pids.iter().filter(|pid| **pid != std::process::id());
        let ticks: u64 = others.filter_map(|pid| Stat::of(*pid)).map(|stat| stat.cpu_ticks).sum();
        ticks as f64 / proc::ticks_per_second() as f64
    };
    let (disk_bytes, disk_limit_bytes) = disk();
    Usage {
        cpu_s: group_cpu.unwrap_or_else(|| consumed.cpu_s + running_cpu()),
        pids: pids.len() as u64,
        io_read_bytes: consumed.io_read_bytes,
        io_write_bytes: consumed.io_write_bytes,
        disk_bytes,
        disk_limit_bytes,
    }
}

/// The kernel counts CPU time for every group of the v2 tree, with or without the cpu controller.
fn cpu_of_group(tree: BorrowedFd<'_>) -> Option<f64> {
    let file = rustix::fs::openat(tree, "cpu.stat", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok()?;
    let mut text = String::new();
    fs::File::from(file).read_to_string(&mut text).ok()?;
    let usec: u64 = text.lines().find_map(|line| line.strip_prefix("usage_usec ")?.parse().ok())?;
    Some(usec as f64 / 1e6)
}

fn disk() -> (u64, Option<u64>) {
    let Ok(stat) = rustix::fs::statvfs("/") else { return (0, None) };
    let used = stat.f_blocks.saturating_sub(stat.f_bfree) * stat.f_frsize;
    (used, Some(stat.f_blocks * stat.f_frsize))
}
