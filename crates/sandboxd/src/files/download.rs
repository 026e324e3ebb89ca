//! Reading a file, from an offset, in constant memory.

use std::{
    fs::File,
    io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use rustix::{
    fs::{Mode, OFlags, ResolveFlags, CWD},
    io::Errno,
};
use sandmill_wire::ApiError;
use tokio::sync::mpsc;

use super::{
    entry::{Entry, Kind},
    failure::{failed, is_directory, not_regular},
    pool,
};
use crate::{proc::AccountNames, server::ReplyBody};

/// What is read at once. A file that is shorter is answered in one piece.
const CHUNK_BYTES: usize = 512 << 10;
/// Chunks that wait for a slow client, besides the one being read.
const AHEAD: usize = 2;
/// A client that takes nothing for this long is gone.
const STALLED: Duration = Duration::from_secs(300);

/// A file whose first bytes are read.
pub struct Download {
    pub entry: Entry,
    file: Arc<File>,
    path: PathBuf,
    first: Vec<u8>,
    /// Where the bytes after `first` begin.
    next: u64,
    /// Bytes after `first`: None when the file's size doesn't tell (`/proc`).
    left: Option<u64>,
    /// Whether `first` is all.
    whole: bool,
}

impl Download {
    /// Opens `path` and reads its first bytes; at most `length` bytes from `offset` on are wanted.
    ///
    /// Errors: those of [`failed`]; 400 `is_a_directory`; 400 `not_a_regular_file`, at once.
    pub fn open(path: PathBuf, offset: u64, length: Option<u64>, names: Arc<AccountNames>) -> Result<Self, ApiError> {
        let file = open_regular(&path)?;
        let stat = rustix::fs::fstat(&file).map_err(|errno| failed("look up", &path, errno))?;
        let entry = Entry::new(path.clone(), &stat, None, names);
        let wanted = length.unwrap_or(u64::MAX);
        // Asking for one byte more than the file should hold finds its end without another read.
        let expected = entry.size.saturating_sub(offset).saturating_add(1).min(wanted);
        let room = if entry.size == 0 { CHUNK_BYTES as u64 } else { expected.min(CHUNK_BYTES as u64) };
        let mut first = vec![0; room as usize];
        let (count, ended) = fill(&file, &mut first, offset).map_err(|errno| failed("read", &path, errno))?;
        first.truncate(count);
        let next = offset + count as u64;
        let whole = ended || count as u64 >= wanted;
        let left = (entry.size > next).then(|| (entry.size - next).min(wanted - count as u64));
        Ok(Self { entry, file: Arc::new(file), path, first, next, left, whole })
    }

    /// How many bytes the body will have, where that is known.
    pub fn length(&self) -> Option<u64> {
        match (self.whole, self.left) {
            (true, _) => Some(self.first.len() as u64),
            (false, left) => left.map(|left| self.first.len() as u64 + left),
        }
    }

    /// The body. A file that shrinks meanwhile breaks the connection off, so that nobody takes a part for the whole.
    pub fn into_body(mut self) -> ReplyBody {
        if self.whole {
            return ReplyBody::full(self.first);
        }
        let (sender, body) = ReplyBody::channel(AHEAD);
        tokio::task::spawn_local(async move {
            let first = Bytes::from(std::mem::take(&mut self.first));
            if give(&sender, Ok(first)).await {
                self.stream(sender).await;
            }
        });
        body
    }

    async fn stream(mut self, sender: mpsc::Sender<io::Result<Bytes>>) {
        while self.left != Some(0) {
            let room = self.left.map_or(CHUNK_BYTES, |left| left.min(CHUNK_BYTES as u64) as usize);
            let (file, next) = (Arc::clone(&self.file), self.next);
            let read = pool::short(move || {
                let mut chunk = vec![0; room];
                fill(&file, &mut chunk, next).map(|(count, _)| {
                    chunk.truncate(count);
                    chunk
                })
            });
            let chunk = match read.await {
                Ok(Ok(chunk)) => chunk,
                Ok(Err(errno)) => {
                    give(&sender, Err(errno.into())).await;
                    return;
                }
                Err(_) => return,
            };
            if chunk.is_empty() {
                if self.left.is_some() {
                    let shrank = format!("{} shrank while it was read", super::failure::shown(&self.path));
                    give(&sender, Err(io::Error::new(io::ErrorKind::UnexpectedEof, shrank))).await;
                }
                return;
            }
            self.next += chunk.len() as u64;
            self.left = self.left.map(|left| left - chunk.len() as u64);
            if !give(&sender, Ok(chunk.into())).await {
                return;
            }
        }
    }
}

/// Whether the client is still there.
async fn give(sender: &mpsc::Sender<io::Result<Bytes>>, chunk: io::Result<Bytes>) -> bool {
    matches!(tokio::time::timeout(STALLED, sender.send(chunk)).await, Ok(Ok(())))
}

/// Opens what holds plain bytes; never waits for a pipe's other end and never touches a device.
///
/// Errors: those of [`failed`]; 400 `is_a_directory`; 400 `not_a_regular_file`.
pub fn open_regular(path: &Path) -> Result<File, ApiError> {
    let refused = |errno| failed("read", path, errno);
    let open = |flags| {
        let flags = flags | OFlags::CLOEXEC;
        rustix::fs::openat2(CWD, path, flags, Mode::empty(), ResolveFlags::NO_MAGICLINKS)
    };
    // Opening a pipe would wake who waits for it, opening a device can do anything: looked at first, unopened.
    check(path, &open(OFlags::PATH).map_err(refused)?)?;
    let file = match open(OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY) {
        Err(Errno::NXIO) => return Err(not_regular(path, "socket")),
        opened => opened.map_err(refused)?,
    };
    check(path, &file)?;
    Ok(file.into())
}

fn check(path: &Path, file: &rustix::fd::OwnedFd) -> Result<(), ApiError> {
    let stat = rustix::fs::fstat(file).map_err(|errno| failed("read", path, errno))?;
    match Kind::of(&stat) {
        Kind::File => Ok(()),
        Kind::Directory => Err(is_directory(path)),
        kind => Err(not_regular(path, kind.name())),
    }
}

/// Fills `buffer` from `offset` on; says how much there was and whether the file ended.
fn fill(file: &File, buffer: &mut [u8], offset: u64) -> Result<(usize, bool), Errno> {
    let mut count = 0;
    while count < buffer.len() {
        match rustix::io::pread(file, &mut buffer[count..], offset + count as u64) {
            Ok(0) => return Ok((count, true)),
            Ok(more) => count += more,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok((count, false))
}

#[cfg(test)]
mod tests {
    use super::{super::scratch::Scratch, *};

    fn open(path: &Path, offset: u64, length: Option<u64>) -> Result<Download, ApiError> {
        Download::open(path.to_owned(), offset, length, Arc::default())
    }

    #[test]
    fn small_files_come_in_one_piece() {
        let scratch = Scratch::new();
        std::fs::write(scratch.path("f"), "0123456789").unwrap();
        for (offset, length, expected) in
            [(0, None, "0123456789"), (3, Some(4), "3456"), (8, Some(9), "89"), (20, None, ""), (0, Some(0), "")]
        {
            let download = open(&scratch.path("f"), offset, length).unwrap();
            assert_eq!(download.first, expected.as_bytes());
            assert_eq!(download.length(), Some(expected.len() as u64));
        }
    }

    #[test]
    fn a_large_files_length_is_known() {
        let scratch = Scratch::new();
        let size = 3 * CHUNK_BYTES + 7;
        std::fs::write(scratch.path("f"), vec![1; size]).unwrap();
        assert_eq!(open(&scratch.path("f"), 0, None).unwrap().length(), Some(size as u64));
        assert_eq!(open(&scratch.path("f"), 5, None).unwrap().length(), Some(size as u64 - 5));
        let middle = CHUNK_BYTES as u64 + 9;
        assert_eq!(open(&scratch.path("f"), 5, Some(middle)).unwrap().length(), Some(middle));
        let exact = open(&scratch.path("f"), 0, Some(CHUNK_BYTES as u64)).unwrap();
        assert_eq!(exact.length(), Some(CHUNK_BYTES as u64));
    }

    #[test]
    fn files_of_the_kernel_can_be_read() {
        let version = open(Path::new("/proc/version"), 0, None).unwrap();
        assert!(version.first.starts_with(b"Linux"));
        assert_eq!(version.entry.size, 0);
    }

    #[test]
    fn what_holds_no_bytes_is_refused_at_once() {
        let scratch = Scratch::new();
        rustix::fs::mkfifoat(CWD, scratch.path("p"), Mode::RWXU).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(scratch.path("s")).unwrap();
        for (path, code) in [
            (scratch.path("p"), "not_a_regular_file"),
            (scratch.path("s"), "not_a_regular_file"),
            ("/dev/zero".into(), "not_a_regular_file"),
            (scratch.path(""), "is_a_directory"),
            (scratch.path("none"), "not_found"),
            ("/proc/self/exe".into(), "too_many_links"),
        ] {
            assert_eq!(open(&path, 0, None).err().unwrap().code, code, "{path:?}");
        }
    }
}
