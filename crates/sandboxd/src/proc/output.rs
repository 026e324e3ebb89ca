//! What is kept of a stream of output: the end of it, or its beginning and its end.

use std::collections::VecDeque;

/// Which stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stream {
    Stdout,
    Stderr,
    /// A terminal: stdout and stderr are one.
    Pty,
}

impl Stream {
    /// Its letter on the wire.
    pub fn letter(self) -> &'static str {
        match self {
            Self::Stdout => "o",
            Self::Stderr => "e",
            Self::Pty => "p",
        }
    }
}

/// What is kept of each stream, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keep {
    /// The latest bytes, for replay from an offset.
    Latest(usize),
    /// The first and the last half of this limit, for a result.
    Ends(usize),
}

impl Default for Keep {
    fn default() -> Self {
        Self::Latest(1 << 20)
    }
}

/// Where output was cut out, and how much: `[offset, bytes]` on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Cut(pub u64, pub u64);

/// The kept part of one stream.
#[derive(Debug)]
pub struct Kept {
    keep: Keep,
    /// Bytes from the stream's start; only with [`Keep::Ends`].
    head: Vec<u8>,
    /// The latest bytes.
    tail: VecDeque<u8>,
    /// Bytes seen in all.
    total: u64,
}

impl Kept {
    pub fn new(keep: Keep) -> Self {
        Self { keep, head: Vec::new(), tail: VecDeque::new(), total: 0 }
    }

    /// Adds what was read.
    pub fn push(&mut self, mut data: &[u8]) {
        self.total += data.len() as u64;
        let tail_limit = match self.keep {
            Keep::Latest(limit) => limit,
            Keep::Ends(limit) => {
                let room = (limit - limit / 2).saturating_sub(self.head.len()).min(data.len());
                self.head.extend_from_slice(&data[..room]);
                data = &data[room..];
                limit / 2
            }
        };
        data = &data[data.len().saturating_sub(tail_limit)..];
        let excess = (self.tail.len() + data.len()).saturating_sub(tail_limit);
        self.tail.drain(..excess);
        self.tail.extend(data);
    }

    /// Bytes seen in all: the offset after the last one.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Bytes of memory that the kept part takes.
    pub fn size(&self) -> usize {
        self.head.capacity() + self.tail.capacity()
    }

    /// Gives back room that was kept for more output.
    pub fn shrink(&mut self) {
        self.tail.shrink_to_fit();
        self.head.shrink_to_fit();
    }

    /// At most `limit` kept bytes from `offset` on, and the offset at which they begin: later than asked when the asked
    /// ones are gone.
    pub fn read(&self, offset: u64, limit: usize) -> (u64, Vec<u8>) {
        if offset < self.head.len() as u64 {
            let from = offset as usize;
            return (offset, self.head[from..self.head.len().min(from + limit)].to_vec());
        }
        let tail_start = self.total - self.tail.len() as u64;
        let offset = offset.clamp(tail_start, self.total);
        let from = (offset - tail_start) as usize;
        let count = (self.tail.len() - from).min(limit);
        let (first, second) = self.tail.as_slices();
        let mut data = Vec::with_capacity(count);
        if from < first.len() {
            data.extend_from_slice(&first[from..first.len().min(from + count)]);
        }
        let left = count - data.len();
        let skipped = (from + data.len()).saturating_sub(first.len());
        data.extend_from_slice(&second[skipped..skipped + left]);
        (offset, data)
    }

    /// Takes all that is kept, and says what was cut out of it.
    pub fn take(&mut self) -> (Vec<u8>, Option<Cut>) {
        let mut data = std::mem::take(&mut self.head);
        let tail = std::mem::take(&mut self.tail);
        let cut = self.total - (data.len() + tail.len()) as u64;
        let at = data.len() as u64;
        if data.is_empty() {
            data = tail.into();
        } else {
            let (first, second) = tail.as_slices();
            data.reserve_exact(tail.len());
            data.extend_from_slice(first);
            data.extend_from_slice(second);
        }
        (data, (cut > 0).then_some(Cut(at, cut)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_is_kept_below_the_limit() {
        for keep in [Keep::Latest(8), Keep::Ends(8)] {
            let mut kept = Kept::new(keep);
            kept.push(b"abc");
            kept.push(b"defgh");
            assert_eq!(
                kept.read(2, 100),
                (2, if keep == Keep::Latest(8) { b"cdefgh".to_vec() } else { b"cd".to_vec() })
            );
            assert_eq!(kept.take(), (b"abcdefgh".to_vec(), None));
        }
    }

    #[test]
    fn ends_are_kept_and_the_cut_is_said() {
        let mut kept = Kept::new(Keep::Ends(6));
        for byte in b"0123456789" {
            kept.push(&[*byte]);
        }
        assert_eq!(kept.take(), (b"012789".to_vec(), Some(Cut(3, 4))));
    }

    #[test]
    fn odd_and_zero_limits_hold() {
        let mut kept = Kept::new(Keep::Ends(5));
        kept.push(b"0123456789");
        assert_eq!(kept.take(), (b"01289".to_vec(), Some(Cut(3, 5))));
        let mut none = Kept::new(Keep::Ends(0));
        none.push(b"0123");
        assert_eq!(none.take(), (Vec::new(), Some(Cut(0, 4))));
    }

    #[test]
    fn the_latest_bytes_are_read_from_any_offset() {
        let mut kept = Kept::new(Keep::Latest(4));
        for chunk in [&b"abc"[..], b"def", b"g"] {
            kept.push(chunk);
        }
        assert_eq!(kept.total(), 7);
        assert_eq!(kept.read(0, 100), (3, b"defg".to_vec()));
        assert_eq!(kept.read(5, 100), (5, b"fg".to_vec()));
        assert_eq!(kept.read(4, 2), (4, b"ef".to_vec()));
        assert_eq!(kept.read(7, 100), (7, Vec::new()));
        assert_eq!(kept.read(99, 100), (7, Vec::new()));
    }
}
