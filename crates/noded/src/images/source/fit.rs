//! Fits a layer to the layers below it.
//!
//! An archive may leave out the directories of its members: then theirs are the owner and mode that they have below. And
//! it may hide names that are not there: overlayfs shows such a whiteout, as an entry that cannot be opened. A layer's
//! own tree says nothing of what is below, so where it matters, the image gets a fitted copy of it.

use std::{
    fs,
    os::unix::{ffi::OsStrExt, fs::PermissionsExt},
    path::{Path, PathBuf},
};

use rustix::{
    fs::{AtFlags, FileType, Mode, OFlags, ResolveFlags, Stat},
    io::Errno,
};
use sha2::{Digest, Sha256};

use crate::images::{
    layers::{hex, LayerMeta, Layers, Pin, DIGEST_PREFIX},
    tree,
    unpack::Limits,
    Error, Result,
};

/// Owner and mode of a directory.
type Attributes = (u32, u32, u32);
/// What unpacking gives a directory of which no member speaks.
const PLAIN: Attributes = (0, 0, 0o755);

/// The layer, or a copy of it that fits on `below` (bottom first).
pub fn fit(store: &Layers, below: &[(LayerMeta, Pin)], (meta, pin): (LayerMeta, Pin)) -> Result<(LayerMeta, Pin)> {
    if !meta.hides && meta.implicit.is_empty() {
        return Ok((meta, pin));
    }
    let root = store.tree(&meta.digest);
    let below: Vec<PathBuf> = below.iter().rev().map(|(layer, _)| store.tree(&layer.digest)).collect();
    let mut idle = Vec::new();
    for path in tree::whiteouts(&root)? {
        if !is_anywhere(&below, &path)? {
            idle.push(path);
        }
    }
    let mut inherited = Vec::new();
    for path in &meta.implicit {
        if let Some(attributes) = attributes(&below, Path::new(path))?.filter(|found| *found != PLAIN) {
            inherited.push((PathBuf::from(path), attributes));
        }
    }
    if idle.is_empty() && inherited.is_empty() {
        return Ok((meta, pin));
    }
    let mut hash = Sha256::new();
    hash.update(b"sandmill fitted layer 1\n");
    hash.update(&meta.digest);
    for path in &idle {
        hash.update(b"\n-");
        hash.update(path.as_os_str().as_bytes());
    }
    for (path, attributes) in &inherited {
        hash.update(format!("\n={attributes:?} "));
        hash.update(path.as_os_str().as_bytes());
    }
    let digest = format!("{DIGEST_PREFIX}{}", hex(&hash.finalize()));
    store.obtain(&digest, |to| {
        tree::copy(&root, to, tree::Origin::Upper, Limits::for_path(to.parent().unwrap_or(to)).bytes)?;
        for path in &idle {
            // The copy has no links on the way: these are paths of a walk, and of directories that unpacking made.
            fs::remove_file(to.join(path)).map_err(Error::io("remove", to.join(path)))?;
        }
        for (path, (uid, gid, mode)) in &inherited {
            let dir = to.join(path);
            std::os::unix::fs::lchown(&dir, Some(*uid), Some(*gid)).map_err(Error::io("change the owner of", &dir))?;
            fs::set_permissions(&dir, fs::Permissions::from_mode(*mode)).map_err(Error::io("set the mode of", &dir))?;
        }
        Ok(LayerMeta { digest: digest.clone(), hides: false, implicit: Vec::new(), ..meta.clone() })
    })
}

fn is_anywhere(below: &[PathBuf], path: &Path) -> Result<bool> {
    for root in below {
        if stat_beneath(root, path)?.is_some() {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Of the topmost layer that has a directory at `path`.
fn attributes(below: &[PathBuf], path: &Path) -> Result<Option<Attributes>> {
    for root in below {
        if let Some(stat) = stat_beneath(root, path)? {
            let is_dir = FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
            return Ok(is_dir.then_some((stat.st_uid, stat.st_gid, stat.st_mode & 0o7777)));
        }
    }
    Ok(None)
}

/// What is at `path` below `root`, no link followed.
fn stat_beneath(root: &Path, path: &Path) -> Result<Option<Stat>> {
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let Some(name) = path.file_name() else { return Ok(None) };
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let found = rustix::fs::openat2(tree::open_root(root)?, parent, flags, Mode::empty(), resolve)
        .and_then(|dir| rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW));
    match found {
        Ok(stat) => Ok(Some(stat)),
        Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => Ok(None),
        Err(errno) => Err(Error::os("stat", root.join(path))(errno)),
    }
}
