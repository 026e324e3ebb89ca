//! Byte streams of blobs: digested on the way, decompressed by what they begin with, read whole within a bound.

use std::io::{self, BufRead, BufReader, Read};

use sha2::{Digest, Sha256};

use crate::images::{
    layers::{hex, DIGEST_PREFIX},
    Error, Result,
};

/// Digests what is read through it.
pub struct Hashing<R> {
    inner: R,
    hash: Sha256,
}

impl<R: Read> Hashing<R> {
    pub fn new(inner: R) -> Self {
        Self { inner, hash: Sha256::new() }
    }

    /// The digest so far, and what is below.
    pub fn finish(self) -> (String, R) {
        (format!("{DIGEST_PREFIX}{}", hex(&self.hash.finalize())), self.inner)
    }
}

impl<R: Read> Read for Hashing<R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let got = self.inner.read(buf)?;
        self.hash.update(&buf[..got]);
        Ok(got)
    }
}

/// Plain, gzip or zstd, told by the first bytes.
pub enum Decompressed<R: Read> {
    Plain(BufReader<R>),
    Gzip(Box<flate2::bufread::MultiGzDecoder<BufReader<R>>>),
    Zstd(Box<zstd::stream::read::Decoder<'static, BufReader<R>>>),
}

impl<R: Read> Decompressed<R> {
    /// `label` names the stream in errors.
    pub fn new(inner: R, label: &str) -> Result<Self> {
        /// A window of 128 MiB, as `zstd --long` makes; more is refused.
        const MAX_WINDOW_LOG: u32 = 27;
        let mut inner = BufReader::with_capacity(256 << 10, inner);
        let unreadable = |source| Error::Unreadable { path: label.into(), source };
        let start = inner.fill_buf().map_err(unreadable)?;
        let unsupported = |what: &str| Err(Error::malformed(label, "a plain, gzip or zstd stream", what));
        match start {
            [0x1f, 0x8b, ..] => Ok(Self::Gzip(Box::new(flate2::bufread::MultiGzDecoder::new(inner)))),
            [0x28, 0xb5, 0x2f, 0xfd, ..] | [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => {
                let mut decoder = zstd::stream::read::Decoder::with_buffer(inner).map_err(unreadable)?;
                decoder.window_log_max(MAX_WINDOW_LOG).map_err(unreadable)?;
                Ok(Self::Zstd(Box::new(decoder)))
            }
            [0xfd, b'7', b'z', b'X', b'Z', ..] => unsupported("xz (unpack it with `xz -d` first)"),
            [b'B', b'Z', b'h', ..] => unsupported("bzip2 (unpack it with `bzip2 -d` first)"),
            _ => Ok(Self::Plain(inner)),
        }
    }

    pub fn is_compressed(&self) -> bool {
        !matches!(self, Self::Plain(_))
    }

    /// The stream below, with what was read ahead of it lost.
    pub fn into_inner(self) -> R {
        match self {
            Self::Plain(inner) => inner.into_inner(),
            Self::Gzip(decoder) => decoder.into_inner().into_inner(),
            Self::Zstd(decoder) => decoder.finish().into_inner(),
        }
    }
}

impl<R: Read> Read for Decompressed<R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Plain(inner) => inner.read(buf),
            Self::Gzip(decoder) => decoder.read(buf),
            Self::Zstd(decoder) => decoder.read(buf),
        }
    }
}

/// Reads to the end and throws it away, at most `limit` bytes. Answers whether that was the end.
pub fn drain(reader: &mut impl Read, limit: u64) -> io::Result<bool> {
    let copied = io::copy(&mut reader.take(limit.saturating_add(1)), &mut io::sink())?;
    Ok(copied <= limit)
}

/// A small document, whole.
pub fn read_small(reader: impl Read, limit: u64, label: &str) -> Result<Vec<u8>> {
    let mut text = Vec::new();
    reader.take(limit + 1).read_to_end(&mut text).map_err(|source| Error::Unreadable { path: label.into(), source })?;
    if text.len() as u64 > limit {
        return Err(Error::malformed(label, format!("at most {limit} bytes"), "more"));
    }
    Ok(text)
}
