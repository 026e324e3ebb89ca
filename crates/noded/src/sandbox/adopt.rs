//! A restarted noded finds its sandboxes again: those that live go on, half-done creates and deletes are finished.

use std::{
    collections::HashSet,
    fs, io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::Arc,
};

use super::{
    build,
    info::Cause,
    node::Inner,
    record::{Phase, Record},
    teardown::teardown,
};
use crate::{
    images::ResolvedImage,
    isolation::{process, remove},
};

/// A sandbox that lives on.
pub struct Survivor {
    pub record: Record,
    pub pidfd: OwnedFd,
    /// Absent when the store lost it, which only keeps the sandbox from being committed.
    pub image: Option<Arc<ResolvedImage>>,
}

/// Goes through `DIR/sandboxes`. Blocks for as long as it takes to finish what was half-done.
pub fn adopt(node: &Inner) -> io::Result<Vec<Survivor>> {
    let mut survivors = Vec::new();
    for entry in fs::read_dir(&node.sandboxes)? {
        let dir = entry?.path();
        match Record::load(&dir) {
            Some(record) => survivors.extend(one(node, &dir, record)),
            None => remove::tree(&dir)?,
        }
    }
    sweep(node, &survivors);
    let connected = survivors.iter().filter(|survivor| survivor.record.ip.is_some());
    let connected: Vec<(String, u32)> =
        connected.map(|survivor| (survivor.record.spec.id.clone(), survivor.record.slot)).collect();
    if let Err(error) = node.network.adopt(&connected) {
        eprintln!("noded: the networks of an earlier noded could not be taken over: {error}");
    }
    Ok(survivors)
}

fn one(node: &Inner, dir: &Path, mut record: Record) -> Option<Survivor> {
    let same_boot = record.boot_id == node.boot_id;
    let alive = if same_boot { find(&record) } else { None };
    node.cgroups.claim(&record.group);
    match (record.phase, alive) {
        (Phase::Running, Some(pidfd)) => {
            let image = node.store.resolve(&record.image).ok();
            return Some(Survivor { record, pidfd, image });
        }
        (Phase::Creating, _) => {
            // Nobody was told that it exists. What runs of it is in its groups, which the sweep kills; then nothing is left.
            kill_groups(node, &record.spec.id);
            build::undo(node, dir, &record);
        }
        (_, alive) => {
            let cause = match record.cause {
                Some(cause) => cause,
                None if same_boot => Cause::Crashed,
                None => Cause::NodeRestarted,
            };
            teardown(node, &mut record, alive.as_ref(), cause, None);
        }
    }
    None
}

/// The process that the record names, if it is still the same one.
fn find(record: &Record) -> Option<OwnedFd> {
    if record.pid <= 0 {
        return None;
    }
    let pidfd = process::open(record.pid).ok()?;
    // Looked at after the descriptor was opened: now the pid cannot mean another process.
    (process::start_time(record.pid).ok()? == record.start_time && process::poll(&pidfd) == process::Ended::No)
        .then_some(pidfd)
}

/// Removes groups and disks that belong to no sandbox.
fn sweep(node: &Inner, survivors: &[Survivor]) {
    let live: HashSet<&str> = survivors.iter().map(|survivor| survivor.record.spec.id.as_str()).collect();
    let name = |path: &PathBuf| path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let orphans: HashSet<String> =
        node.cgroups.existing().iter().map(name).filter(|name| !live.contains(name.as_str())).collect();
    for id in orphans {
        kill_groups(node, &id);
    }
    for disk in node.disks.existing() {
        if !live.contains(name(&disk.root).as_str()) {
            if let Err(error) = node.disks.remove(&disk) {
                eprintln!("noded: the disk {} stays: {error}", disk.root.display());
            }
        }
    }
}

fn kill_groups(node: &Inner, id: &str) {
    for path in node.cgroups.kill_named(id) {
        eprintln!("noded: the cgroup {} stays", path.display());
    }
}
