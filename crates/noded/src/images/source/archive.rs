//! A tar whose members are read in any order.

use std::{
    collections::HashMap,
    fs::File,
    io::{self, Read, Seek, SeekFrom},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use super::{oci, stream::Decompressed};
use crate::images::{
    layers::{Layers, Scratch},
    tar::{Kind, Tar, TarError},
    unpack::Limits,
    Error, Result,
};

/// Archives of images have a handful of members a layer.
const MAX_MEMBERS: usize = 100_000;
/// Links from one member to another, in a row.
const MAX_LINKS: usize = 8;

/// An archive with its table of contents.
#[derive(Debug)]
pub struct Archive {
    path: PathBuf,
    file: File,
    members: HashMap<Vec<u8>, Member>,
    /// Holds the unpacked copy of an archive that came compressed.
    _scratch: Option<Scratch>,
}

#[derive(Debug, Clone)]
enum Member {
    File {
        offset: u64,
        len: u64,
    },
    /// To another member, by its path from the root.
    Link(Vec<u8>),
}

impl Archive {
    /// Reads the table of contents. A compressed archive is unpacked into the store's staging area first.
    pub fn open(path: &Path, layers: &Layers) -> Result<Self> {
        let unreadable = |source| Error::Unreadable { path: path.to_owned(), source };
        let label = path.to_string_lossy();
        let mut file = File::open(path).map_err(unreadable)?;
        let mut decompressed = Decompressed::new(file.try_clone().map_err(unreadable)?, &label)?;
        let mut scratch = None;
        if decompressed.is_compressed() {
            let place = layers.scratch()?;
            let copy = place.path().join("archive.tar");
            let options = || File::options().read(true).write(true).create_new(true).clone();
            let mut out = options().open(&copy).map_err(Error::io("make", &copy))?;
            let limit = Limits::for_path(place.path()).bytes;
            let copied = io::copy(&mut (&mut decompressed).take(limit), &mut out)
                .map_err(|error| TarError::Io(error).of(&label))?;
            if copied == limit {
                let what =
                    format!("unpacked, it is larger than {limit} bytes, the limit or nine tenths of the free space");
                return Err(Error::TooLarge { file: label.into_owned(), what });
            }
            file = out;
            scratch = Some(place);
        }
        file.seek(SeekFrom::Start(0)).map_err(unreadable)?;
        let members = contents(&label, &file)?;
        Ok(Self { path: path.to_owned(), file, members, _scratch: scratch })
    }

    pub fn name(&self) -> String {
        self.path.display().to_string()
    }

    /// The content of a member, which may be a link to another.
    pub fn member(&self, name: &str) -> Result<Box<dyn Read + Send + '_>> {
        let missing = || Error::malformed(self.name(), format!("a member {name:?}"), "none of that name");
        let mut key = resolve(b"", name.as_bytes());
        for _ in 0..MAX_LINKS {
            match self.members.get(&key).ok_or_else(missing)? {
                Member::File { offset, len } => {
                    return Ok(Box::new(Section { file: &self.file, at: *offset, left: *len }));
                }
                Member::Link(target) => key.clone_from(target),
            }
        }
        Err(missing())
    }
}

impl oci::Blobs for Archive {
    fn index(&self) -> Result<Box<dyn Read + Send + '_>> {
        self.member("index.json")
    }

    fn blob(&self, digest: &str) -> Result<Box<dyn Read + Send + '_>> {
        self.member(&oci::blob_path(digest))
    }

    fn label(&self) -> String {
        self.name()
    }
}

fn contents(label: &str, file: &File) -> Result<HashMap<Vec<u8>, Member>> {
    let len = file.metadata().map_err(|source| TarError::Io(source).of(label))?.len();
    let mut tar = Tar::new(Section { file, at: 0, left: len });
    let mut members = HashMap::new();
    while let Some(entry) = tar.next_seeking().map_err(|error| error.of(label))? {
        let key = resolve(b"", &entry.path);
        let parent = key.iter().rposition(|&byte| byte == b'/').map_or(&b""[..], |end| &key[..end]);
        let member = match entry.kind {
            Kind::File => Member::File { offset: tar.position(), len: entry.size },
            Kind::Symlink => Member::Link(resolve(parent, &entry.link)),
            Kind::HardLink => Member::Link(resolve(b"", &entry.link)),
            _ => continue,
        };
        members.insert(key, member);
        if members.len() > MAX_MEMBERS {
            return Err(Error::TooLarge { file: label.to_owned(), what: format!("more than {MAX_MEMBERS} members") });
        }
    }
    Ok(members)
}

/// A path within the archive; one that leads out of it names nothing.
fn resolve(parent: &[u8], path: &[u8]) -> Vec<u8> {
    let mut parts: Vec<&[u8]> = Vec::new();
    for part in parent.split(|&byte| byte == b'/').chain(path.split(|&byte| byte == b'/')) {
        match part {
            b"" | b"." => {}
            b".." => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    parts.join(&b'/')
}

/// Part of a file, read without moving the file's own offset: several can be read at once.
#[derive(Debug)]
pub struct Section<'a> {
    file: &'a File,
    at: u64,
    left: u64,
}

impl Read for Section<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let want = usize::try_from(self.left).unwrap_or(usize::MAX).min(buf.len());
        let got = self.file.read_at(&mut buf[..want], self.at)?;
        self.at += got as u64;
        self.left -= got as u64;
        Ok(got)
    }
}

impl crate::images::tar::Skip for Section<'_> {
    fn skip(&mut self, bytes: u64) -> io::Result<u64> {
        let skipped = bytes.min(self.left);
        self.at += skipped;
        self.left -= skipped;
        Ok(skipped)
    }
}
