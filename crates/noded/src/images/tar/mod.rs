//! Reading tar archives: ustar, GNU (long names, sparse files) and PAX, from any byte stream.
//!
//! A reader of our own because layers come from strangers: every length is bounded before memory is spent on it, PAX
//! records are cut by their length field (a binary extended attribute may hold a newline), and an error says where.

mod header;
mod pax;
mod sparse;

use std::io::{self, Read};

use super::Error;
pub use header::Kind;
pub use sparse::Segment;

const BLOCK: usize = 512;
/// The longest name or link target of a GNU long-name entry; the kernel takes 4096.
const MAX_NAME: u64 = 64 << 10;
/// The largest PAX header; extended attributes take up to 64 KiB each.
const MAX_PAX: u64 = 4 << 20;

/// What is wrong with an archive, or with the stream below it.
#[derive(Debug)]
pub enum TarError {
    Io(io::Error),
    /// `at` is the offset in the archive.
    Bad {
        at: u64,
        what: String,
    },
}

impl TarError {
    /// As an error of the store about the file `label`.
    pub fn of(self, label: &str) -> Error {
        match self {
            // Not the system's: a decompressor says that its data is damaged or cut off.
            Self::Io(source) if source.raw_os_error().is_none() => {
                Error::malformed(label, "whole and intact compressed data", source.to_string())
            }
            Self::Io(source) => Error::Unreadable { path: label.into(), source },
            Self::Bad { at, what } => Error::malformed(label, "a tar archive", format!("{what} (at byte {at})")),
        }
    }
}

impl From<io::Error> for TarError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// One member of an archive, its headers merged. Its data is read from the [`Tar`] before the next call of `next`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    pub path: Vec<u8>,
    pub kind: Kind,
    /// Permission bits with set-uid, set-gid and sticky.
    pub mode: u32,
    pub uid: u64,
    pub gid: u64,
    /// Seconds and nanoseconds.
    pub mtime: (i64, u32),
    /// Size of the file when unpacked.
    pub size: u64,
    /// Target of a symbolic or hard link.
    pub link: Vec<u8>,
    pub xattrs: Vec<(Vec<u8>, Vec<u8>)>,
    /// Of a sparse file: where its data goes, in ascending order; the data follows in that order.
    pub segments: Option<Vec<Segment>>,
}

/// A stream that can leave out bytes without reading them.
pub trait Skip: Read {
    /// Answers how many bytes were left out, fewer only at the end.
    fn skip(&mut self, bytes: u64) -> io::Result<u64>;
}

/// A tar archive.
#[derive(Debug)]
pub struct Tar<R> {
    inner: R,
    at: u64,
    /// Bytes of the current member's data not read yet.
    data_left: u64,
    padding: u64,
    global: pax::Records,
    saw_end: bool,
}

impl<R: Skip> Tar<R> {
    /// As [`Tar::next`], passing over the current member's data unread.
    pub fn next_seeking(&mut self) -> Result<Option<Entry>, TarError> {
        let skipped = self.inner.skip(self.data_left)?;
        self.data_left -= skipped;
        self.at += skipped;
        if self.data_left > 0 {
            return Err(self.bad("the archive is cut off within a file"));
        }
        self.next()
    }
}

impl<R: Read> Tar<R> {
    pub fn new(inner: R) -> Self {
        Self { inner, at: 0, data_left: 0, padding: 0, global: pax::Records::default(), saw_end: false }
    }

    /// Whether the archive ended with its end marker; without, it may have been cut off between two members.
    pub fn saw_end(&self) -> bool {
        self.saw_end
    }

    /// Offset in the archive of what is read next.
    pub fn position(&self) -> u64 {
        self.at
    }

    /// The stream below, for what follows the archive.
    pub fn into_inner(self) -> R {
        self.inner
    }

    /// The next member; `None` at the end. Skips what is left of the current member's data.
    pub fn next(&mut self) -> Result<Option<Entry>, TarError> {
        self.skip_data()?;
        let mut local = pax::Records::default();
        let (mut long_name, mut long_link) = (None, None);
        loop {
            let Some(block) = self.header_block()? else {
                if long_name.is_some() || long_link.is_some() || !local.is_empty() {
                    return Err(self.bad("the archive ends after an extended header"));
                }
                return Ok(None);
            };
            let header = header::Header::parse(&block).map_err(|what| self.bad(what))?;
            match header.flag {
                b'L' => long_name = Some(self.long_string(header.size)?),
                b'K' => long_link = Some(self.long_string(header.size)?),
                b'x' => local = self.pax(header.size)?,
                b'g' => {
                    let records = self.pax(header.size)?;
                    self.global.merge(records);
                }
                b'V' => {
                    self.begin_data(header.size);
                    self.skip_data()?;
                }
                _ => {
                    let mut records = self.global.clone();
                    records.merge(local);
                    return self.member(header, records, long_name, long_link).map(Some);
                }
            }
        }
    }

    fn member(
        &mut self,
        header: header::Header,
        mut records: pax::Records,
        long_name: Option<Vec<u8>>,
        long_link: Option<Vec<u8>>,
    ) -> Result<Entry, TarError> {
        let number = |tar: &Self, value: &[u8], what: &str| {
            let text = std::str::from_utf8(value).ok();
            text.and_then(|text| text.parse::<u64>().ok())
                .ok_or_else(|| tar.bad(format!("PAX {what} {:?} is no number", String::from_utf8_lossy(value))))
        };
        let mut entry = Entry {
            path: records.take("path").or(long_name).unwrap_or(header.path),
            kind: header.kind,
            mode: header.mode,
            uid: match records.take("uid") {
                Some(value) => number(self, &value, "uid")?,
                None => header.uid,
            },
            gid: match records.take("gid") {
                Some(value) => number(self, &value, "gid")?,
                None => header.gid,
            },
            mtime: match records.take("mtime") {
                Some(value) => pax::time(&value).ok_or_else(|| self.bad("PAX mtime is no time"))?,
                None => (header.mtime, 0),
            },
            size: match records.take("size") {
                Some(value) => number(self, &value, "size")?,
                None => header.size,
            },
            link: records.take("linkpath").or(long_link).unwrap_or(header.link),
            xattrs: records.take_xattrs(),
            segments: None,
        };
        // Other kinds have no data, whatever their size field says (it tells the size of a hard link's target).
        let has_data = matches!(entry.kind, Kind::File | Kind::Unknown(_));
        if !has_data {
            entry.size = 0;
        }
        // A directory written by an old tar: a file whose name ends in a slash.
        if header.flag == 0 && entry.path.ends_with(b"/") {
            entry.kind = Kind::Dir;
        }
        self.begin_data(entry.size);
        if header.flag == b'S' {
            entry.segments = Some(self.gnu_sparse(&header.block, &mut entry.size)?);
        } else if entry.kind == Kind::File {
            entry.segments = self.pax_sparse(&mut records, &mut entry)?;
        }
        Ok(entry)
    }

    /// Reads the current member's data; 0 at its end.
    pub fn read_data(&mut self, buf: &mut [u8]) -> Result<usize, TarError> {
        let want = usize::try_from(self.data_left).unwrap_or(usize::MAX).min(buf.len());
        if want == 0 {
            return Ok(0);
        }
        let got = self.inner.read(&mut buf[..want])?;
        if got == 0 {
            return Err(self.bad("the archive is cut off within a file"));
        }
        self.at += got as u64;
        self.data_left -= got as u64;
        Ok(got)
    }

    fn begin_data(&mut self, size: u64) {
        self.data_left = size;
        self.padding = (BLOCK as u64 - size % BLOCK as u64) % BLOCK as u64;
    }

    fn skip_data(&mut self) -> Result<(), TarError> {
        let mut buf = [0; 16 << 10];
        while self.read_data(&mut buf)? > 0 {}
        let padding = std::mem::take(&mut self.padding);
        self.data_left = padding;
        while self.read_data(&mut buf)? > 0 {}
        Ok(())
    }

    /// All data of the current member, known to be at most `limit` bytes.
    fn all_data(&mut self, size: u64, limit: u64, what: &str) -> Result<Vec<u8>, TarError> {
        if size > limit {
            return Err(self.bad(format!("{what} of {size} bytes (the limit is {limit})")));
        }
        self.begin_data(size);
        let mut data = vec![0; usize::try_from(size).unwrap_or_default()];
        let mut filled = 0;
        while filled < data.len() {
            filled += self.read_data(&mut data[filled..])?;
        }
        self.skip_data()?;
        Ok(data)
    }

    fn long_string(&mut self, size: u64) -> Result<Vec<u8>, TarError> {
        let mut name = self.all_data(size, MAX_NAME, "a long name")?;
        if let Some(end) = name.iter().position(|&byte| byte == 0) {
            name.truncate(end);
        }
        Ok(name)
    }

    fn pax(&mut self, size: u64) -> Result<pax::Records, TarError> {
        let data = self.all_data(size, MAX_PAX, "a PAX header")?;
        pax::Records::parse(&data).map_err(|what| self.bad(what))
    }

    /// The next block that is not an end marker.
    fn header_block(&mut self) -> Result<Option<[u8; BLOCK]>, TarError> {
        let Some(block) = self.block()? else { return Ok(None) };
        if block.iter().any(|&byte| byte != 0) {
            return Ok(Some(block));
        }
        self.saw_end = true;
        // The marker is two blocks; one alone is accepted, as every tar does.
        match self.block()? {
            Some(second) if second.iter().any(|&byte| byte != 0) => Err(self.bad("data after the end marker")),
            _ => Ok(None),
        }
    }

    fn block(&mut self) -> Result<Option<[u8; BLOCK]>, TarError> {
        let mut block = [0; BLOCK];
        let mut filled = 0;
        while filled < BLOCK {
            match self.inner.read(&mut block[filled..])? {
                0 if filled == 0 => return Ok(None),
                0 => return Err(self.bad("the archive is cut off within a header")),
                got => filled += got,
            }
        }
        self.at += BLOCK as u64;
        Ok(Some(block))
    }

    fn bad(&self, what: impl Into<String>) -> TarError {
        TarError::Bad { at: self.at, what: what.into() }
    }
}

#[cfg(test)]
mod tests;
