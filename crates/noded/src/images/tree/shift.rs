//! From a sandbox's ids on disk to an image's: everything moves down by the base of the sandbox's range.

use std::{collections::HashSet, os::fd::OwnedFd, path::Path};

use rustix::fs::{AtFlags, FileType, Gid, Mode, Uid};

use super::{
    walk::{walk, Flow, Item},
    xattrs::{self, Overlay},
};
use crate::images::{Error, Result};

const RANGE: u32 = 65536;

/// Shifts owners, and the ids within capabilities and access lists, of the whole tree; drops what overlayfs noted about
/// the mount that the tree came from. An id below 65536 stays (whiteouts belong to the real root).
pub fn shift_owners(root: &OwnedFd, label: &Path, base: u32) -> Result<()> {
    let mut done = HashSet::new();
    walk(root, label, &mut |item: &Item| {
        let stat = &item.stat;
        // A second name of the same file: its owner has been moved, and must not be moved again.
        if item.kind() != FileType::Directory && stat.st_nlink > 1 && !done.insert((stat.st_dev, stat.st_ino)) {
            return Ok(Flow::Descend);
        }
        shift(item, base)?;
        Ok(Flow::Descend)
    })
}

fn shift(item: &Item, base: u32) -> Result<()> {
    let uid = shifted(item, item.stat.st_uid, base)?;
    let gid = shifted(item, item.stat.st_gid, base)?;
    // Read before the change of owner, which clears a capability.
    let attributes = xattrs::read(item).map_err(|errno| item.failed("read the attributes of", errno))?;
    let moves = (uid, gid) != (item.stat.st_uid, item.stat.st_gid);
    if moves {
        let (uid, gid) = (Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)));
        rustix::fs::chownat(item.dir, item.name, uid, gid, AtFlags::SYMLINK_NOFOLLOW)
            .map_err(|errno| item.failed("change the owner of", errno))?;
        if item.kind() != FileType::Symlink && item.stat.st_mode & 0o6000 != 0 {
            let mode = Mode::from_raw_mode(item.stat.st_mode & 0o7777);
            rustix::fs::chmodat(item.dir, item.name, mode, AtFlags::empty())
                .map_err(|errno| item.failed("restore the mode of", errno))?;
        }
    }
    for (name, value) in &attributes {
        let changed = match xattrs::overlay(name) {
            Overlay::Keep => continue,
            Overlay::Drop => {
                xattrs::remove(item, name).map_err(|errno| item.failed("clean the attributes of", errno))?;
                continue;
            }
            Overlay::Metacopy => {
                return Err(Error::Uncommittable {
                    path: item.full_path(),
                    reason: "its content is not in this layer (overlayfs was mounted with metacopy)".to_owned(),
                })
            }
            Overlay::NotOurs => xattrs::shifted(name, value, base),
        };
        let cleared = moves && name == xattrs::CAPABILITY;
        if let Some(value) = changed.as_ref().or(cleared.then_some(value)) {
            xattrs::write(item, name, value).map_err(|errno| item.failed("restore the attributes of", errno))?;
        }
    }
    Ok(())
}

fn shifted(item: &Item, id: u32, base: u32) -> Result<u32> {
    match id.checked_sub(base) {
        Some(inside) if inside < RANGE => Ok(inside),
        _ if id < RANGE => Ok(id),
        _ => Err(Error::Uncommittable {
            path: item.full_path(),
            reason: format!("it is owned by id {id}, which is none of the sandbox's"),
        }),
    }
}
