//! The digest of a tree: everything that a sandbox could tell apart, in a fixed order.
//!
//! It covers names, types, modes, owners, times (but for the root's), link targets, which names are one file, extended
//! attributes, and the content of files piece by piece (holes are not read).

use std::{collections::HashMap, os::fd::OwnedFd, path::Path};

use rustix::{
    fs::{FileType, Mode, OFlags, SeekFrom},
    io::Errno,
};
use sha2::{Digest, Sha256};

use super::{
    walk::{walk, Flow, Item},
    xattrs,
};
use crate::images::{
    layers::{self, LayerMeta},
    Result,
};

/// Digest, size and number of entries of the tree at `root`.
pub fn digest(root: &OwnedFd, label: &Path) -> Result<LayerMeta> {
    let mut hash = Sha256::new();
    // No tar begins like this, so a tree never has the digest of an archive.
    hash.update(b"sandmill tree 1\n");
    let (mut entries, mut size_bytes) = (0_u64, 0_u64);
    let mut names: HashMap<(u64, u64), Vec<u8>> = HashMap::new();
    let mut buffer = vec![0; 256 << 10];
    walk(root, label, &mut |item: &Item| {
        entries += 1;
        field(&mut hash, item.path);
        let stat = &item.stat;
        if item.kind() != FileType::Directory && stat.st_nlink > 1 {
            if let Some(first) = names.get(&(stat.st_dev, stat.st_ino)) {
                hash.update(b"=");
                field(&mut hash, first);
                return Ok(Flow::Descend);
            }
            names.insert((stat.st_dev, stat.st_ino), item.path.to_vec());
        }
        for number in [stat.st_mode, stat.st_uid, stat.st_gid] {
            hash.update(number.to_le_bytes());
        }
        if !item.path.is_empty() {
            hash.update(stat.st_mtime.to_le_bytes());
            hash.update(stat.st_mtime_nsec.to_le_bytes());
        }
        for (name, value) in xattrs::read(item).map_err(|errno| item.failed("read the attributes of", errno))? {
            field(&mut hash, &name);
            field(&mut hash, &value);
        }
        match item.kind() {
            FileType::RegularFile => {
                let size = content(&mut hash, item, &mut buffer).map_err(|errno| item.failed("read", errno))?;
                size_bytes += size;
            }
            FileType::Symlink => {
                let target = rustix::fs::readlinkat(item.dir, item.name, Vec::new())
                    .map_err(|errno| item.failed("read the link", errno))?;
                field(&mut hash, target.as_bytes());
            }
            _ => hash.update(stat.st_rdev.to_le_bytes()),
        }
        Ok(Flow::Descend)
    })?;
    let digest = format!("{}{}", layers::DIGEST_PREFIX, layers::hex(&hash.finalize()));
    Ok(LayerMeta { digest, size_bytes, entries, ..LayerMeta::default() })
}

/// Feeds a file's pieces of data to the hash; answers how many bytes they were.
fn content(hash: &mut Sha256, item: &Item, buffer: &mut [u8]) -> rustix::io::Result<u64> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let file = rustix::fs::openat(item.dir, item.name, flags, Mode::empty())?;
    hash.update(item.stat.st_size.to_le_bytes());
    let mut total = 0;
    let mut at = 0;
    while let Some((start, end)) = next_data(&file, at)? {
        hash.update(start.to_le_bytes());
        at = start;
        while at < end {
            let want = usize::try_from(end - at).unwrap_or(usize::MAX).min(buffer.len());
            let got = match rustix::io::pread(&file, &mut buffer[..want], at) {
                Err(Errno::INTR) => continue,
                done => done?,
            };
            if got == 0 {
                return Ok(total); // it became shorter
            }
            hash.update(&buffer[..got]);
            at += got as u64;
            total += got as u64;
        }
    }
    Ok(total)
}

/// The next piece of data at or after `at`.
pub fn next_data(file: &OwnedFd, at: u64) -> rustix::io::Result<Option<(u64, u64)>> {
    let start = match rustix::fs::seek(file, SeekFrom::Data(at)) {
        Ok(start) => start,
        Err(Errno::NXIO) => return Ok(None),
        Err(errno) => return Err(errno),
    };
    Ok(Some((start, rustix::fs::seek(file, SeekFrom::Hole(start))?)))
}

fn field(hash: &mut Sha256, bytes: &[u8]) {
    hash.update((bytes.len() as u64).to_le_bytes());
    hash.update(bytes);
}
