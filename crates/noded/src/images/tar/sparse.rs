//! Sparse files: GNU's own headers, and the three ways in which PAX headers tell the same.

use std::io::Read;

use super::{header, pax::Records, Entry, Tar, TarError, BLOCK};

/// More pieces than this are not a sparse file but an attack on memory.
const MAX_SEGMENTS: usize = 200_000;

/// A piece of data in a sparse file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    pub offset: u64,
    pub len: u64,
}

impl<R: Read> Tar<R> {
    /// Type `S`: four segments in the header, more in the blocks that follow it.
    pub(super) fn gnu_sparse(&mut self, block: &[u8; BLOCK], size: &mut u64) -> Result<Vec<Segment>, TarError> {
        let mut segments = Vec::new();
        let stored = *size;
        let field = |tar: &Self, bytes: &[u8]| {
            header::number(bytes)
                .and_then(|value| u64::try_from(value).ok())
                .ok_or_else(|| tar.bad("a sparse map is malformed"))
        };
        let mut read_map = |tar: &Self, map: &[u8]| -> Result<(), TarError> {
            for pair in map.chunks_exact(24).filter(|pair| pair[0] != 0) {
                segments.push(Segment { offset: field(tar, &pair[..12])?, len: field(tar, &pair[12..])? });
                if segments.len() > MAX_SEGMENTS {
                    return Err(tar.bad("a sparse file has too many pieces"));
                }
            }
            Ok(())
        };
        read_map(self, &block[386..482])?;
        let mut more = block[482] != 0;
        while more {
            let extension = self.block()?.ok_or_else(|| self.bad("the archive is cut off within a sparse map"))?;
            read_map(self, &extension[..504])?;
            more = extension[504] != 0;
        }
        *size = field(self, &block[483..495])?;
        self.begin_data(stored);
        self.checked(segments, stored, *size)
    }

    /// PAX formats 0.0, 0.1 and 1.0 (which keeps the map at the beginning of the data).
    pub(super) fn pax_sparse(
        &mut self,
        records: &mut Records,
        entry: &mut Entry,
    ) -> Result<Option<Vec<Segment>>, TarError> {
        let Some(real) = records.take_number("GNU.sparse.realsize").or_else(|| records.take_number("GNU.sparse.size"))
        else {
            return Ok(None);
        };
        if let Some(name) = records.take("GNU.sparse.name") {
            entry.path = name;
        }
        let stored = entry.size;
        let mut numbers = Vec::new();
        if records.take("GNU.sparse.major").as_deref() == Some(b"1") {
            let pairs = self.map_line()?;
            if pairs > MAX_SEGMENTS as u64 {
                return Err(self.bad("a sparse file has too many pieces"));
            }
            for _ in 0..pairs * 2 {
                numbers.push(self.map_line()?);
            }
            // The map is padded to a block.
            let map_end = (stored - self.data_left).next_multiple_of(BLOCK as u64);
            let mut byte = [0];
            while stored - self.data_left < map_end && self.read_data(&mut byte)? > 0 {}
        } else {
            let map = records.take("GNU.sparse.map");
            let texts: Vec<&[u8]> = match &map {
                Some(map) => map.split(|&byte| byte == b',').collect(),
                None => records.sparse_pairs.iter().map(Vec::as_slice).collect(),
            };
            for text in texts {
                let number = std::str::from_utf8(text).ok().and_then(|text| text.parse().ok());
                numbers.push(number.ok_or_else(|| self.bad("a sparse map is malformed"))?);
            }
        }
        entry.size = real;
        let segments = numbers.chunks_exact(2).map(|pair| Segment { offset: pair[0], len: pair[1] }).collect();
        self.checked(segments, self.data_left, real).map(Some)
    }

    /// A decimal number and its newline, from the data.
    fn map_line(&mut self) -> Result<u64, TarError> {
        let mut number = 0_u64;
        for _ in 0..21 {
            let mut byte = [0];
            self.read_data(&mut byte)?;
            match byte[0] {
                b'\n' => return Ok(number),
                digit @ b'0'..=b'9' => {
                    let next = number.checked_mul(10).and_then(|value| value.checked_add(u64::from(digit - b'0')));
                    number = next.ok_or_else(|| self.bad("a sparse map is malformed"))?;
                }
                _ => break,
            }
        }
        Err(self.bad("a sparse map is malformed"))
    }

    fn checked(&self, segments: Vec<Segment>, stored: u64, real: u64) -> Result<Vec<Segment>, TarError> {
        let (mut end, mut total) = (0_u64, 0_u64);
        for segment in &segments {
            let next = segment.offset.checked_add(segment.len).filter(|&next| segment.offset >= end && next <= real);
            end = next.ok_or_else(|| self.bad("the pieces of a sparse file overlap or lie outside of it"))?;
            total += segment.len;
        }
        if total != stored {
            return Err(self.bad("a sparse file's map and data disagree"));
        }
        Ok(segments)
    }
}
