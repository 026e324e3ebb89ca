//! Visits every entry of a tree, parents before children, names in order.

use std::{
    ffi::{CStr, CString, OsStr},
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
};

use rustix::{
    fs::{AtFlags, Dir, FileType, Mode, OFlags, Stat},
    io::Errno,
};

use crate::images::{Error, Result};

/// Deeper trees are refused: each level costs a descriptor, and no image needs them.
pub const MAX_DEPTH: usize = 256;

/// One entry.
pub struct Item<'a> {
    /// The directory it is in.
    pub dir: BorrowedFd<'a>,
    pub name: &'a CStr,
    /// Relative to the root of the walk; empty for the root itself.
    pub path: &'a [u8],
    pub stat: Stat,
    /// What the walk's root is called in errors.
    pub label: &'a Path,
}

impl Item<'_> {
    pub fn kind(&self) -> FileType {
        FileType::from_raw_mode(self.stat.st_mode)
    }

    /// A path of the system for calls that know no descriptors.
    pub fn system_path(&self) -> CString {
        let path = [format!("/proc/self/fd/{}/", self.dir.as_raw_fd()).as_bytes(), self.name.to_bytes()].concat();
        CString::new(path).unwrap_or_default()
    }

    pub fn full_path(&self) -> std::path::PathBuf {
        self.label.join(OsStr::from_bytes(self.path))
    }

    pub fn failed(&self, step: &'static str, errno: Errno) -> Error {
        Error::Io { step, path: self.full_path(), source: errno.into() }
    }
}

/// Whether to go on below a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flow {
    Descend,
    Skip,
}

/// Opens the root of a tree; it may be reached through links.
pub fn open_root(path: &Path) -> Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::open(path, flags, Mode::empty()).map_err(Error::os("open", path))
}

/// Calls `visit` for the root (named `.`) and everything below.
pub fn walk(root: impl AsFd, label: &Path, visit: &mut dyn FnMut(&Item) -> Result<Flow>) -> Result<()> {
    let root = root.as_fd();
    let stat = rustix::fs::fstat(root).map_err(Error::os("stat", label))?;
    if visit(&Item { dir: root, name: c".", path: b"", stat, label })? == Flow::Skip {
        return Ok(());
    }
    let mut path = Vec::new();
    let mut levels = vec![Level::open(root, c".", 0).map_err(Error::os("open", label))?];
    loop {
        let depth = levels.len();
        let Some(level) = levels.last_mut() else { return Ok(()) };
        path.truncate(level.path_len);
        let Some(name) = level.names.pop() else {
            levels.pop();
            continue;
        };
        if !path.is_empty() {
            path.push(b'/');
        }
        path.extend(name.to_bytes());
        let full = || label.join(OsStr::from_bytes(&path));
        let stat =
            rustix::fs::statat(&level.fd, &name, AtFlags::SYMLINK_NOFOLLOW).map_err(Error::os("stat", full()))?;
        let item = Item { dir: level.fd.as_fd(), name: &name, path: &path, stat, label };
        if visit(&item)? == Flow::Descend && item.kind() == FileType::Directory {
            if depth >= MAX_DEPTH {
                return Err(Error::Uncommittable {
                    path: full(),
                    reason: format!("it is nested deeper than {MAX_DEPTH} levels"),
                });
            }
            let next = Level::open(&level.fd, &name, path.len()).map_err(Error::os("open", full()))?;
            levels.push(next);
        }
    }
}

struct Level {
    fd: OwnedFd,
    /// In reverse order.
    names: Vec<CString>,
    path_len: usize,
}

impl Level {
    fn open(at: impl AsFd, name: &CStr, path_len: usize) -> rustix::io::Result<Self> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd = rustix::fs::openat(at, name, flags, Mode::empty())?;
        let mut names = Vec::new();
        for entry in Dir::read_from(&fd)? {
            let entry = entry?;
            if !matches!(entry.file_name().to_bytes(), b"." | b"..") {
                names.push(entry.file_name().to_owned());
            }
        }
        names.sort_unstable_by(|a, b| b.cmp(a));
        Ok(Self { fd, names, path_len })
    }
}
