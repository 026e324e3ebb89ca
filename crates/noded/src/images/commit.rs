//! A sandbox's changes become a layer.

use std::{fs, os::unix::ffi::OsStrExt, path::Path};

use rustix::{fs::AtFlags, io::Errno};

use super::{
    layers::{Durability, LayerMeta, Layers, Pin},
    tree,
    unpack::Limits,
    ConfigChange, Error, ImageConfig, Result,
};

/// Files of `/etc` that noded writes at a create, as Docker does; they say something about one sandbox, so no image
/// keeps them.
const OF_THE_SANDBOX: &[&str] = &["etc/resolv.conf", "etc/hosts", "etc/hostname"];

/// Takes in the upper directory of the tree at `target`. `None` if nothing was changed there.
pub fn layer(
    layers: &Layers,
    target: &Path,
    upper: &Path,
    uid_base: u32,
    durability: Durability,
) -> Result<Option<(LayerMeta, Pin)>> {
    let scratch = layers.scratch()?;
    let root_path = scratch.path().join("fs");
    match fs::rename(upper, &root_path) {
        Ok(()) => {}
        Err(error) if error.raw_os_error() == Some(libc::EXDEV) => {
            tree::copy(upper, &root_path, tree::Origin::Upper, Limits::for_path(scratch.path()).bytes)?;
        }
        Err(error) => return Err(Error::io("move", upper)(error)),
    }
    let root = tree::open_root(&root_path)?;
    if target == Path::new("/") {
        for path in OF_THE_SANDBOX {
            forget(&root, path).map_err(Error::os("clean", root_path.join(path)))?;
        }
    }
    tree::shift_owners(&root, &root_path, uid_base)?;
    let meta = tree::digest(&root, &root_path)?;
    if meta.entries < 2 {
        return Ok(None); // the root alone
    }
    layers.take_in(scratch, meta, durability).map(Some)
}

/// Removes what the sandbox has at `path`. Follows no link.
fn forget(root: &std::os::fd::OwnedFd, path: &str) -> rustix::io::Result<()> {
    use rustix::fs::{openat2, unlinkat, Mode, OFlags, ResolveFlags};

    let path = Path::new(path);
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else { return Ok(()) };
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let dir = match openat2(root, parent, flags, Mode::empty(), resolve) {
        Ok(dir) => dir,
        Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => return Ok(()),
        Err(errno) => return Err(errno),
    };
    match unlinkat(&dir, name.as_bytes(), AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT | Errno::ISDIR) => Ok(()),
        Err(errno) => Err(errno),
    }
}

/// The configuration of a committed image.
pub fn configure(mut config: ImageConfig, change: ConfigChange) -> ImageConfig {
    config.env.extend(change.env);
    config.workdir = change.workdir.or(config.workdir);
    config.user = change.user.or(config.user);
    config.entrypoint = change.entrypoint.unwrap_or(config.entrypoint);
    config.cmd = change.cmd.unwrap_or(config.cmd);
    for volume in change.volumes {
        if !config.volumes.contains(&volume) {
            config.volumes.push(volume);
        }
    }
    config.labels.extend(change.labels);
    config
}
