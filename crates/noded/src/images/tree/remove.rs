//! Removal of a tree of any depth, in bounded memory, stack and descriptors.

use std::{
    ffi::{CStr, CString},
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
};

use rustix::{
    fs::{AtFlags, Dir, FileType, Mode, OFlags},
    io::Errno,
};

use crate::images::{Error, Result};

/// Deeper directories are moved up to the root of the tree first, so that depth costs neither descriptors nor stack
/// (a program in a sandbox can nest directories without end).
const MAX_DEPTH: usize = 64;

/// Removes `path` and all below. Nothing there is fine.
pub fn remove(path: &Path) -> Result<()> {
    remove_at(rustix::fs::CWD, path.as_os_str().as_bytes(), path)
}

/// The same for `name` in an open directory; `label` is its name in errors.
pub fn remove_at(at: BorrowedFd<'_>, name: &[u8], label: &Path) -> Result<()> {
    let failed = |errno| Error::os("remove", label)(errno);
    match rustix::fs::unlinkat(at, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => return Ok(()),
        Err(Errno::ISDIR | Errno::PERM) => {}
        Err(errno) => return Err(failed(errno)),
    }
    let root = open_dir(at, name).map_err(failed)?;
    let mut moved = 0_u64;
    // Each pass empties the root down to MAX_DEPTH and moves what is deeper up, to be emptied by the next pass.
    loop {
        let before = moved;
        empty(&root, &root, 0, &mut moved).map_err(failed)?;
        if moved == before {
            break;
        }
    }
    rustix::fs::unlinkat(at, name, AtFlags::REMOVEDIR).map_err(failed)
}

fn empty(root: &OwnedFd, dir: &OwnedFd, depth: usize, moved: &mut u64) -> rustix::io::Result<()> {
    for (name, kind) in entries(dir)? {
        if kind != FileType::Directory {
            match rustix::fs::unlinkat(dir, &name, AtFlags::empty()) {
                Ok(()) | Err(Errno::NOENT) => continue,
                Err(Errno::ISDIR | Errno::PERM) => {} // a file system that does not tell types
                Err(errno) => return Err(errno),
            }
        }
        if depth >= MAX_DEPTH {
            move_up(root, dir, &name, moved)?;
            continue;
        }
        let child = open_dir(dir, name.to_bytes())?;
        empty(root, &child, depth + 1, moved)?;
        rustix::fs::unlinkat(dir, &name, AtFlags::REMOVEDIR)?;
    }
    Ok(())
}

fn move_up(root: &OwnedFd, dir: &OwnedFd, name: &CStr, moved: &mut u64) -> rustix::io::Result<()> {
    loop {
        *moved += 1;
        let to = format!(".sandmill-removal-{moved}");
        match rustix::fs::renameat_with(dir, name, root, to.as_str(), rustix::fs::RenameFlags::NOREPLACE) {
            Err(Errno::EXIST) => {}
            done => return done,
        }
    }
}

fn entries(dir: &OwnedFd) -> rustix::io::Result<Vec<(CString, FileType)>> {
    let mut found = Vec::new();
    for entry in Dir::read_from(dir)? {
        let entry = entry?;
        if !matches!(entry.file_name().to_bytes(), b"." | b"..") {
            found.push((entry.file_name().to_owned(), entry.file_type()));
        }
    }
    Ok(found)
}

fn open_dir(at: impl AsFd, name: &[u8]) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat(at, name, flags, Mode::empty())
}
