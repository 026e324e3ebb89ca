//! Extended attributes of entries, and those with ids in them.

use rustix::{
    fs::XattrFlags,
    io::{Errno, Result},
};

use super::walk::Item;

pub const CAPABILITY: &[u8] = b"security.capability";
const ACL: [&[u8]; 2] = [b"system.posix_acl_access", b"system.posix_acl_default"];
const OVERLAY: &[u8] = b"trusted.overlay.";

/// What overlayfs' own attributes mean for a layer that leaves its mount.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Overlay {
    /// Part of what the layer says: opaque, redirect.
    Keep,
    /// About the mount that it came from.
    Drop,
    /// The file's content is elsewhere.
    Metacopy,
    NotOurs,
}

pub fn overlay(name: &[u8]) -> Overlay {
    match name.strip_prefix(OVERLAY) {
        None => Overlay::NotOurs,
        Some(b"opaque" | b"redirect") => Overlay::Keep,
        Some(b"metacopy") => Overlay::Metacopy,
        Some(_) => Overlay::Drop,
    }
}

/// All attributes of an entry with their values. None where the file system has none.
pub fn read(item: &Item) -> Result<Vec<(Vec<u8>, Vec<u8>)>> {
    let path = item.system_path();
    let mut list = Vec::with_capacity(1024);
    loop {
        list.clear();
        match rustix::fs::llistxattr(&path, rustix::buffer::spare_capacity(&mut list)) {
            Ok(_) => break,
            Err(Errno::RANGE) if list.capacity() < 1 << 20 => list.reserve(list.capacity() * 2),
            Err(Errno::NOTSUP) => return Ok(Vec::new()),
            Err(errno) => return Err(errno),
        }
    }
    let mut found = Vec::new();
    for name in list.split(|&byte| byte == 0).filter(|name| !name.is_empty()) {
        let mut value = Vec::with_capacity(64 << 10);
        match rustix::fs::lgetxattr(&path, name, rustix::buffer::spare_capacity(&mut value)) {
            Ok(_) => found.push((name.to_vec(), value)),
            Err(Errno::NODATA | Errno::NOTSUP) => {}
            Err(errno) => return Err(errno),
        }
    }
    found.sort();
    Ok(found)
}

pub fn write(item: &Item, name: &[u8], value: &[u8]) -> Result<()> {
    rustix::fs::lsetxattr(item.system_path(), name, value, XattrFlags::empty())
}

pub fn remove(item: &Item, name: &[u8]) -> Result<()> {
    rustix::fs::lremovexattr(item.system_path(), name)
}

/// The value with every id in it moved down by `base`; `None` if it holds none in that range.
pub fn shifted(name: &[u8], value: &[u8], base: u32) -> Option<Vec<u8>> {
    if name == CAPABILITY {
        return shifted_capability(value, base);
    }
    if ACL.contains(&name) {
        return shifted_acl(value, base);
    }
    None
}

/// Version 3 carries the root id of a user namespace; of ours, it becomes version 2, which any root may have set.
fn shifted_capability(value: &[u8], base: u32) -> Option<Vec<u8>> {
    const VERSION_MASK: u32 = 0xff00_0000;
    const VERSION_2: u32 = 0x0200_0000;
    const VERSION_3: u32 = 0x0300_0000;
    let word = |at: usize| Some(u32::from_le_bytes(value.get(at..at + 4)?.try_into().ok()?));
    let magic = word(0)?;
    if magic & VERSION_MASK != VERSION_3 || word(20)? != base {
        return None;
    }
    let mut out = value[..20].to_vec();
    out[..4].copy_from_slice(&(magic & !VERSION_MASK | VERSION_2).to_le_bytes());
    Some(out)
}

/// `struct posix_acl_xattr_header` and its entries of eight bytes: tag, permissions, id.
fn shifted_acl(value: &[u8], base: u32) -> Option<Vec<u8>> {
    const USER: u16 = 2;
    const GROUP: u16 = 8;
    let mut out = value.to_vec();
    let mut changed = false;
    for entry in out.get_mut(4..)?.chunks_exact_mut(8) {
        let tag = u16::from_le_bytes([entry[0], entry[1]]);
        let id = u32::from_le_bytes([entry[4], entry[5], entry[6], entry[7]]);
        if matches!(tag, USER | GROUP) && (base..=base.saturating_add(65535)).contains(&id) {
            entry[4..].copy_from_slice(&(id - base).to_le_bytes());
            changed = true;
        }
    }
    changed.then_some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capabilities_of_our_namespace_become_plain_ones() {
        let base = 0x4000_0000_u32;
        let mut value = [1, 0, 0, 3, 9, 9, 9, 9, 0, 0, 0, 0, 8, 8, 8, 8, 0, 0, 0, 0].to_vec();
        value.extend(base.to_le_bytes());
        let plain = shifted(CAPABILITY, &value, base).unwrap();
        assert_eq!(plain, [1, 0, 0, 2, 9, 9, 9, 9, 0, 0, 0, 0, 8, 8, 8, 8, 0, 0, 0, 0]);
        assert_eq!(shifted(CAPABILITY, &plain, base), None);
        assert_eq!(shifted(CAPABILITY, &value, base + 65536), None);
        assert_eq!(shifted(CAPABILITY, b"", base), None);
    }

    #[test]
    fn acl_ids_are_shifted() {
        let entry = |tag: u16, id: u32| [&tag.to_le_bytes()[..], &7_u16.to_le_bytes(), &id.to_le_bytes()].concat();
        let base = 1 << 20;
        let before = [vec![2, 0, 0, 0], entry(1, u32::MAX), entry(2, base + 1000), entry(8, 5)].concat();
        let after = [vec![2, 0, 0, 0], entry(1, u32::MAX), entry(2, 1000), entry(8, 5)].concat();
        assert_eq!(shifted(ACL[0], &before, base), Some(after));
    }
}
