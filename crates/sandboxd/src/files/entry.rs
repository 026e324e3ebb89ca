//! What there is to know about one entry of a directory.

use std::{
    ffi::{OsStr, OsString},
    os::{
        fd::{AsFd, BorrowedFd},
        unix::ffi::OsStringExt as _,
    },
    path::{Path, PathBuf},
    sync::Arc,
};

use rustix::{
    fs::{AtFlags, FileType, OFlags, Stat},
    io::Errno,
};
use sandmill_wire::ApiError;
use serde::{ser::SerializeMap as _, Serialize, Serializer};

use super::{failure::failed, path::write_name};
use crate::proc::AccountNames;

/// An entry as `lstat` sees it, and where it leads if it is a link.
#[derive(Debug, Clone)]
pub struct Entry {
    pub path: PathBuf,
    pub kind: Kind,
    pub size: u64,
    /// Permission bits with set-uid, set-gid and sticky.
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    pub mtime: (i64, u32),
    pub inode: u64,
    pub links: u64,
    /// The text of a link.
    pub target: Option<OsString>,
    names: Arc<AccountNames>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    File,
    Directory,
    Symlink,
    Fifo,
    Socket,
    CharDevice,
    BlockDevice,
    Unknown,
}

impl Kind {
    pub fn of(stat: &Stat) -> Self {
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => Self::File,
            FileType::Directory => Self::Directory,
            FileType::Symlink => Self::Symlink,
            FileType::Fifo => Self::Fifo,
            FileType::Socket => Self::Socket,
            FileType::CharacterDevice => Self::CharDevice,
            FileType::BlockDevice => Self::BlockDevice,
            FileType::Unknown => Self::Unknown,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::File => "file",
            Self::Directory => "directory",
            Self::Symlink => "symlink",
            Self::Fifo => "fifo",
            Self::Socket => "socket",
            Self::CharDevice => "char_device",
            Self::BlockDevice => "block_device",
            Self::Unknown => "unknown",
        }
    }
}

impl Entry {
    #[allow(clippy::unnecessary_cast)] // st_nlink has another type on other architectures
    pub fn new(path: PathBuf, stat: &Stat, target: Option<OsString>, names: Arc<AccountNames>) -> Self {
        Self {
            path,
            kind: Kind::of(stat),
            size: stat.st_size as u64,
            mode: stat.st_mode & 0o7777,
            uid: stat.st_uid,
            gid: stat.st_gid,
            mtime: (stat.st_mtime, stat.st_mtime_nsec as u32),
            inode: stat.st_ino,
            links: stat.st_nlink as u64,
            target,
            names,
        }
    }

    /// Looks `name` up in `directory`; `path` is what it is called in the answer.
    pub fn at(directory: BorrowedFd<'_>, name: &OsStr, path: PathBuf, names: Arc<AccountNames>) -> Result<Self, Errno> {
        let stat = rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW)?;
        let target = match Kind::of(&stat) {
            Kind::Symlink => Some(link_text(directory, name)?),
            _ => None,
        };
        Ok(Self::new(path, &stat, target, names))
    }

    /// Looks `path` up; the last component's link is followed only if `follow`.
    ///
    /// Errors: those of [`failed`].
    pub fn of(path: &Path, follow: bool, names: Arc<AccountNames>) -> Result<Self, ApiError> {
        let looked_up = if follow {
            rustix::fs::stat(path).map(|stat| Self::new(path.to_owned(), &stat, None, names))
        } else {
            Self::at(rustix::fs::CWD, path.as_os_str(), path.to_owned(), names)
        };
        looked_up.map_err(|errno| failed("look up", path, errno))
    }

    pub fn name(&self) -> &OsStr {
        self.path.file_name().unwrap_or_else(|| self.path.as_os_str())
    }

    pub fn owner(&self) -> String {
        self.names.user(self.uid)
    }

    pub fn group(&self) -> String {
        self.names.group(self.gid)
    }
}

pub fn link_text(directory: BorrowedFd<'_>, name: &OsStr) -> Result<OsString, Errno> {
    rustix::fs::readlinkat(directory, name, Vec::new()).map(|text| OsString::from_vec(text.into_bytes()))
}

/// Opens a directory for its entries, without waiting for anything that isn't one.
pub fn open_directory(at: impl AsFd, path: impl rustix::path::Arg, follow: bool) -> Result<rustix::fd::OwnedFd, Errno> {
    let mut flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NONBLOCK;
    if !follow {
        flags |= OFlags::NOFOLLOW;
    }
    rustix::fs::openat(at, path, flags, rustix::fs::Mode::empty())
}

impl Serialize for Entry {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let readable = serializer.is_human_readable();
        let mut map = serializer.serialize_map(None)?;
        write_name::<S>(&mut map, "name", self.name(), readable)?;
        write_name::<S>(&mut map, "path", self.path.as_os_str(), readable)?;
        map.serialize_entry("type", self.kind.name())?;
        map.serialize_entry("size_bytes", &self.size)?;
        map.serialize_entry("mode", &self.mode)?;
        map.serialize_entry("uid", &self.uid)?;
        map.serialize_entry("gid", &self.gid)?;
        map.serialize_entry("owner", &self.owner())?;
        map.serialize_entry("group", &self.group())?;
        map.serialize_entry("modified_at", &(self.mtime.0 as f64 + f64::from(self.mtime.1) / 1e9))?;
        map.serialize_entry("inode", &self.inode)?;
        map.serialize_entry("links", &self.links)?;
        match &self.target {
            Some(target) => write_name::<S>(&mut map, "target", target, readable)?,
            None => map.serialize_entry("target", &None::<&str>)?,
        }
        map.end()
    }
}
