//! Walks of whole trees that change them: remove, and chmod and chown of all that is below.
//!
//! Nothing here follows a link or goes by a path: every step is relative to an open directory, so that a tree that changes
//! under the walk can't lead it elsewhere. Deep trees don't need as many descriptors as they have levels: beyond
//! [`OPEN_LIMIT`] the upper ones are closed, and found again by `..`, if it is still the same directory.

use std::{
    ffi::{OsStr, OsString},
    os::fd::{AsFd as _, OwnedFd},
    path::Path,
};

use rustix::{
    fs::{AtFlags, Mode},
    io::Errno,
};
use sandmill_wire::ApiError;

use super::{
    entry::{open_directory, Kind},
    failure::failed,
    listing::sorted_names,
    place::{gid, uid, Owner},
};

const OPEN_LIMIT: usize = 64;

/// Removes `name` in `directory` and all below it; says how many entries that were.
///
/// What vanishes meanwhile counts as removed. Errors: those of [`failed`].
pub fn remove(path: &Path, directory: &OwnedFd, name: &OsStr) -> Result<u64, ApiError> {
    let refused = |errno| failed("remove", path, errno);
    let mut removed = 0;
    // New entries may appear in a directory while it is emptied: a few more rounds, then it is said.
    for _ in 0..8 {
        match remove_leaf(directory, name) {
            Ok(gone) => return Ok(removed + u64::from(gone)),
            Err(Errno::ISDIR) => {}
            Err(errno) => return Err(refused(errno)),
        }
        removed += match open_directory(directory, name, false) {
            Ok(top) => empty(top).map_err(refused)?,
            Err(Errno::NOENT) => return Ok(removed),
            Err(errno) => return Err(refused(errno)),
        };
        match rustix::fs::unlinkat(directory, name, AtFlags::REMOVEDIR) {
            Ok(()) => return Ok(removed + 1),
            Err(Errno::NOENT) => return Ok(removed),
            Err(Errno::NOTEMPTY | Errno::NOTDIR) => {}
            Err(errno) => return Err(refused(errno)),
        }
    }
    Err(refused(Errno::NOTEMPTY))
}

/// Removes what isn't a directory; false when it was gone already.
fn remove_leaf(directory: &OwnedFd, name: &OsStr) -> Result<bool, Errno> {
    match rustix::fs::unlinkat(directory, name, AtFlags::empty()) {
        Ok(()) => Ok(true),
        Err(Errno::NOENT) => Ok(false),
        // EISDIR is Linux's answer for a directory; POSIX and some file systems say EPERM.
        Err(errno @ Errno::PERM) => match rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) if Kind::of(&stat) == Kind::Directory => Err(Errno::ISDIR),
            _ => Err(errno),
        },
        Err(errno) => Err(errno),
    }
}

fn empty(top: OwnedFd) -> Result<u64, Errno> {
    let mut removed = 0;
    walk(top, &mut |step| -> Result<Below, Errno> {
        match step {
            Step::Entry { directory, name } => match remove_leaf(directory, name) {
                Ok(gone) => {
                    removed += u64::from(gone);
                    Ok(Below::Skip)
                }
                Err(Errno::ISDIR) => Ok(Below::Enter),
                Err(errno) => Err(errno),
            },
            Step::Left { directory, name } => match rustix::fs::unlinkat(directory, name, AtFlags::REMOVEDIR) {
                Ok(()) => {
                    removed += 1;
                    Ok(Below::Skip)
                }
                // Filled again meanwhile: the caller's next round sees to it.
                Err(Errno::NOENT | Errno::NOTEMPTY | Errno::NOTDIR) => Ok(Below::Skip),
                Err(errno) => Err(errno),
            },
        }
    })?;
    Ok(removed)
}

/// What [`change`] sets.
#[derive(Debug, Clone, Copy)]
pub enum Change {
    Mode(u32),
    Owner(Owner),
}

/// Changes `name` in `directory`, and all below it if `recursive`. A link's own owner is changed, never its target's; a
/// link has no mode.
pub fn change(path: &Path, directory: &OwnedFd, name: &OsStr, change: Change, recursive: bool) -> Result<(), ApiError> {
    let refused = |errno| failed("change", path, errno);
    apply(directory, name, change).map_err(refused)?;
    if !recursive {
        return Ok(());
    }
    let top = match open_directory(directory, name, false) {
        Ok(top) => top,
        Err(Errno::NOTDIR | Errno::LOOP) => return Ok(()),
        Err(errno) => return Err(refused(errno)),
    };
    walk(top, &mut |step| match step {
        Step::Entry { directory, name } => match apply(directory, name, change) {
            Ok(Kind::Directory) => Ok(Below::Enter),
            Ok(_) | Err(Errno::NOENT) => Ok(Below::Skip),
            Err(errno) => Err(errno),
        },
        Step::Left { .. } => Ok(Below::Skip),
    })
    .map_err(refused)
}

fn apply(directory: &OwnedFd, name: &OsStr, change: Change) -> Result<Kind, Errno> {
    let kind = Kind::of(&rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW)?);
    match change {
        Change::Owner(owner) => {
            rustix::fs::chownat(directory, name, Some(uid(owner)), Some(gid(owner)), AtFlags::SYMLINK_NOFOLLOW)?;
        }
        Change::Mode(_) if kind == Kind::Symlink => {}
        Change::Mode(mode) => rustix::fs::chmodat(directory, name, Mode::from_raw_mode(mode), AtFlags::empty())?,
    }
    Ok(kind)
}

/// One moment of a walk.
pub enum Step<'a> {
    Entry {
        directory: &'a OwnedFd,
        name: &'a OsStr,
    },
    /// All below this directory has been visited.
    Left {
        directory: &'a OwnedFd,
        name: &'a OsStr,
    },
}

/// Whether a walk goes into the entry just seen.
#[derive(PartialEq)]
pub enum Below {
    Enter,
    Skip,
}

struct Level {
    directory: Option<OwnedFd>,
    identity: (u64, u64),
    /// Its own name in the level above.
    name: OsString,
    entries: std::vec::IntoIter<OsString>,
}

impl Level {
    fn open(directory: OwnedFd, name: OsString) -> Result<Self, Errno> {
        let entries = sorted_names(&directory)?.into_iter();
        Ok(Self { identity: identity(&directory)?, directory: Some(directory), name, entries })
    }
}

fn identity(directory: &OwnedFd) -> Result<(u64, u64), Errno> {
    rustix::fs::fstat(directory).map(|stat| (stat.st_dev, stat.st_ino))
}

/// Visits all below `top`, names in order. What vanishes meanwhile, and what is no directory any more, is not entered.
pub fn walk<E: From<Errno>>(top: OwnedFd, visit: &mut impl FnMut(Step<'_>) -> Result<Below, E>) -> Result<(), E> {
    let mut levels = vec![Level::open(top, OsString::new())?];
    while let Some(level) = levels.last_mut() {
        let Some(directory) = &level.directory else { return Err(Errno::STALE.into()) };
        if let Some(name) = level.entries.next() {
            if visit(Step::Entry { directory, name: &name })? == Below::Skip {
                continue;
            }
            match open_directory(directory, &name, false) {
                Ok(below) => levels.push(Level::open(below, name)?),
                // A caller that counts levels hears of every one that it wanted to enter.
                Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => {
                    visit(Step::Left { directory, name: &name })?;
                    continue;
                }
                Err(errno) => return Err(errno.into()),
            }
            if let Some(far) = levels.len().checked_sub(OPEN_LIMIT + 1) {
                levels[far].directory = None;
            }
            continue;
        }
        let Some(level) = levels.pop() else { break };
        let Some(above) = levels.last_mut() else { break };
        if above.directory.is_none() {
            let up = level.directory.as_ref().ok_or(Errno::STALE)?;
            let found = open_directory(up.as_fd(), "..", false)?;
            if identity(&found)? != above.identity {
                return Err(Errno::STALE.into());
            }
            above.directory = Some(found);
        }
        let directory = above.directory.as_ref().ok_or(Errno::STALE)?;
        visit(Step::Left { directory, name: &level.name })?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{symlink, MetadataExt as _};

    use super::{
        super::{
            place::{Parents, Place},
            scratch::Scratch,
        },
        *,
    };

    fn place(path: &Path) -> Place {
        Place::of(path, Parents::MustExist).unwrap()
    }

    #[test]
    fn a_tree_is_removed_and_links_are_not_followed() {
        let scratch = Scratch::new();
        std::fs::create_dir_all(scratch.path("keep/x")).unwrap();
        std::fs::create_dir_all(scratch.path("t/a/b")).unwrap();
        std::fs::write(scratch.path("t/a/f"), "").unwrap();
        symlink("../../keep", scratch.path("t/a/out")).unwrap();
        let at = place(&scratch.path("t"));
        assert_eq!(remove(&scratch.path("t"), &at.directory, &at.name).unwrap(), 5);
        assert!(!scratch.path("t").exists());
        assert!(scratch.path("keep/x").exists());
        assert_eq!(remove(&scratch.path("t"), &at.directory, &at.name).unwrap(), 0);
    }

    #[test]
    fn a_tree_deeper_than_any_path_is_removed() {
        let scratch = Scratch::new();
        std::fs::create_dir(scratch.path("t")).unwrap();
        let mut at = open_directory(rustix::fs::CWD, scratch.path("t"), false).unwrap();
        for _ in 0..3000 {
            rustix::fs::mkdirat(&at, "d", Mode::RWXU).unwrap();
            at = open_directory(&at, "d", false).unwrap();
        }
        drop(at);
        let at = place(&scratch.path("t"));
        assert_eq!(remove(&scratch.path("t"), &at.directory, &at.name).unwrap(), 3001);
    }

    #[test]
    fn owners_and_modes_change_below_but_not_through_links() {
        let scratch = Scratch::new();
        std::fs::write(scratch.path("outside"), "").unwrap();
        std::fs::create_dir(scratch.path("t")).unwrap();
        std::fs::write(scratch.path("t/f"), "").unwrap();
        symlink("../outside", scratch.path("t/l")).unwrap();
        let at = place(&scratch.path("t"));
        let owner = Change::Owner(Owner { uid: 5, gid: 6 });
        change(&scratch.path("t"), &at.directory, &at.name, owner, true).unwrap();
        change(&scratch.path("t"), &at.directory, &at.name, Change::Mode(0o700), true).unwrap();
        assert_eq!(scratch.path("t/f").metadata().unwrap().uid(), 5);
        assert_eq!(scratch.path("t/f").metadata().unwrap().mode() & 0o7777, 0o700);
        assert_eq!(scratch.path("t/l").symlink_metadata().unwrap().gid(), 6);
        assert_eq!(scratch.path("outside").metadata().unwrap().uid(), 0);
        assert_ne!(scratch.path("outside").metadata().unwrap().mode() & 0o7777, 0o700);
    }
}
