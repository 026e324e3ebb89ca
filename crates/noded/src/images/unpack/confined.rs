//! Creation below a root directory, and never beyond.
//!
//! Paths from an archive are resolved here, one component at a time, with descriptors that never follow a link; links
//! that the archive itself made are followed by hand, as if the root were `/`. The kernel is told the same with
//! `RESOLVE_BENEATH` and `RESOLVE_NO_SYMLINKS`, so a mistake here fails instead of escaping.

use std::{
    ffi::CString,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
    rc::Rc,
};

use rustix::{
    fs::{AtFlags, FileType, Mode, OFlags, ResolveFlags},
    io::{Errno, Result},
};

use crate::images::tree;

/// As the kernel's own limit on links in one path.
const MAX_LINKS: usize = 40;

/// What stands at a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Dir,
    /// A character device 0:0.
    Whiteout,
    Other,
}

/// A path's components, made absolute and free of `.` and `..`.
///
/// # Errors
/// What is wrong: it leaves the root, or no file can have it.
pub fn normalize(path: &[u8]) -> std::result::Result<Vec<&[u8]>, &'static str> {
    let mut components = Vec::new();
    for component in path.split(|&byte| byte == b'/') {
        match component {
            b"" | b"." => {}
            b".." => {
                components.pop().ok_or("its path leads out of the root")?;
            }
            _ if component.contains(&0) => return Err("its path contains a NUL byte"),
            _ => components.push(component),
        }
    }
    if components.len() > tree::MAX_DEPTH {
        return Err("its path is too deep");
    }
    Ok(components)
}

/// The root of a layer.
#[derive(Debug)]
pub struct Root {
    fd: Rc<OwnedFd>,
    /// The parent of the last entry, which mostly is the next one's too.
    last: Option<(Vec<u8>, Dir)>,
}

/// A directory below the root, by its real path (without links).
#[derive(Debug, Clone)]
pub struct Dir {
    fd: Rc<OwnedFd>,
    path: Vec<u8>,
}

/// A directory, and what happened on the way to it.
#[derive(Debug)]
pub struct Made {
    pub dir: Dir,
    /// Whiteouts of this layer that became directories, which then are opaque.
    pub uncovered: Vec<Vec<u8>>,
    /// Directories that no member has spoken of.
    pub implicit: Vec<Vec<u8>>,
}

impl Made {
    fn nothing(dir: Dir) -> Self {
        Self { dir, uncovered: Vec::new(), implicit: Vec::new() }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Links {
    Follow,
    /// The path counts as it is written; a link in it ends the search.
    Stop,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Missing {
    Make,
    Fail,
}

impl Root {
    pub fn open(path: &Path) -> Result<Self> {
        let fd = open_at(rustix::fs::CWD, path.as_os_str().as_bytes(), ResolveFlags::empty())?;
        Ok(Self { fd: Rc::new(fd), last: None })
    }

    pub fn dir(&self) -> Dir {
        Dir { fd: Rc::clone(&self.fd), path: Vec::new() }
    }

    /// Forgets what it remembers of the tree; called before something is removed.
    pub fn forget(&mut self) {
        self.last = None;
    }

    /// The directory at these components, made where it is missing (mode 0755, owned by root).
    pub fn make_dirs(&mut self, components: &[&[u8]]) -> Result<Made> {
        let literal = components.join(&b'/');
        if let Some((path, dir)) = &self.last {
            if *path == literal {
                return Ok(Made::nothing(dir.clone()));
            }
        }
        let made = self.walk(components, Links::Follow, Missing::Make)?.ok_or(Errno::LOOP)?;
        self.last = Some((literal, made.dir.clone()));
        Ok(made)
    }

    /// The same without following any link; `None` if there is one.
    pub fn make_dirs_unlinked(&self, components: &[&[u8]]) -> Result<Option<Made>> {
        self.walk(components, Links::Stop, Missing::Make)
    }

    /// The directory at these components, if it is there.
    pub fn find_dir(&self, components: &[&[u8]]) -> Result<Dir> {
        self.walk(components, Links::Follow, Missing::Fail)?.map(|made| made.dir).ok_or(Errno::LOOP)
    }

    /// Opens a directory by its real path.
    pub fn open_dir(&self, path: &[u8]) -> Result<OwnedFd> {
        open_at(&self.fd, if path.is_empty() { b"." } else { path }, BENEATH)
    }

    fn walk(&self, components: &[&[u8]], links: Links, missing: Missing) -> Result<Option<Made>> {
        let literal = components.join(&b'/');
        if let Ok(fd) = self.open_dir(&literal) {
            return Ok(Some(Made::nothing(Dir { fd: Rc::new(fd), path: literal })));
        }
        let (mut uncovered, mut implicit) = (Vec::new(), Vec::new());
        let mut followed = 0;
        let mut pending: Vec<Vec<u8>> = components.iter().rev().map(|component| component.to_vec()).collect();
        // The way from the root to where we are.
        let mut way = vec![self.dir()];
        while let Some(component) = pending.pop() {
            let here = way.last().cloned().unwrap_or_else(|| self.dir());
            match &component[..] {
                b"" | b"." => continue,
                b".." => {
                    if way.len() > 1 {
                        way.pop();
                    }
                    continue;
                }
                _ => {}
            }
            match here.file_type(&component)? {
                Some((FileType::Symlink, _)) => {
                    followed += 1;
                    if links == Links::Stop || followed > MAX_LINKS {
                        return Ok(None);
                    }
                    let target = rustix::fs::readlinkat(&*here.fd, &component[..], Vec::new())?;
                    if target.as_bytes().first() == Some(&b'/') {
                        way.truncate(1);
                    }
                    pending.extend(target.as_bytes().split(|&byte| byte == b'/').rev().map(<[u8]>::to_vec));
                    continue;
                }
                Some((FileType::CharacterDevice, 0)) if missing == Missing::Make => {
                    rustix::fs::unlinkat(&*here.fd, &component[..], AtFlags::empty())?;
                    here.make_dir(&component)?;
                    uncovered.push(here.child_path(&component));
                }
                None if missing == Missing::Make => {
                    here.make_dir(&component)?;
                    implicit.push(here.child_path(&component));
                }
                _ => {} // a directory, or the open below says what is wrong
            }
            if way.len() > tree::MAX_DEPTH {
                return Err(Errno::NAMETOOLONG);
            }
            way.push(here.open(&component)?);
        }
        Ok(way.pop().map(|dir| Made { dir, uncovered, implicit }))
    }
}

impl Dir {
    /// Its real path below the root.
    pub fn path(&self) -> &[u8] {
        &self.path
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    pub fn child_path(&self, name: &[u8]) -> Vec<u8> {
        if self.path.is_empty() {
            name.to_vec()
        } else {
            [&self.path, &b"/"[..], name].concat()
        }
    }

    /// A path of the system for an entry, for calls that know no descriptors. Its last component is not followed by
    /// calls that do not follow links.
    pub fn system_path(&self, name: &[u8]) -> CString {
        let path = [format!("/proc/self/fd/{}/", self.fd.as_raw_fd()).as_bytes(), name].concat();
        // Names with NUL bytes were refused by `normalize`.
        CString::new(path).unwrap_or_default()
    }

    fn open(&self, name: &[u8]) -> Result<Self> {
        let fd = open_at(&*self.fd, name, BENEATH)?;
        Ok(Self { fd: Rc::new(fd), path: self.child_path(name) })
    }

    fn file_type(&self, name: &[u8]) -> Result<Option<(FileType, u64)>> {
        match rustix::fs::statat(&*self.fd, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => Ok(Some((FileType::from_raw_mode(stat.st_mode), stat.st_rdev))),
            Err(Errno::NOENT) => Ok(None),
            Err(errno) => Err(errno),
        }
    }

    pub fn kind(&self, name: &[u8]) -> Result<Option<Kind>> {
        Ok(self.file_type(name)?.map(|found| match found {
            (FileType::Directory, _) => Kind::Dir,
            (FileType::CharacterDevice, 0) => Kind::Whiteout,
            _ => Kind::Other,
        }))
    }

    /// Whether two names are the same file already.
    pub fn same_entry(&self, name: &[u8], other: &Self, other_name: &[u8]) -> Result<bool> {
        let mine = rustix::fs::statat(&*self.fd, name, AtFlags::SYMLINK_NOFOLLOW)?;
        let its = rustix::fs::statat(&*other.fd, other_name, AtFlags::SYMLINK_NOFOLLOW)?;
        Ok((mine.st_dev, mine.st_ino) == (its.st_dev, its.st_ino))
    }

    pub fn make_dir(&self, name: &[u8]) -> Result<()> {
        rustix::fs::mkdirat(&*self.fd, name, Mode::from_raw_mode(0o755))
    }

    pub fn create(&self, name: &[u8], access: OFlags) -> Result<OwnedFd> {
        let flags = access | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        rustix::fs::openat2(&*self.fd, name, flags, Mode::from_raw_mode(0o600), BENEATH)
    }

    pub fn symlink(&self, target: &[u8], name: &[u8]) -> Result<()> {
        rustix::fs::symlinkat(target, &*self.fd, name)
    }

    /// A FIFO, or a character device, which is always 0:0: a whiteout.
    pub fn make_node(&self, name: &[u8], kind: FileType) -> Result<()> {
        rustix::fs::mknodat(&*self.fd, name, kind, Mode::from_raw_mode(0o600), 0)
    }

    pub fn hard_link(&self, name: &[u8], to: &Self, to_name: &[u8]) -> Result<()> {
        rustix::fs::linkat(&*self.fd, name, &*to.fd, to_name, AtFlags::empty())
    }

    /// Removes an entry and all below it.
    pub fn remove(&self, name: &[u8]) -> crate::images::Result<()> {
        tree::remove_at(self.fd.as_fd(), name, Path::new(std::ffi::OsStr::from_bytes(&self.child_path(name))))
    }
}

const BENEATH: ResolveFlags = ResolveFlags::BENEATH
    .union(ResolveFlags::NO_SYMLINKS)
    .union(ResolveFlags::NO_XDEV)
    .union(ResolveFlags::NO_MAGICLINKS);

fn open_at(at: impl AsFd, path: &[u8], resolve: ResolveFlags) -> Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat2(at, path, flags, Mode::empty(), resolve)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_normalized() {
        let path = |text: &'static str| normalize(text.as_bytes()).map(|parts| parts.join(&b'/'));
        assert_eq!(path("./a//b/").unwrap(), b"a/b");
        assert_eq!(path("/etc/passwd").unwrap(), b"etc/passwd");
        assert_eq!(path("a/../b").unwrap(), b"b");
        assert_eq!(path("./").unwrap(), b"");
        assert!(path("../x").is_err());
        assert!(path("a/../../x").is_err());
        assert!(path("/..").is_err());
        assert!(path("a\0b").is_err());
        assert!(normalize("d/".repeat(5000).as_bytes()).is_err());
    }
}
