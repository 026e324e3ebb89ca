//! A tar stream into a directory, and never out of it.
//!
//! Names in an archive are taken relative to the directory, whatever they look like; one with `..` in it, and one whose way
//! leads through a link that the same archive made, refuses the archive. Links that were there before are followed as if the
//! directory were the root. Each file is whole or not there. Directories that exist keep their mode and owner.

use std::{
    collections::HashSet,
    ffi::{CString, OsStr, OsString},
    io,
    os::{fd::OwnedFd, unix::ffi::OsStrExt as _},
    path::{Component, Path, PathBuf},
};

use rustix::{
    fs::{AtFlags, Mode, OFlags, ResolveFlags, Timespec, Timestamps},
    io::Errno,
};
use sandmill_wire::ApiError;
use serde::Serialize;
use tar::{Archive, Entry, EntryType};

use super::pack::ATTRIBUTE_RECORD;
use crate::files::{
    attributes,
    failure::{failed, failed_io, shown},
    place::{gid, uid, Owner},
    upload::{create, temporary_name},
};

/// Warnings in one answer; more are counted.
const WARNING_LIMIT: usize = 100;

/// Who owns what comes out of an archive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Owners {
    /// The call's user.
    Caller,
    /// Those in the archive, by number.
    Kept,
}

#[derive(Debug, Default, Serialize)]
pub struct Unpacked {
    pub entries: u64,
    /// Contents of files.
    pub bytes: u64,
    /// What could not be made as the archive says.
    pub warnings: Vec<Warning>,
    /// Warnings beyond those listed.
    pub more_warnings: u64,
}

#[derive(Debug, Serialize)]
pub struct Warning {
    pub path: String,
    pub reason: String,
}

/// Unpacks `archive` into `root`, whose path is `path`.
///
/// Errors: 400 `unsafe_archive`, `invalid_archive`; those of [`failed`]. What came before the error stays.
pub fn unpack(
    archive: impl io::Read,
    root: OwnedFd,
    path: &Path,
    owner: Owner,
    owners: Owners,
) -> Result<Unpacked, ApiError> {
    let mut unpack = Unpack {
        root,
        path: path.to_owned(),
        owner,
        owners,
        links: HashSet::new(),
        times: Vec::new(),
        parent: None,
        done: Unpacked::default(),
    };
    let mut archive = Archive::new(archive);
    for entry in archive.entries().map_err(|error| invalid(&error))? {
        unpack.entry(entry.map_err(|error| invalid(&error))?)?;
    }
    unpack.set_times();
    Ok(unpack.done)
}

fn invalid(error: &io::Error) -> ApiError {
    ApiError::new(400, "invalid_archive", format!("the body is no tar archive that can be read: {error}"))
}

fn unsafe_archive(path: &Path, why: &str) -> ApiError {
    ApiError::new(400, "unsafe_archive", format!("the archive's entry {} {why}", shown(path)))
        .hint("only archives that stay inside their directory are unpacked")
}

struct Unpack {
    root: OwnedFd,
    path: PathBuf,
    owner: Owner,
    owners: Owners,
    /// Links that this archive made.
    links: HashSet<PathBuf>,
    /// Directories' times are set last: every entry made in them changes them.
    times: Vec<(PathBuf, u64)>,
    /// The directory of the last entry, which is mostly that of the next one too.
    parent: Option<(PathBuf, OwnedFd)>,
    done: Unpacked,
}

/// What a header says of an entry, but for its contents.
struct Attributes {
    mode: u32,
    owner: Owner,
    mtime: u64,
    extended: Vec<(CString, Vec<u8>)>,
}

impl Unpack {
    fn entry(&mut self, mut entry: Entry<'_, impl io::Read>) -> Result<(), ApiError> {
        let given = PathBuf::from(OsStr::from_bytes(&entry.path_bytes()));
        let path = relative(&given)?;
        let kind = entry.header().entry_type();
        let attributes = self.attributes(&mut entry)?;
        let Some(name) = path.file_name().map(OsStr::to_owned) else {
            // The directory itself, which exists.
            return Ok(());
        };
        self.done.entries += 1;
        match kind {
            EntryType::Directory => self.directory(&path, &attributes),
            EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse => {
                self.file(&path, &name, &attributes, &mut entry)
            }
            EntryType::Symlink => {
                let target = entry.link_name_bytes().unwrap_or_default().into_owned();
                self.symlink(&path, &name, OsStr::from_bytes(&target), &attributes)
            }
            EntryType::Link => {
                let target = entry.link_name_bytes().unwrap_or_default().into_owned();
                self.hard_link(&path, &name, Path::new(OsStr::from_bytes(&target)))
            }
            EntryType::Fifo => self.fifo(&path, &name, &attributes),
            EntryType::Char | EntryType::Block => {
                self.warn(&path, "device nodes are not made in a sandbox");
                Ok(())
            }
            other => {
                self.warn(&path, &format!("entries of type {:?} are not known", other.as_byte() as char));
                Ok(())
            }
        }
    }

    fn attributes(&self, entry: &mut Entry<'_, impl io::Read>) -> Result<Attributes, ApiError> {
        let mut extended = Vec::new();
        if let Some(records) = entry.pax_extensions().map_err(|error| invalid(&error))? {
            for record in records.filter_map(Result::ok) {
                let Some(name) = record.key_bytes().strip_prefix(ATTRIBUTE_RECORD.as_bytes()) else { continue };
                if let Ok(name) = CString::new(name) {
                    extended.push((name, record.value_bytes().to_vec()));
                }
            }
        }
        let header = entry.header();
        let number = |field: io::Result<u64>| field.map_err(|error| invalid(&error));
        let owner = match self.owners {
            Owners::Caller => self.owner,
            Owners::Kept => Owner { uid: number(header.uid())? as u32, gid: number(header.gid())? as u32 },
        };
        let mode = header.mode().map_err(|error| invalid(&error))? & 0o7777;
        Ok(Attributes { mode, owner, mtime: number(header.mtime())?, extended })
    }

    fn directory(&mut self, path: &Path, attributes: &Attributes) -> Result<(), ApiError> {
        let (parent, name) = (path.parent().unwrap_or(Path::new("")), path.file_name().unwrap_or_default());
        let refused = |errno| failed("unpack", path, errno);
        let parent = self.open_parent(parent)?;
        match rustix::fs::mkdirat(parent, name, Mode::RWXU) {
            Ok(()) => {}
            Err(Errno::EXIST) => {
                // Through a link only if it was there before this archive.
                self.check_way(path)?;
                return self.open(path).map(drop).map_err(refused);
            }
            Err(errno) => return Err(refused(errno)),
        }
        let made = self.open(path).map_err(refused)?;
        self.dress(path, &made, attributes)?;
        self.times.push((path.to_owned(), attributes.mtime));
        Ok(())
    }

    fn file(
        &mut self,
        path: &Path,
        name: &OsStr,
        attributes: &Attributes,
        contents: &mut impl io::Read,
    ) -> Result<(), ApiError> {
        let refused = |errno| failed("unpack", path, errno);
        let parent = self.parent_of(path)?;
        let (temporary, mut file) = create(&parent, true).map_err(refused)?;
        let landing = Landing { directory: parent, temporary };
        self.done.bytes += io::copy(contents, &mut file).map_err(|error| match error.raw_os_error() {
            Some(_) => failed_io("unpack", path, &error),
            None => invalid(&error),
        })?;
        self.dress(path, &file, attributes)?;
        let _ = rustix::fs::futimens(&file, &times(attributes.mtime));
        landing.land(name).map_err(refused)
    }

    fn symlink(&mut self, path: &Path, name: &OsStr, target: &OsStr, attributes: &Attributes) -> Result<(), ApiError> {
        let refused = |errno| failed("unpack", path, errno);
        let parent = self.parent_of(path)?;
        let landing = Landing { temporary: temporary_name(true).map_err(refused)?, directory: parent };
        rustix::fs::symlinkat(target, &landing.directory, &landing.temporary).map_err(refused)?;
        let (owner, no_follow) = (attributes.owner, AtFlags::SYMLINK_NOFOLLOW);
        let (at, temporary) = (&landing.directory, &landing.temporary);
        if rustix::fs::chownat(at, temporary, Some(uid(owner)), Some(gid(owner)), no_follow).is_err() {
            self.warn(path, "its owner can't be set");
        }
        let _ = rustix::fs::utimensat(at, temporary, &times(attributes.mtime), no_follow);
        landing.land(name).map_err(refused)?;
        self.links.insert(path.to_owned());
        Ok(())
    }

    fn hard_link(&mut self, path: &Path, name: &OsStr, target: &Path) -> Result<(), ApiError> {
        let refused = |errno| failed("unpack", path, errno);
        let target = relative(target)?;
        let Some(target_name) = target.file_name() else {
            return Err(unsafe_archive(path, "is a link to a directory"));
        };
        let source = self.parent_of(&target)?;
        let parent = self.parent_of(path)?;
        let landing = Landing { temporary: temporary_name(true).map_err(refused)?, directory: parent };
        rustix::fs::linkat(&source, target_name, &landing.directory, &landing.temporary, AtFlags::empty())
            .map_err(refused)?;
        // Renaming one name of a file to another name of it does nothing: dropping the landing removes the rest.
        rustix::fs::renameat(&landing.directory, &landing.temporary, &landing.directory, name).map_err(refused)
    }

    fn fifo(&mut self, path: &Path, name: &OsStr, attributes: &Attributes) -> Result<(), ApiError> {
        let refused = |errno| failed("unpack", path, errno);
        let parent = self.parent_of(path)?;
        let landing = Landing { temporary: temporary_name(true).map_err(refused)?, directory: parent };
        rustix::fs::mkfifoat(&landing.directory, &landing.temporary, Mode::RUSR | Mode::WUSR).map_err(refused)?;
        let (at, temporary, owner) = (&landing.directory, &landing.temporary, attributes.owner);
        let owned = rustix::fs::chownat(at, temporary, Some(uid(owner)), Some(gid(owner)), AtFlags::SYMLINK_NOFOLLOW);
        let moded = rustix::fs::chmodat(at, temporary, Mode::from_raw_mode(attributes.mode), AtFlags::empty());
        if owned.and(moded).is_err() {
            self.warn(path, "its owner or mode can't be set");
        }
        landing.land(name).map_err(refused)
    }

    /// Owner first, for that takes set-id bits and capabilities away; then mode, then attributes.
    fn dress(&mut self, path: &Path, file: &impl std::os::fd::AsFd, attributes: &Attributes) -> Result<(), ApiError> {
        if rustix::fs::fchown(file, Some(uid(attributes.owner)), Some(gid(attributes.owner))).is_err() {
            let Owner { uid, gid } = attributes.owner;
            self.warn(path, &format!("its owner {uid}:{gid} can't be set"));
        }
        rustix::fs::fchmod(file, Mode::from_raw_mode(attributes.mode))
            .map_err(|errno| failed("unpack", path, errno))?;
        for (name, value) in &attributes.extended {
            if attributes::set(file.as_fd(), name, value).is_err() {
                self.warn(path, &format!("its attribute {} can't be set", name.to_string_lossy()));
            }
        }
        Ok(())
    }

    /// The directory of `path`, made with what is missing above it.
    fn parent_of(&mut self, path: &Path) -> Result<OwnedFd, ApiError> {
        let parent = self.open_parent(path.parent().unwrap_or(Path::new("")))?;
        parent.try_clone().map_err(|error| failed_io("unpack", path, &error))
    }

    fn open_parent(&mut self, parent: &Path) -> Result<&OwnedFd, ApiError> {
        if self.parent.as_ref().is_none_or(|(known, _)| known != parent) {
            self.check_way(parent)?;
            let opened = self.make_way(parent).map_err(|errno| failed("unpack into", parent, errno))?;
            self.parent = Some((parent.to_owned(), opened));
        }
        self.parent.as_ref().map(|(_, directory)| directory).ok_or_else(|| failed("unpack into", parent, Errno::IO))
    }

    /// Errors: 400 `unsafe_archive` when the way leads through a link of this archive.
    fn check_way(&self, path: &Path) -> Result<(), ApiError> {
        match path.ancestors().find(|part| self.links.contains(*part)) {
            Some(link) => Err(unsafe_archive(path, &format!("leads through {}, a link that it made", shown(link)))),
            None => Ok(()),
        }
    }

    /// Opens a path below the root; links stay inside it.
    fn open(&self, path: &Path) -> Result<OwnedFd, Errno> {
        let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
        rustix::fs::openat2(&self.root, path, flags, Mode::empty(), resolve)
    }

    fn make_way(&self, path: &Path) -> Result<OwnedFd, Errno> {
        match self.open(path) {
            Err(Errno::NOENT) => {}
            opened => return opened,
        }
        let (Some(above), Some(name)) = (path.parent(), path.file_name()) else { return Err(Errno::NOENT) };
        let above = self.make_way(above)?;
        match rustix::fs::mkdirat(&above, name, Mode::from_raw_mode(0o755)) {
            Ok(()) => {
                let made = self.open(path)?;
                rustix::fs::fchown(&made, Some(uid(self.owner)), Some(gid(self.owner)))?;
                rustix::fs::fchmod(&made, Mode::from_raw_mode(0o755))?;
                Ok(made)
            }
            // A dangling link, or somebody was faster.
            Err(Errno::EXIST) => self.open(path),
            Err(errno) => Err(errno),
        }
    }

    fn set_times(&mut self) {
        for (path, mtime) in std::mem::take(&mut self.times).into_iter().rev() {
            if let Ok(directory) = self.open(&path) {
                let _ = rustix::fs::futimens(&directory, &times(mtime));
            }
        }
    }

    fn warn(&mut self, path: &Path, reason: &str) {
        if self.done.warnings.len() < WARNING_LIMIT {
            let path = crate::files::path::escaped(self.path.join(path).as_os_str());
            self.done.warnings.push(Warning { path, reason: reason.to_owned() });
        } else {
            self.done.more_warnings += 1;
        }
    }
}

/// The entry's path without what means nothing. Errors: 400 `unsafe_archive`.
fn relative(given: &Path) -> Result<PathBuf, ApiError> {
    let mut path = PathBuf::new();
    for component in given.components() {
        match component {
            Component::Normal(name) => path.push(name),
            Component::RootDir | Component::CurDir | Component::Prefix(_) => {}
            Component::ParentDir => return Err(unsafe_archive(given, "contains ..")),
        }
    }
    if path.as_os_str().as_bytes().contains(&0) {
        return Err(unsafe_archive(given, "contains a NUL byte"));
    }
    Ok(path)
}

fn times(mtime: u64) -> Timestamps {
    let moment = Timespec { tv_sec: i64::try_from(mtime).unwrap_or(0), tv_nsec: 0 };
    Timestamps { last_access: moment, last_modification: moment }
}

/// An entry under its temporary name, removed unless it lands.
struct Landing {
    directory: OwnedFd,
    temporary: OsString,
}

impl Landing {
    fn land(self, name: &OsStr) -> Result<(), Errno> {
        rustix::fs::renameat(&self.directory, &self.temporary, &self.directory, name)
    }
}

impl Drop for Landing {
    fn drop(&mut self) {
        let _ = rustix::fs::unlinkat(&self.directory, &self.temporary, AtFlags::empty());
    }
}
