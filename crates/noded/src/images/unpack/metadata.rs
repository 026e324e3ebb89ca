//! Owner, mode, extended attributes and time of an unpacked entry, in the only order that works: a change of owner
//! clears set-uid bits and capabilities, so it comes first.

use rustix::{
    fs::{AtFlags, Gid, Mode, Timespec, Timestamps, Uid, XattrFlags},
    io::{Errno, Result},
};

use super::confined::Dir;
use crate::images::tar::{Entry, Kind};

/// Whether an archive may set this attribute. `trusted.*` may not: it is how overlayfs marks its layers, and a layer that
/// speaks to overlayfs itself could redirect it.
pub fn is_allowed(name: &[u8]) -> bool {
    let in_user = name.starts_with(b"user.") && !name.starts_with(b"user.overlay.");
    in_user || matches!(name, b"security.capability" | b"system.posix_acl_access" | b"system.posix_acl_default")
}

pub fn apply(dir: &Dir, name: &[u8], entry: &Entry, warnings: &mut Vec<String>) -> Result<()> {
    // Checked to be at most 65535 by the caller.
    let id = |id: u64| u32::try_from(id).unwrap_or(u32::MAX - 1);
    let (uid, gid) = (Uid::from_raw(id(entry.uid)), Gid::from_raw(id(entry.gid)));
    rustix::fs::chownat(dir.fd(), name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)?;
    let is_link = entry.kind == Kind::Symlink;
    if !is_link {
        // Not a link: the caller has just made it, or seen that it is a directory.
        rustix::fs::chmodat(dir.fd(), name, Mode::from_raw_mode(entry.mode & 0o7777), AtFlags::empty())?;
    }
    for (attribute, value) in entry.xattrs.iter().filter(|(attribute, _)| is_allowed(attribute)) {
        if is_link && attribute.starts_with(b"user.") {
            continue; // the kernel has none on links
        }
        match rustix::fs::lsetxattr(dir.system_path(name), &attribute[..], value, XattrFlags::empty()) {
            Ok(()) => {}
            Err(errno @ (Errno::NOTSUP | Errno::INVAL | Errno::NOSPC | Errno::RANGE)) => {
                let (attribute, path) = (attribute.escape_ascii(), entry.path.escape_ascii());
                warnings.push(format!("lost the attribute {attribute} of {path}: {errno}"));
            }
            Err(errno) => return Err(errno),
        }
    }
    rustix::fs::utimensat(dir.fd(), name, &timestamps(entry.mtime), AtFlags::SYMLINK_NOFOLLOW)
}

pub fn timestamps((seconds, nanos): (i64, u32)) -> Timestamps {
    let time = Timespec { tv_sec: seconds, tv_nsec: i64::from(nanos) };
    Timestamps { last_access: time, last_modification: time }
}
