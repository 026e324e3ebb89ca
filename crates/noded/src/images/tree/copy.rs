//! A copy of a tree with owners, modes, times, links, attributes and holes.

use std::{
    collections::HashMap,
    ffi::OsStr,
    os::{fd::OwnedFd, unix::ffi::OsStrExt},
    path::Path,
};

use rustix::{
    fs::{AtFlags, FileType, Gid, Mode, OFlags, Timespec, Timestamps, Uid},
    io::Errno,
};

use super::{
    digest::next_data,
    is_whiteout,
    walk::{open_root, walk, Flow, Item},
    xattrs::{self, Overlay},
};
use crate::images::{Error, Result};

/// Ids beyond are not mapped into a sandbox.
const MAX_ID: u32 = 65535;

/// What kind of tree is copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// Somebody's folder. Its owners are an image's; device nodes and sockets stay behind, and what is mounted in it;
    /// nothing in it speaks to overlayfs.
    Folder,
    /// An upper directory of overlayfs: whiteouts and overlayfs' attributes are part of it.
    Upper,
}

#[derive(Debug, Default)]
pub struct Copied {
    pub warnings: Vec<String>,
}

/// Copies the tree at `from` to `to`, which must not exist. `max_bytes` of content at most.
pub fn copy(from: &Path, to: &Path, origin: Origin, max_bytes: u64) -> Result<Copied> {
    std::fs::create_dir(to).map_err(Error::io("make", to))?;
    let (source, target) = (open_root(from)?, open_root(to)?);
    let root_dev = rustix::fs::fstat(&source).map_err(Error::os("stat", from))?.st_dev;
    let mut copier = Copier {
        target,
        origin,
        root_dev,
        left: max_bytes,
        links: HashMap::new(),
        dir_times: Vec::new(),
        out: Copied::default(),
    };
    walk(&source, from, &mut |item: &Item| copier.item(item))?;
    for (path, times) in copier.dir_times.iter().rev() {
        rustix::fs::utimensat(&copier.target, name_of(path), times, AtFlags::SYMLINK_NOFOLLOW)
            .map_err(Error::os("set the time of", to.join(OsStr::from_bytes(path))))?;
    }
    Ok(copier.out)
}

struct Copier {
    target: OwnedFd,
    origin: Origin,
    root_dev: u64,
    left: u64,
    /// First names of files with several.
    links: HashMap<(u64, u64), Vec<u8>>,
    dir_times: Vec<(Vec<u8>, Timestamps)>,
    out: Copied,
}

impl Copier {
    fn item(&mut self, item: &Item) -> Result<Flow> {
        let stat = &item.stat;
        let is_dir = item.kind() == FileType::Directory;
        let is_mount = stat.st_dev != self.root_dev;
        if !is_dir && (is_mount || !self.is_wanted(item)) {
            return Ok(Flow::Skip);
        }
        if self.origin == Origin::Folder && (stat.st_uid > MAX_ID || stat.st_gid > MAX_ID) {
            return Err(Error::malformed(
                item.full_path().to_string_lossy(),
                format!("an owner with ids 0 to {MAX_ID}"),
                format!("{}:{}", stat.st_uid, stat.st_gid),
            ));
        }
        let failed = |errno| item.failed("copy", errno);
        if !is_dir && stat.st_nlink > 1 {
            if let Some(first) = self.links.get(&(stat.st_dev, stat.st_ino)) {
                rustix::fs::linkat(&self.target, &first[..], &self.target, item.path, AtFlags::empty())
                    .map_err(failed)?;
                return Ok(Flow::Descend);
            }
            self.links.insert((stat.st_dev, stat.st_ino), item.path.to_vec());
        }
        let path = name_of(item.path);
        match item.kind() {
            FileType::Directory if item.path.is_empty() => {}
            FileType::Directory => rustix::fs::mkdirat(&self.target, path, Mode::RWXU).map_err(failed)?,
            FileType::RegularFile => self.file(item)?,
            FileType::Symlink => {
                let target = rustix::fs::readlinkat(item.dir, item.name, Vec::new()).map_err(failed)?;
                rustix::fs::symlinkat(&target, &self.target, path).map_err(failed)?;
            }
            kind => rustix::fs::mknodat(&self.target, path, kind, Mode::RUSR, 0).map_err(failed)?,
        }
        self.metadata(item)?;
        Ok(if is_mount { Flow::Skip } else { Flow::Descend })
    }

    fn is_wanted(&mut self, item: &Item) -> bool {
        match item.kind() {
            FileType::RegularFile | FileType::Symlink | FileType::Fifo => true,
            FileType::CharacterDevice if self.origin == Origin::Upper => is_whiteout(&item.stat),
            FileType::CharacterDevice | FileType::BlockDevice => {
                self.out.warnings.push(format!("left out the device node {}", item.path.escape_ascii()));
                false
            }
            // A socket means nothing without the process that bound it.
            _ => false,
        }
    }

    fn file(&mut self, item: &Item) -> Result<()> {
        let failed = |errno| item.failed("copy", errno);
        let read = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let from = rustix::fs::openat(item.dir, item.name, read, Mode::empty()).map_err(failed)?;
        let write = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let to = rustix::fs::openat(&self.target, item.path, write, Mode::RUSR | Mode::WUSR).map_err(failed)?;
        let mut at = 0;
        while let Some((start, end)) = next_data(&from, at).map_err(failed)? {
            if end - start > self.left {
                return Err(Error::TooLarge {
                    file: item.full_path().display().to_string(),
                    what: "with this file the tree is larger than the limit, or than the free space".to_owned(),
                });
            }
            self.left -= end - start;
            copy_range(&from, &to, start, end).map_err(failed)?;
            at = end;
        }
        rustix::fs::ftruncate(&to, u64::try_from(item.stat.st_size).unwrap_or_default()).map_err(failed)
    }

    fn metadata(&mut self, item: &Item) -> Result<()> {
        let failed = |errno| item.failed("copy", errno);
        let (path, stat) = (name_of(item.path), &item.stat);
        let owner = (Some(Uid::from_raw(stat.st_uid)), Some(Gid::from_raw(stat.st_gid)));
        rustix::fs::chownat(&self.target, path, owner.0, owner.1, AtFlags::SYMLINK_NOFOLLOW).map_err(failed)?;
        if item.kind() != FileType::Symlink {
            let mode = Mode::from_raw_mode(stat.st_mode & 0o7777);
            rustix::fs::chmodat(&self.target, path, mode, AtFlags::empty()).map_err(failed)?;
        }
        let copy = Item { dir: std::os::fd::AsFd::as_fd(&self.target), name: &c_name(path), ..*item };
        for (name, value) in xattrs::read(item).map_err(failed)? {
            let wanted = match (self.origin, xattrs::overlay(&name)) {
                (Origin::Upper, Overlay::Drop) => false,
                (Origin::Upper, _) => true,
                (Origin::Folder, _) => crate::images::unpack::is_allowed_attribute(&name),
            };
            if !wanted {
                continue;
            }
            match xattrs::write(&copy, &name, &value) {
                Err(Errno::NOTSUP) if self.origin == Origin::Folder => {
                    let (name, path) = (name.escape_ascii(), item.path.escape_ascii());
                    self.out.warnings.push(format!("lost the attribute {name} of {path}"));
                }
                done => done.map_err(failed)?,
            }
        }
        let times = Timestamps {
            last_access: timespec(stat.st_atime, stat.st_atime_nsec),
            last_modification: timespec(stat.st_mtime, stat.st_mtime_nsec),
        };
        if item.kind() == FileType::Directory {
            self.dir_times.push((item.path.to_vec(), times));
            return Ok(());
        }
        rustix::fs::utimensat(&self.target, path, &times, AtFlags::SYMLINK_NOFOLLOW).map_err(failed)
    }
}

fn copy_range(from: &OwnedFd, to: &OwnedFd, start: u64, end: u64) -> rustix::io::Result<()> {
    let (mut read_at, mut write_at) = (start, start);
    while read_at < end {
        let want = usize::try_from(end - read_at).unwrap_or(usize::MAX).min(1 << 30);
        match rustix::fs::copy_file_range(from, Some(&mut read_at), to, Some(&mut write_at), want) {
            Ok(0) => return Ok(()), // it became shorter
            Ok(_) | Err(Errno::INTR) => {}
            Err(Errno::XDEV | Errno::NOSYS | Errno::OPNOTSUPP | Errno::INVAL) => {
                return copy_by_hand(from, to, read_at, end);
            }
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}

fn copy_by_hand(from: &OwnedFd, to: &OwnedFd, mut at: u64, end: u64) -> rustix::io::Result<()> {
    let mut buffer = vec![0; 256 << 10];
    while at < end {
        let want = usize::try_from(end - at).unwrap_or(usize::MAX).min(buffer.len());
        let got = rustix::io::pread(from, &mut buffer[..want], at)?;
        if got == 0 {
            return Ok(());
        }
        let mut done = 0;
        while done < got {
            done += rustix::io::pwrite(to, &buffer[done..got], at + done as u64)?;
        }
        at += got as u64;
    }
    Ok(())
}

/// The root itself is `.` to the kernel.
fn name_of(path: &[u8]) -> &[u8] {
    if path.is_empty() {
        b"."
    } else {
        path
    }
}

fn c_name(path: &[u8]) -> std::ffi::CString {
    // Names come from the kernel, which has none with NUL bytes.
    std::ffi::CString::new(path).unwrap_or_default()
}

#[allow(clippy::cast_possible_wrap)] // nanoseconds are below 10^9
fn timespec(seconds: i64, nanos: u64) -> Timespec {
    Timespec { tv_sec: seconds, tv_nsec: nanos as i64 }
}
