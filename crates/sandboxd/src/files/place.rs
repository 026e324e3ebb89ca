//! The place of a file: the directory that holds its name, with links followed, and missing parents made.

use std::{
    ffi::{OsStr, OsString},
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::ffi::OsStrExt as _,
    },
    path::{Component, Path, PathBuf},
};

use rustix::{
    fs::{Mode, OFlags, ResolveFlags, CWD},
    io::Errno,
};
use sandmill_wire::ApiError;

use super::{entry::link_text, failure::failed};

/// The kernel's own limit of links in one path.
const LINK_LIMIT: usize = 40;

/// To whom new files and directories belong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Owner {
    pub uid: u32,
    pub gid: u32,
}

/// A directory and a name in it. The name is not a link.
pub struct Place {
    pub directory: OwnedFd,
    pub name: OsString,
}

/// What to do about directories that are missing on the way.
#[derive(Debug, Clone, Copy)]
pub enum Parents {
    /// Make them, mode 0755, for this owner. Those that exist stay as they are.
    Make(Owner),
    MustExist,
}

impl Place {
    /// Finds where a write to `path` goes: through links, also to a target that doesn't exist yet.
    ///
    /// Links of /proc that lead out of the path (`/proc/N/root`, `/proc/N/fd/M`) are refused: they name other processes'
    /// files, and this daemon's own.
    ///
    /// Errors: those of [`failed`]; 400 `is_a_directory` when the path ends in a slash, `.` or `..`.
    pub fn of(path: &Path, parents: Parents) -> Result<Self, ApiError> {
        let mut at: Option<OwnedFd> = None;
        let mut rest = path.to_owned();
        for _ in 0..LINK_LIMIT {
            let (parent, name) = split(&rest).ok_or_else(|| super::failure::is_directory(path))?;
            let directory = open_parent(at.as_ref(), &parent, parents)
                .map_err(|errno| failed("open the directory of", path, errno))?;
            match link_text(directory.as_fd(), &name) {
                Ok(target) => {
                    at = Some(directory);
                    rest = target.into();
                }
                Err(Errno::INVAL | Errno::NOENT) => return Ok(Self { directory, name }),
                Err(errno) => return Err(failed("open", path, errno)),
            }
        }
        Err(failed("open", path, Errno::LOOP))
    }

    /// Finds the entry itself, whatever it is: a link at the end of `path` is not followed.
    ///
    /// Errors: those of [`failed`]; 400 `invalid_argument` for `/`, and for a path that ends in `.` or `..`.
    pub fn of_entry(path: &Path, parents: Parents) -> Result<Self, ApiError> {
        let (parent, name) = split(&without_slashes(path)).ok_or_else(|| failed("change", path, Errno::INVAL))?;
        let directory =
            open_parent(None, &parent, parents).map_err(|errno| failed("open the directory of", path, errno))?;
        Ok(Self { directory, name })
    }
}

/// A directory may be named with slashes at the end.
pub fn without_slashes(path: &Path) -> PathBuf {
    let mut bytes = path.as_os_str().as_bytes();
    while let [rest @ .., b'/'] = bytes {
        bytes = rest;
    }
    PathBuf::from(OsStr::from_bytes(bytes))
}

/// Splits off the last name; None when there is none that a file could have.
fn split(path: &Path) -> Option<(PathBuf, OsString)> {
    let bytes = path.as_os_str().as_bytes();
    if bytes.ends_with(b"/") || bytes.ends_with(b"/.") {
        return None;
    }
    match path.components().next_back()? {
        Component::Normal(name) => Some((path.parent().unwrap_or(Path::new("")).to_owned(), name.to_owned())),
        _ => None,
    }
}

fn open_parent(at: Option<&OwnedFd>, parent: &Path, parents: Parents) -> Result<OwnedFd, Errno> {
    let parent = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
    match (step(at, parent), parents) {
        (Err(Errno::NOENT), Parents::Make(owner)) => {
            make_directories(at, parent, owner, 0o755).map(|made| made.directory)
        }
        (opened, _) => opened,
    }
}

/// Opens a directory by its path, links followed.
fn step(at: Option<&OwnedFd>, path: impl rustix::path::Arg) -> Result<OwnedFd, Errno> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let at = at.map_or(CWD, |at| at.as_fd());
    rustix::fs::openat2(at, path, flags, Mode::empty(), ResolveFlags::NO_MAGICLINKS)
}

/// A directory that [`make_directories`] found or made.
pub struct Made {
    pub directory: OwnedFd,
    /// Whether the last component is new.
    pub created: bool,
}

/// Makes `path` and what is missing above it; each new directory gets `owner`, and the last one `mode`.
pub fn make_directories(at: Option<&OwnedFd>, path: &Path, owner: Owner, mode: u32) -> Result<Made, Errno> {
    let start = if path.is_absolute() { "/" } else { "." };
    let mut made = Made { directory: step(at, start)?, created: false };
    let mut components = path.components().filter(|part| !matches!(part, Component::RootDir)).peekable();
    while let Some(component) = components.next() {
        let name = component.as_os_str();
        let mode = if components.peek().is_some() { 0o755 } else { mode };
        made = match step(Some(&made.directory), name) {
            Ok(directory) => Made { directory, created: false },
            Err(Errno::NOENT) => make_one(&made.directory, name, owner, mode)?,
            Err(errno) => return Err(errno),
        };
    }
    Ok(made)
}

fn make_one(parent: &OwnedFd, name: &OsStr, owner: Owner, mode: u32) -> Result<Made, Errno> {
    match rustix::fs::mkdirat(parent, name, Mode::RWXU) {
        Ok(()) => {
            // Not followed: the name could be swapped for a link between the calls.
            let directory = super::entry::open_directory(parent, name, false)?;
            rustix::fs::fchown(&directory, Some(uid(owner)), Some(gid(owner)))?;
            rustix::fs::fchmod(&directory, Mode::from_raw_mode(mode))?;
            Ok(Made { directory, created: true })
        }
        // Another call made it in the meantime (or a link leads nowhere, which the step then says).
        Err(Errno::EXIST) => step(Some(parent), name).map(|directory| Made { directory, created: false }),
        Err(errno) => Err(errno),
    }
}

pub fn uid(owner: Owner) -> rustix::fs::Uid {
    rustix::fs::Uid::from_raw(owner.uid)
}

pub fn gid(owner: Owner) -> rustix::fs::Gid {
    rustix::fs::Gid::from_raw(owner.gid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_name_is_split_off() {
        let name = |path: &str| split(Path::new(path)).map(|(parent, name)| (parent, name.into_string().unwrap()));
        assert_eq!(name("/a/b"), Some(("/a".into(), "b".into())));
        assert_eq!(name("b"), Some(("".into(), "b".into())));
        for directory in ["/", "/a/", "/a/.", "/a/..", ".."] {
            assert_eq!(name(directory), None, "{directory}");
        }
    }
}
