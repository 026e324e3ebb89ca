//! Work on whole trees on disk, whoever made them: hostile depth, names and links included.
//!
//! Everything goes through directory descriptors and never follows a link, so a tree cannot lead out of itself.

mod copy;
mod digest;
mod remove;
mod shift;
mod walk;
mod xattrs;

pub use copy::{copy, Origin};
pub use digest::digest;
pub use remove::{remove, remove_at};
pub use shift::shift_owners;
pub use walk::{open_root, MAX_DEPTH};

use std::{
    ffi::OsStr,
    os::{fd::AsFd, unix::ffi::OsStrExt},
    path::{Path, PathBuf},
};

use rustix::fs::{AtFlags, FileType, Stat};

#[cfg(test)]
use super::Error;
use super::Result;
use walk::{walk, Flow, Item};

/// How overlayfs says that a name of the layers below is gone.
pub fn is_whiteout(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice && stat.st_rdev == 0
}

/// Paths of all whiteouts below `root`.
pub fn whiteouts(root: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    walk(open_root(root)?, root, &mut |item: &Item| {
        if is_whiteout(&item.stat) {
            found.push(PathBuf::from(OsStr::from_bytes(item.path)));
        }
        Ok(Flow::Descend)
    })?;
    Ok(found)
}

/// Removes all whiteouts below `dir`.
pub fn remove_whiteouts(dir: impl AsFd, label: &Path) -> Result<()> {
    walk(dir, label, &mut |item: &Item| {
        if is_whiteout(&item.stat) {
            rustix::fs::unlinkat(item.dir, item.name, AtFlags::empty())
                .map_err(|errno| item.failed("remove", errno))?;
        }
        Ok(Flow::Descend)
    })
}

#[cfg(test)]
mod tests;
