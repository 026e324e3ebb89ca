//! Content of one file from an archive to disk, holes left as holes.

use std::{io::Read, os::fd::OwnedFd};

use rustix::io::Errno;

use crate::images::tar::{Entry, Segment, Tar, TarError};

pub enum Failure {
    Tar(TarError),
    Write(Errno),
    /// More data than allowed.
    Limit,
}

impl From<Errno> for Failure {
    fn from(errno: Errno) -> Self {
        Self::Write(errno)
    }
}

/// Answers how many bytes of data were written, at most `limit`.
pub fn write(
    tar: &mut Tar<impl Read>,
    entry: &Entry,
    file: &OwnedFd,
    limit: u64,
    buffer: &mut [u8],
) -> Result<u64, Failure> {
    let whole = [Segment { offset: 0, len: entry.size }];
    let segments = entry.segments.as_deref().unwrap_or(&whole);
    let mut written = 0_u64;
    for segment in segments {
        let (mut at, mut left) = (segment.offset, segment.len);
        while left > 0 {
            let want = usize::try_from(left).unwrap_or(usize::MAX).min(buffer.len());
            let got = tar.read_data(&mut buffer[..want]).map_err(Failure::Tar)?;
            if got == 0 {
                break; // the map was checked against the data, so this is the end of both
            }
            written += got as u64;
            if written > limit {
                return Err(Failure::Limit);
            }
            let mut rest = &buffer[..got];
            while !rest.is_empty() {
                let done = match rustix::io::pwrite(file, rest, at) {
                    Err(Errno::INTR) => continue,
                    done => done?,
                };
                at += done as u64;
                rest = &rest[done..];
            }
            left -= got as u64;
        }
    }
    if entry.segments.is_some() {
        rustix::fs::ftruncate(file, entry.size)?;
    }
    Ok(written)
}
