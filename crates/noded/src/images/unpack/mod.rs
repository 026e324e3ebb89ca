//! A layer's tar becomes a directory tree that overlayfs understands.
//!
//! Whiteouts become character devices 0:0 and opaque markers the attribute `trusted.overlay.opaque`. A marker speaks of
//! the layers below, never of its own layer, in whatever order the members come. Device nodes are left out (a sandbox has
//! its own /dev) and said so. Nothing is created, changed or followed outside of the layer's root: see [`confined`].

mod confined;
mod metadata;
mod writer;

#[cfg(test)]
pub mod tests;

use std::{
    collections::{BTreeMap, BTreeSet},
    io::Read,
    path::Path,
};

use rustix::{
    fs::{FileType, OFlags},
    io::Errno,
};

use self::confined::{Dir, Made, Root};
pub use self::metadata::is_allowed as is_allowed_attribute;
use super::{
    tar::{Entry, Kind, Tar},
    tree, Error, Result,
};

const WHITEOUT: &[u8] = b".wh.";
const OPAQUE: &[u8] = b".wh..wh..opq";
/// Ids beyond are not mapped into a sandbox.
const MAX_ID: u64 = 65535;
/// More warnings than this say nothing new.
const MAX_WARNINGS: usize = 20;

/// What an archive may cost. Beyond it is an attack, or a mistake.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    pub entries: u64,
    pub bytes: u64,
}

impl Limits {
    /// Two million entries, 128 GiB, and never more than nine tenths of what is free where `path` lies.
    pub fn for_path(path: &Path) -> Self {
        let free = rustix::fs::statvfs(path).map_or(u64::MAX, |fs| fs.f_bavail.saturating_mul(fs.f_frsize));
        Self { entries: 2_000_000, bytes: (128 << 30).min(free / 10 * 9) }
    }
}

/// What came out of one archive.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Unpacked {
    pub entries: u64,
    pub size_bytes: u64,
    /// The layer hides everything below it. overlayfs ignores the marker at a root, so the image leaves those layers out.
    pub opaque_root: bool,
    /// It has whiteouts.
    pub hides: bool,
    /// Directories that are in it only as parents of its members: their owner and mode are those of the layers below.
    pub implicit: Vec<String>,
    /// Whether the archive had its end marker.
    pub complete: bool,
    pub warnings: Vec<String>,
}

/// Unpacks into `root`, which must not exist; `label` names the archive in errors. What `tar` has left is unread.
pub fn unpack(label: &str, tar: &mut Tar<impl Read>, root: &Path, limits: Limits) -> Result<Unpacked> {
    std::fs::create_dir(root).map_err(Error::io("make", root))?;
    let mut unpacker = Unpacker {
        label,
        root: Root::open(root).map_err(Error::os("open", root))?,
        limits,
        out: Unpacked::default(),
        suppressed: 0,
        dir_times: BTreeMap::new(),
        has_whiteouts: false,
        opaque: Vec::new(),
        implicit: BTreeSet::new(),
        buffer: vec![0; 256 << 10],
    };
    while let Some(entry) = tar.next().map_err(|error| error.of(label))? {
        unpacker.entry(&entry, tar)?;
    }
    unpacker.out.complete = tar.saw_end();
    unpacker.finish()
}

struct Unpacker<'a> {
    label: &'a str,
    root: Root,
    limits: Limits,
    out: Unpacked,
    suppressed: usize,
    /// Set at the end: every entry made in a directory changes its time.
    dir_times: BTreeMap<Vec<u8>, (i64, u32)>,
    has_whiteouts: bool,
    opaque: Vec<Vec<u8>>,
    /// Directories made for their members only.
    implicit: BTreeSet<Vec<u8>>,
    buffer: Vec<u8>,
}

impl Unpacker<'_> {
    fn entry(&mut self, entry: &Entry, tar: &mut Tar<impl Read>) -> Result<()> {
        self.out.entries += 1;
        if self.out.entries > self.limits.entries {
            return Err(self.too_large(format!("more than {} entries", self.limits.entries)));
        }
        let path = confined::normalize(&entry.path).map_err(|what| self.refuse(&entry.path, what))?;
        let Some((name, parent)) = path.split_last() else {
            return self.root_entry(entry);
        };
        if let Some(hidden) = name.strip_prefix(WHITEOUT) {
            return self.marker(entry, parent, name, hidden);
        }
        if entry.uid > MAX_ID || entry.gid > MAX_ID {
            let what = format!("its owner is {}:{}; images have ids 0 to {MAX_ID}", entry.uid, entry.gid);
            return Err(self.refuse(&entry.path, what));
        }
        if matches!(entry.kind, Kind::CharDevice | Kind::BlockDevice) {
            self.warn(format!("left out the device node {}", show(&entry.path)));
            return Ok(());
        }
        if let Kind::Unknown(flag) = entry.kind {
            self.warn(format!("left out {} of unknown type {:?}", show(&entry.path), char::from(flag)));
            return Ok(());
        }
        let parent = self.parent(&entry.path, parent)?;
        self.place(entry, &parent, name, tar)
    }

    /// The archive's `.` or `/`.
    fn root_entry(&mut self, entry: &Entry) -> Result<()> {
        if entry.kind != Kind::Dir {
            return Err(self.refuse(&entry.path, "it stands for the root, but is no directory"));
        }
        let root = self.root.dir();
        metadata::apply(&root, b".", entry, &mut self.out.warnings)
            .map_err(|errno| self.os_error(&entry.path, errno))?;
        self.dir_times.insert(Vec::new(), entry.mtime);
        Ok(())
    }

    fn parent(&mut self, of: &[u8], components: &[&[u8]]) -> Result<Dir> {
        let found = self.root.make_dirs(components);
        let made = match found {
            Ok(made) => made,
            Err(Errno::NOTDIR) => return Err(self.refuse(of, "a parent of it is no directory")),
            Err(Errno::LOOP) => return Err(self.refuse(of, "its parents are a loop of links")),
            Err(errno) => return Err(self.os_error(of, errno)),
        };
        self.opaque.extend(made.uncovered);
        self.implicit.extend(made.implicit);
        Ok(made.dir)
    }

    fn place(&mut self, entry: &Entry, parent: &Dir, name: &[u8], tar: &mut Tar<impl Read>) -> Result<()> {
        let failed = |unpacker: &Self| {
            let path = unpacker.label.to_owned();
            let member = show(&entry.path);
            move |errno: Errno| Error::Io {
                step: "unpack",
                path: format!("{path}: {member}").into(),
                source: errno.into(),
            }
        };
        let there = parent.kind(name).map_err(failed(self))?;
        let is_dir = entry.kind == Kind::Dir;
        let source = match entry.kind {
            // Found before anything is removed: it may lie under what the link replaces.
            Kind::HardLink => Some(self.link_source(entry)?),
            _ => None,
        };
        let mut covered = false;
        match there {
            None => {}
            Some(confined::Kind::Dir) if is_dir => {}
            Some(kind) => {
                if let Some(source) = &source {
                    if source.0.same_entry(&source.1, parent, name).map_err(failed(self))? {
                        return Ok(());
                    }
                }
                covered = kind == confined::Kind::Whiteout;
                self.root.forget();
                parent.remove(name)?;
            }
        }
        match entry.kind {
            Kind::Dir => {
                if !matches!(there, Some(confined::Kind::Dir)) {
                    parent.make_dir(name).map_err(failed(self))?;
                }
                let path = parent.child_path(name);
                if covered {
                    self.opaque.push(path.clone());
                }
                self.implicit.remove(&path);
                self.dir_times.insert(path, entry.mtime);
            }
            Kind::File => self.file(entry, parent, name, tar)?,
            Kind::Symlink => {
                if entry.link.is_empty() || entry.link.contains(&0) {
                    return Err(self.refuse(&entry.path, "a link with an empty or malformed target"));
                }
                parent.symlink(&entry.link, name).map_err(failed(self))?;
            }
            Kind::Fifo => parent.make_node(name, FileType::Fifo).map_err(failed(self))?,
            Kind::HardLink => {
                if let Some((from, of)) = source {
                    from.hard_link(&of, parent, name).map_err(failed(self))?;
                }
                return Ok(()); // its attributes are those of the file that is there
            }
            Kind::CharDevice | Kind::BlockDevice | Kind::Unknown(_) => return Ok(()),
        }
        metadata::apply(parent, name, entry, &mut self.out.warnings).map_err(failed(self))?;
        self.bound_warnings();
        Ok(())
    }

    fn file(&mut self, entry: &Entry, parent: &Dir, name: &[u8], tar: &mut Tar<impl Read>) -> Result<()> {
        let file = parent.create(name, OFlags::WRONLY).map_err(|errno| self.os_error(&entry.path, errno))?;
        let left = self.limits.bytes.saturating_sub(self.out.size_bytes);
        match writer::write(tar, entry, &file, left, &mut self.buffer) {
            Ok(written) => self.out.size_bytes += written,
            Err(writer::Failure::Tar(error)) => return Err(error.of(self.label)),
            Err(writer::Failure::Write(errno)) => return Err(self.os_error(&entry.path, errno)),
            Err(writer::Failure::Limit) => {
                let what = format!(
                    "more than {} bytes, which is the limit or nine tenths of the free space",
                    self.limits.bytes
                );
                return Err(self.too_large(what));
            }
        }
        Ok(())
    }

    /// Where a hard link's target lies: its directory and name.
    fn link_source(&mut self, entry: &Entry) -> Result<(Dir, Vec<u8>)> {
        let target = confined::normalize(&entry.link).map_err(|what| self.refuse(&entry.path, what))?;
        let missing = format!("it is a hard link to {}, which is not in this layer", show(&entry.link));
        let Some((name, parent)) = target.split_last() else {
            return Err(self.refuse(&entry.path, "it is a hard link to the root"));
        };
        let dir = match self.root.find_dir(parent) {
            Ok(dir) => dir,
            Err(_) => return Err(self.refuse(&entry.path, missing)),
        };
        match dir.kind(name) {
            Ok(Some(confined::Kind::Dir)) => Err(self.refuse(&entry.path, "it is a hard link to a directory")),
            Ok(Some(confined::Kind::Other)) => Ok((dir, name.to_vec())),
            Ok(_) => Err(self.refuse(&entry.path, missing)),
            Err(errno) => Err(self.os_error(&entry.path, errno)),
        }
    }

    /// `.wh.name` and `.wh..wh..opq`.
    fn marker(&mut self, entry: &Entry, parent: &[&[u8]], name: &[u8], hidden: &[u8]) -> Result<()> {
        if name == OPAQUE {
            if parent.is_empty() {
                self.out.opaque_root = true;
                return Ok(());
            }
        } else if hidden.starts_with(WHITEOUT) {
            return Ok(()); // aufs' own bookkeeping
        } else if matches!(hidden, b"" | b"." | b"..") {
            return Err(self.refuse(&entry.path, "a whiteout of nothing"));
        }
        // A marker means the path as it is written. Where this layer made a link of a parent, what the path meant below
        // is hidden by that link already; applied through it, the marker would hide something else.
        match self.root.make_dirs_unlinked(parent) {
            Ok(Some(Made { dir, uncovered, implicit })) => {
                self.opaque.extend(uncovered);
                self.implicit.extend(implicit);
                if name == OPAQUE {
                    self.opaque.push(dir.path().to_vec());
                    return Ok(());
                }
                let failed =
                    |errno| Error::Io { step: "unpack", path: show(&entry.path).into(), source: Errno::into(errno) };
                match dir.kind(hidden).map_err(failed)? {
                    None => {
                        dir.make_node(hidden, FileType::CharacterDevice).map_err(failed)?;
                        self.has_whiteouts = true;
                    }
                    Some(confined::Kind::Dir) => self.opaque.push(dir.child_path(hidden)),
                    Some(confined::Kind::Whiteout | confined::Kind::Other) => {}
                }
                Ok(())
            }
            Ok(None) => Ok(()),
            Err(errno) => Err(self.os_error(&entry.path, errno)),
        }
    }

    fn finish(mut self) -> Result<Unpacked> {
        let opaque = std::mem::take(&mut self.opaque);
        for path in &opaque {
            // Gone or replaced since, by a later member: nothing is left to be opaque.
            let Ok(dir) = self.root.open_dir(path) else { continue };
            rustix::fs::fsetxattr(&dir, c"trusted.overlay.opaque", b"y", rustix::fs::XattrFlags::empty())
                .map_err(|errno| self.os_error(path, errno))?;
            if self.has_whiteouts {
                // Below an opaque directory they hide nothing, and overlayfs would show them.
                tree::remove_whiteouts(&dir, Path::new(self.label))?;
            }
        }
        for (path, mtime) in &self.dir_times {
            if let Ok(dir) = self.root.open_dir(path) {
                rustix::fs::futimens(&dir, &metadata::timestamps(*mtime))
                    .map_err(|errno| self.os_error(path, errno))?;
            }
        }
        self.out.hides = self.has_whiteouts;
        // A name that is no text has no attributes below worth the trouble: 0755 and root it stays.
        self.out.implicit = self.implicit.into_iter().filter_map(|path| String::from_utf8(path).ok()).collect();
        if self.suppressed > 0 {
            self.out.warnings.push(format!("and {} more like these", self.suppressed));
        }
        Ok(self.out)
    }

    fn warn(&mut self, warning: String) {
        self.out.warnings.push(warning);
        self.bound_warnings();
    }

    fn bound_warnings(&mut self) {
        self.suppressed += self.out.warnings.len().saturating_sub(MAX_WARNINGS);
        self.out.warnings.truncate(MAX_WARNINGS);
    }

    fn refuse(&self, member: &[u8], what: impl std::fmt::Display) -> Error {
        Error::malformed(self.label, "members that a layer can have", format!("{}: {what}", show(member)))
    }

    fn too_large(&self, what: String) -> Error {
        Error::TooLarge { file: self.label.to_owned(), what }
    }

    fn os_error(&self, member: &[u8], errno: Errno) -> Error {
        if errno == Errno::NAMETOOLONG {
            return self.refuse(member, "its name is longer than this file system takes");
        }
        Error::Io { step: "unpack", path: format!("{}: {}", self.label, show(member)).into(), source: errno.into() }
    }
}

/// A member's name for people: what is no text, escaped.
fn show(path: &[u8]) -> String {
    let path = path.strip_prefix(b"./").unwrap_or(path);
    let mut text = path.escape_ascii().to_string();
    if text.len() > 200 {
        text.truncate(200);
        text.push('…');
    }
    text
}
