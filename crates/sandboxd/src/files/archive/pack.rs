//! A tree as a tar stream: types, modes, owners, times, links (hard ones too), and attributes.
//!
//! Names are relative to the tree, which itself is `./`; a single file is an archive of that file. What the header has no
//! room for goes into pax records, so that every tar reads it. Sockets have no meaning elsewhere and are left out, as are
//! the contents of /proc, /sys and the like.

use std::{
    collections::{BTreeMap, HashMap},
    ffi::OsStr,
    fs::File,
    io::{self, Read as _, Write},
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::ffi::OsStrExt as _,
    },
    path::{Path, PathBuf},
    sync::Arc,
};

use rustix::{
    fs::{AtFlags, Mode, OFlags, Stat},
    io::Errno,
};
use tar::{Builder, EntryType, Header};

use crate::{
    files::{
        attributes::Of,
        entry::{link_text, open_directory, Kind},
        place::Place,
        tree::{walk, Below, Step},
        upload::{is_virtual, Temporary},
    },
    proc::AccountNames,
};

/// pax records of attributes, by the name that GNU tar, bsdtar and Python know.
pub const ATTRIBUTE_RECORD: &str = "SCHILY.xattr.";
/// Attributes that mean something in another place.
const ATTRIBUTES: [&[u8]; 3] = [b"user.", b"security.capability", b"system.posix_acl_"];

/// Writes the tree at `place` to `out`.
pub fn pack<W: Write>(place: &Place, names: Arc<AccountNames>, out: W) -> io::Result<W> {
    let mut pack = Pack { builder: Builder::new(out), names, seen: HashMap::new() };
    let stat = rustix::fs::statat(&place.directory, &place.name, AtFlags::SYMLINK_NOFOLLOW)?;
    if Kind::of(&stat) == Kind::Directory {
        pack.tree(place)?;
    } else {
        pack.entry(&place.directory, &place.name, Path::new(&place.name))?;
    }
    pack.builder.into_inner()
}

struct Pack<W: Write> {
    builder: Builder<W>,
    names: Arc<AccountNames>,
    /// Files with several names, under the first of them.
    seen: HashMap<(u64, u64), PathBuf>,
}

impl<W: Write> Pack<W> {
    fn tree(&mut self, place: &Place) -> io::Result<()> {
        let top = open_directory(&place.directory, &place.name, true)?;
        let stat = rustix::fs::fstat(&top)?;
        self.write(&stat, Path::new("./"), &Extra::of(Of::File(top.as_fd())), None, io::empty())?;
        let mut at = PathBuf::new();
        walk(top, &mut |step| -> io::Result<Below> {
            match step {
                Step::Entry { name, .. } if Temporary::of(name).is_some() => Ok(Below::Skip),
                Step::Entry { directory, name } => {
                    let below = self.entry(directory, name, &at.join(name))?;
                    if below == Below::Enter {
                        at.push(name);
                    }
                    Ok(below)
                }
                Step::Left { .. } => {
                    at.pop();
                    Ok(Below::Skip)
                }
            }
        })
    }

    fn entry(&mut self, directory: &OwnedFd, name: &OsStr, path: &Path) -> io::Result<Below> {
        let stat = match rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => stat,
            Err(Errno::NOENT) => return Ok(Below::Skip),
            Err(errno) => return Err(errno.into()),
        };
        match Kind::of(&stat) {
            Kind::Directory => return self.directory(directory, name, path, &stat),
            Kind::File => self.file(directory, name, path)?,
            Kind::Symlink => {
                let target = link_text(directory.as_fd(), name)?;
                self.write(&stat, path, &Extra::default(), Some(target.as_bytes()), io::empty())?;
            }
            Kind::Fifo | Kind::CharDevice | Kind::BlockDevice => {
                self.write(&stat, path, &Extra::default(), None, io::empty())?;
            }
            Kind::Socket | Kind::Unknown => {}
        }
        Ok(Below::Skip)
    }

    fn directory(&mut self, directory: &OwnedFd, name: &OsStr, path: &Path, stat: &Stat) -> io::Result<Below> {
        let opened = match open_directory(directory, name, false) {
            Ok(opened) => opened,
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => return Ok(Below::Skip),
            Err(errno) => return Err(errno.into()),
        };
        let mut path = path.as_os_str().to_owned();
        path.push("/");
        self.write(stat, Path::new(&path), &Extra::of(Of::File(opened.as_fd())), None, io::empty())?;
        Ok(if is_virtual(&opened) { Below::Skip } else { Below::Enter })
    }

    fn file(&mut self, directory: &OwnedFd, name: &OsStr, path: &Path) -> io::Result<()> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY;
        let file = match rustix::fs::openat(directory, name, flags, Mode::empty()) {
            Ok(file) => File::from(file),
            Err(Errno::NOENT | Errno::LOOP) => return Ok(()),
            Err(errno) => return Err(errno.into()),
        };
        // What was looked at by name may be another file by now: only what is open counts.
        let stat = rustix::fs::fstat(&file)?;
        if Kind::of(&stat) != Kind::File {
            return Ok(());
        }
        if stat.st_nlink > 1 {
            if let Some(first) = self.seen.get(&(stat.st_dev, stat.st_ino)).cloned() {
                let target = first.as_os_str().as_bytes();
                return self.write(
                    &stat,
                    path,
                    &Extra { hard_link: true, ..Extra::default() },
                    Some(target),
                    io::empty(),
                );
            }
            self.seen.insert((stat.st_dev, stat.st_ino), path.to_owned());
        }
        let size = stat.st_size as u64;
        let contents = Exact { inner: file.try_clone()?.take(size), left: size };
        self.write(&stat, path, &Extra::of(Of::File(file.as_fd())), None, contents)
    }

    fn write(
        &mut self,
        stat: &Stat,
        path: &Path,
        extra: &Extra,
        link: Option<&[u8]>,
        contents: impl io::Read,
    ) -> io::Result<()> {
        let mut header = Header::new_ustar();
        let kind = if extra.hard_link { EntryType::Link } else { entry_type(Kind::of(stat)) };
        header.set_entry_type(kind);
        header.set_size(if kind == EntryType::Regular { stat.st_size as u64 } else { 0 });
        header.set_mode(stat.st_mode & 0o7777);
        header.set_uid(u64::from(stat.st_uid));
        header.set_gid(u64::from(stat.st_gid));
        header.set_mtime(u64::try_from(stat.st_mtime).unwrap_or(0));
        if matches!(kind, EntryType::Char | EntryType::Block) {
            header.set_device_major(rustix::fs::major(stat.st_rdev))?;
            header.set_device_minor(rustix::fs::minor(stat.st_rdev))?;
        }
        let mut records: Vec<(String, &[u8])> = Vec::new();
        if let Some(ustar) = header.as_ustar_mut() {
            if !fill(&mut ustar.name, path.as_os_str().as_bytes()) {
                records.push(("path".to_owned(), path.as_os_str().as_bytes()));
            }
            if let Some(link) = link.filter(|link| !fill(&mut ustar.linkname, link)) {
                records.push(("linkpath".to_owned(), link));
            }
            // The names are a help for people: a long one is left out.
            fill(&mut ustar.uname[..31], self.names.user(stat.st_uid).as_bytes());
            fill(&mut ustar.gname[..31], self.names.group(stat.st_gid).as_bytes());
        }
        for (name, value) in &extra.attributes {
            records.push((format!("{ATTRIBUTE_RECORD}{name}"), value));
        }
        if !records.is_empty() {
            self.builder.append_pax_extensions(records.iter().map(|(key, value)| (key.as_str(), *value)))?;
        }
        header.set_cksum();
        self.builder.append(&header, contents)
    }
}

fn entry_type(kind: Kind) -> EntryType {
    match kind {
        Kind::Directory => EntryType::Directory,
        Kind::Symlink => EntryType::Symlink,
        Kind::Fifo => EntryType::Fifo,
        Kind::CharDevice => EntryType::Char,
        Kind::BlockDevice => EntryType::Block,
        Kind::File | Kind::Socket | Kind::Unknown => EntryType::Regular,
    }
}

/// Writes `text` into a field of a header as far as it goes; false when it doesn't fit.
fn fill(field: &mut [u8], text: &[u8]) -> bool {
    let count = text.len().min(field.len());
    field[..count].copy_from_slice(&text[..count]);
    count == text.len()
}

/// What a header can't say.
#[derive(Default)]
struct Extra {
    hard_link: bool,
    attributes: BTreeMap<String, Vec<u8>>,
}

impl Extra {
    fn of(of: Of<'_>) -> Self {
        let wanted = |name: &[u8]| ATTRIBUTES.iter().any(|prefix| name.starts_with(prefix));
        let names = of.names().into_iter().filter(|name| wanted(name.to_bytes()));
        let read = names.filter_map(|name| Some((name.to_str().ok()?.to_owned(), of.value(&name).ok()?)));
        Self { hard_link: false, attributes: read.collect() }
    }
}

/// A file's contents, as long as its header says. One that shrinks meanwhile breaks the archive off: zeros in its place would
/// pass for its contents.
struct Exact {
    inner: io::Take<File>,
    left: u64,
}

impl io::Read for Exact {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(buffer)?;
        self.left -= count as u64;
        if count == 0 && self.left > 0 && !buffer.is_empty() {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "a file shrank while it was read"));
        }
        Ok(count)
    }
}
