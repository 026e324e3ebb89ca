//! PAX extended headers: `length SP key=value LF` records.

use std::collections::BTreeMap;

const XATTR: &[u8] = b"SCHILY.xattr.";

/// The records of one or several headers; later ones override.
#[derive(Debug, Clone, Default)]
pub struct Records {
    records: BTreeMap<Vec<u8>, Vec<u8>>,
    /// Sparse map of format 0.0, which repeats its two keys.
    pub sparse_pairs: Vec<Vec<u8>>,
}

impl Records {
    pub fn parse(mut data: &[u8]) -> Result<Self, String> {
        let mut out = Self::default();
        while !data.is_empty() && data[0] != 0 {
            let bad = || "a PAX record is malformed".to_owned();
            let space = data.iter().take(20).position(|&byte| byte == b' ').ok_or_else(bad)?;
            let length: usize =
                std::str::from_utf8(&data[..space]).ok().and_then(|text| text.parse().ok()).ok_or_else(bad)?;
            if length < space + 3 || length > data.len() || data[length - 1] != b'\n' {
                return Err(bad());
            }
            let record = &data[space + 1..length - 1];
            let equals = record.iter().position(|&byte| byte == b'=').ok_or_else(bad)?;
            let (key, value) = (&record[..equals], &record[equals + 1..]);
            if matches!(key, b"GNU.sparse.offset" | b"GNU.sparse.numbytes") {
                out.sparse_pairs.push(value.to_vec());
            } else {
                out.records.insert(key.to_vec(), value.to_vec());
            }
            data = &data[length..];
        }
        Ok(out)
    }

    pub fn is_empty(&self) -> bool {
        self.records.is_empty() && self.sparse_pairs.is_empty()
    }

    pub fn merge(&mut self, over: Self) {
        self.records.extend(over.records);
        if !over.sparse_pairs.is_empty() {
            self.sparse_pairs = over.sparse_pairs;
        }
    }

    /// A record's value; an empty one means that there is none.
    pub fn take(&mut self, key: &str) -> Option<Vec<u8>> {
        self.records.remove(key.as_bytes()).filter(|value| !value.is_empty())
    }

    pub fn take_number(&mut self, key: &str) -> Option<u64> {
        std::str::from_utf8(&self.take(key)?).ok()?.parse().ok()
    }

    pub fn take_xattrs(&mut self) -> Vec<(Vec<u8>, Vec<u8>)> {
        let records = self.records.iter();
        records.filter_map(|(key, value)| Some((key.strip_prefix(XATTR)?.to_vec(), value.clone()))).collect()
    }
}

/// `seconds[.fraction]`, maybe negative.
pub fn time(value: &[u8]) -> Option<(i64, u32)> {
    let text = std::str::from_utf8(value).ok()?;
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let seconds: i64 = whole.parse().ok()?;
    if !fraction.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let nanos: u32 = format!("{fraction:0<9}")[..9].parse().ok()?;
    if whole.starts_with('-') && nanos > 0 {
        return Some((seconds.checked_sub(1)?, 1_000_000_000 - nanos));
    }
    Some((seconds, nanos))
}
