//! The blocking path of an end: everything that ran is killed, everything that was made is removed.

use std::{fs, io, os::fd::OwnedFd, path::Path};

use sandmill_wire::ApiError;

use super::{
    build,
    info::{Cause, SandboxEnd},
    node::Inner,
    record::Record,
    slots,
};
use crate::{
    images::{CommitOptions, ImageInfo, ResolvedImage},
    isolation::{process, remove},
};

/// How long sandboxd may take to be gone after SIGKILL: the kernel first ends everything in its pid namespace.
const DYING_MS: i32 = 30_000;

/// Changes that become an image once nothing runs any more.
pub struct Commit<'a> {
    pub base: &'a ResolvedImage,
    pub options: CommitOptions,
}

/// Ends a sandbox and removes all of it. `pidfd` is absent when its sandboxd is known to be gone.
pub fn teardown(
    node: &Inner,
    record: &mut Record,
    pidfd: Option<&OwnedFd>,
    cause: Cause,
    commit: Option<Commit<'_>>,
) -> (SandboxEnd, Option<Result<ImageInfo, ApiError>>) {
    let dir = node.sandbox_dir(&record.spec.id);
    report("note the end in", &dir, record.end(&dir, cause));
    let status = pidfd.and_then(kill);
    let account = record.group.account();
    if let Err(error) = node.network.detach(&record.spec.id) {
        eprintln!("noded: {}: its network stays: {error}", record.spec.id);
    }
    let oom = cause == Cause::Crashed && account.oom_kills > 0 && status.is_none_or(|status| status == 137);
    let cause = if oom { Cause::Oom } else { cause };
    for path in node.cgroups.remove(&record.group) {
        eprintln!("noded: {}: the cgroup {} stays", record.spec.id, path.display());
    }
    let committed = commit.map(|commit| {
        if let Some((_, root)) = record.uppers.first() {
            build::strip(root, record);
        }
        node.store.commit(commit.base, &record.uppers, slots::uid_base(record.slot), commit.options)
    });
    if let Some(disk) = &record.disk {
        report("remove the disk", &disk.root, node.disks.remove(disk));
    }
    let end = SandboxEnd {
        id: record.spec.id.clone(),
        cause,
        message: message(cause, status),
        ended_at: super::unix_now(),
        exit_status: status,
        memory_peak_bytes: (account.memory_peak_bytes > 0).then_some(account.memory_peak_bytes),
    };
    // Remembered before the record goes: a SIGKILL in between leads to the same end, not to a forgotten sandbox.
    report("remember the end of", &dir, node.ended.add(end.clone()));
    report("remove", &dir, clear(&dir));
    (end, committed)
}

/// Kills PID 1 of the sandbox, and with it its whole pid namespace; the exit status, if it was our child.
fn kill(pidfd: &OwnedFd) -> Option<i32> {
    if let Err(error) = process::signal(pidfd, libc::SIGKILL) {
        eprintln!("noded: kill: {error}");
    }
    if !process::wait(pidfd, DYING_MS) {
        eprintln!("noded: a sandbox's processes are still not gone {} s after SIGKILL", DYING_MS / 1000);
    }
    match process::poll(pidfd) {
        process::Ended::Status(status) => Some(status),
        process::Ended::No | process::Ended::Unknown => None,
    }
}

/// Removes a sandbox's directory, the record last: until then a restarted noded knows what to finish.
fn clear(dir: &Path) -> io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        if !Record::is_file(&entry.file_name()) {
            remove::tree(&entry.path())?;
        }
    }
    remove::tree(dir)
}

fn message(cause: Cause, status: Option<i32>) -> String {
    match (cause, status) {
        (Cause::Crashed, Some(status)) => format!("{}, with status {status}", cause.message()),
        _ => cause.message().to_owned(),
    }
}

fn report(step: &str, path: &Path, result: io::Result<()>) {
    if let Err(error) = result {
        eprintln!("noded: cannot {step} {}: {error}", path.display());
    }
}
