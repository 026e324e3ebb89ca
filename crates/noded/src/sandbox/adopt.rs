//! A restarted noded finds its sandboxes again: those that live go on, half-done creates and deletes are finished.

use std::{collections::HashSet, fs, io, os::fd::OwnedFd, path::PathBuf, sync::Arc};

use super::{
    info::Cause,
    lease::{self, Kept},
    node::Inner,
    record::Record,
    teardown::teardown,
};
use crate::{
    images::ResolvedImage,
    isolation::{process, remove},
};

/// A sandbox that lives on.
pub struct Survivor {
    pub record: Record,
    /// As the earlier noded kept it; None: the record's, from now on.
    pub lease: Option<Kept>,
    pub pidfd: OwnedFd,
    /// Absent when the store lost it, which only keeps the sandbox from being committed.
    pub image: Option<Arc<ResolvedImage>>,
}

/// Goes through `DIR/sandboxes`. Blocks for as long as it takes to finish what was half-done.
pub fn adopt(node: &Inner) -> io::Result<Vec<Survivor>> {
    let mut survivors = Vec::new();
    let leases = lease::load(&node.dir);
    for entry in fs::read_dir(&node.sandboxes)? {
        let dir = entry?.path();
        match Record::load(&dir) {
            Some(record) => {
                let lease = leases.get(&record.spec.id).copied();
                survivors.extend(one(node, record, lease));
            }
            // Nobody was told that it exists. What runs of it is in its groups, which the sweep kills.
            None => remove::tree(&dir)?,
        }
    }
    sweep(node, &survivors);
    node.cgroups.find_spares();
    let connected = survivors.iter().filter(|survivor| survivor.record.ip.is_some());
    let connected: Vec<(String, u32)> =
        connected.map(|survivor| (survivor.record.spec.id.clone(), survivor.record.slot)).collect();
    if let Err(error) = node.network.adopt(&connected) {
        eprintln!("noded: the networks of an earlier noded could not be taken over: {error}");
    }
    Ok(survivors)
}

fn one(node: &Inner, mut record: Record, lease: Option<Kept>) -> Option<Survivor> {
    let same_boot = record.boot_id == node.boot_id;
    let alive = if same_boot { find(&record) } else { None };
    match (record.cause, alive) {
        (None, Some(pidfd)) => {
            let image = node.store.resolve(&record.image).ok();
            return Some(Survivor { record, lease, pidfd, image });
        }
        (cause, alive) => {
            let cause = match cause {
                Some(cause) => cause,
                None if same_boot && lease.is_some_and(|lease| lease.has_ended()) => Cause::LeaseExpired, // it has ended itself
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
    let name = |path: &PathBuf| path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let records = survivors.iter().map(|survivor| &survivor.record);
    let groups: HashSet<String> = records.clone().flat_map(|record| record.group.named()).map(name).collect();
    let orphans: HashSet<String> =
        node.cgroups.existing().iter().map(name).filter(|name| !groups.contains(name)).collect();
    for orphan in orphans {
        for path in node.cgroups.kill_named(&orphan) {
            eprintln!("noded: the cgroup {} stays", path.display());
        }
    }
    let disks: HashSet<&PathBuf> = records.filter_map(|record| Some(&record.disk.as_ref()?.root)).collect();
    for disk in node.disks.existing() {
        if !disks.contains(&disk.root) {
            if let Err(error) = node.disks.remove(&disk) {
                eprintln!("noded: the disk {} stays: {error}", disk.root.display());
            }
        }
    }
}
