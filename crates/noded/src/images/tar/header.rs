//! One 512-byte header block.

use super::BLOCK;

/// What a member is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    File,
    HardLink,
    Symlink,
    CharDevice,
    BlockDevice,
    Dir,
    Fifo,
    /// A type of somebody's own.
    Unknown(u8),
}

/// The fields of one block, before extended headers override them.
#[derive(Debug)]
pub struct Header {
    pub flag: u8,
    pub kind: Kind,
    pub path: Vec<u8>,
    pub link: Vec<u8>,
    pub mode: u32,
    pub uid: u64,
    pub gid: u64,
    pub size: u64,
    pub mtime: i64,
    /// For what only some types have in it.
    pub block: [u8; BLOCK],
}

impl Header {
    pub fn parse(block: &[u8; BLOCK]) -> Result<Self, String> {
        if !checksum_fits(block) {
            return Err("this is no tar header: its checksum is wrong".to_owned());
        }
        let flag = block[156];
        let kind = match flag {
            0 | b'0' | b'7' | b'S' => Kind::File,
            b'1' => Kind::HardLink,
            b'2' => Kind::Symlink,
            b'3' => Kind::CharDevice,
            b'4' => Kind::BlockDevice,
            b'5' | b'D' => Kind::Dir,
            b'6' => Kind::Fifo,
            b'M' => return Err("archives of several volumes are not supported".to_owned()),
            other => Kind::Unknown(other),
        };
        let mut path = string(&block[..100]);
        // Only POSIX' ustar has a prefix; GNU keeps other things there.
        if &block[257..263] == b"ustar\0" {
            let prefix = string(&block[345..500]);
            if !prefix.is_empty() {
                path = [&prefix[..], b"/", &path].concat();
            }
        }
        let unsigned = |range: std::ops::Range<usize>, what: &str| {
            number(&block[range]).and_then(|value| u64::try_from(value).ok()).ok_or(format!("bad {what} in a header"))
        };
        Ok(Self {
            flag,
            kind,
            path,
            link: string(&block[157..257]),
            mode: u32::try_from(unsigned(100..108, "mode")? & 0o7777).unwrap_or_default(),
            uid: unsigned(108..116, "uid")?,
            gid: unsigned(116..124, "gid")?,
            size: unsigned(124..136, "size")?,
            mtime: number(&block[136..148]).ok_or("bad mtime in a header")?,
            block: *block,
        })
    }
}

fn checksum_fits(block: &[u8; BLOCK]) -> bool {
    let Some(expected) = number(&block[148..156]) else { return false };
    let byte = |(index, &byte): (usize, &u8)| if (148..156).contains(&index) { b' ' } else { byte };
    let unsigned: i64 = block.iter().enumerate().map(byte).map(i64::from).sum();
    // Some old writers summed signed bytes.
    let signed: i64 = block.iter().enumerate().map(byte).map(|byte| i64::from(byte.cast_signed())).sum();
    expected == unsigned || expected == signed
}

/// Up to the first NUL.
fn string(field: &[u8]) -> Vec<u8> {
    field.split(|&byte| byte == 0).next().unwrap_or_default().to_vec()
}

/// An octal number, or a binary one where the first bit is set. An empty field is 0.
pub fn number(field: &[u8]) -> Option<i64> {
    let (&first, rest) = field.split_first()?;
    if first & 0x80 != 0 {
        // Two's complement; 0x40 is its sign.
        let start = if first & 0x40 == 0 { i128::from(first & 0x3f) } else { i128::from(first & 0x3f) - 0x40 };
        let value =
            rest.iter().try_fold(start, |value, &byte| value.checked_mul(256)?.checked_add(i128::from(byte)))?;
        return i64::try_from(value).ok();
    }
    let text = field.split(|&byte| byte == 0).next()?;
    let text = std::str::from_utf8(text).ok()?.trim_matches(' ');
    if text.is_empty() {
        return Some(0);
    }
    if !text.bytes().all(|byte| (b'0'..=b'7').contains(&byte)) {
        return None;
    }
    i64::from_str_radix(text, 8).ok()
}
