//! The state directory: its lock, its control socket, and the file that says where this noded is.

use std::{
    fs::{self, DirBuilder, File},
    io,
    net::SocketAddr,
    os::{
        fd::{AsFd, AsRawFd},
        unix::{
            fs::{DirBuilderExt, PermissionsExt},
            net::UnixListener,
        },
    },
    path::{Path, PathBuf},
};

use rustix::{
    fs::{FlockOperation, Mode, OFlags},
    mount::UnmountFlags,
};
use serde_json::json;

use crate::isolation::process;

/// A state directory that belongs to this process alone for as long as it lives.
pub struct StateDir {
    path: PathBuf,
    /// Dropped last: with it goes the lock.
    _lock: File,
}

impl StateDir {
    /// Makes what is missing and takes the lock. The error is for a person.
    pub fn claim(path: &Path) -> Result<Self, String> {
        let said = |step: &str, path: &Path| {
            let place = format!("cannot {step} {}", path.display());
            move |error: io::Error| format!("{place}: {error}")
        };
        // Others may pass through but not look: a sandbox's mapped root must reach the layers.
        DirBuilder::new().recursive(true).mode(0o711).create(path).map_err(said("make", path))?;
        let path = path.canonicalize().map_err(said("resolve", path))?;
        let lock_path = path.join("noded.lock");
        let lock = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&lock_path)
            .map_err(said("open", &lock_path))?;
        if rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
            return Err(format!("another noded runs on {}; one state directory serves one noded", path.display()));
        }
        Ok(Self { path, _lock: lock })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Binds `DIR/noded.sock`, for root only. What is there is a dead noded's, since we hold the lock.
    pub fn listen(&self) -> Result<UnixListener, String> {
        let said = |error: io::Error| format!("cannot listen on {}: {error}", self.path.join("noded.sock").display());
        remove_if_there(&self.path.join("noded.sock")).map_err(said)?;
        bind(&self.path, "noded.sock").map_err(said)
    }

    /// Tells others where we are; the file is there only while we answer.
    pub fn announce(&self, data: SocketAddr) -> Result<(), String> {
        let said = |error: io::Error| format!("cannot write {}: {error}", self.path.join("noded.json").display());
        let pid = std::process::id();
        let start_time = process::start_time(pid.cast_signed()).map_err(said)?;
        let text = json!({"pid": pid, "start_time": start_time, "data_addr": data.to_string()}).to_string();
        let draft = self.path.join("noded.json.new");
        fs::write(&draft, text).and_then(|()| fs::rename(&draft, self.path.join("noded.json"))).map_err(said)
    }

    /// Takes back what [`StateDir::listen`] and [`StateDir::announce`] left.
    pub fn withdraw(&self) {
        for name in ["noded.json", "noded.sock"] {
            if let Err(error) = remove_if_there(&self.path.join(name)) {
                eprintln!("noded: {name} stays: {error}");
            }
        }
    }

    /// Detaches everything that is mounted below the directory, in this process's own mount namespace.
    pub fn unmount_all(&self) {
        let Ok(table) = fs::read_to_string("/proc/self/mountinfo") else { return };
        let below = |point: &str| Path::new(point) != self.path && Path::new(point).starts_with(&self.path);
        let points: Vec<String> = table
            .lines()
            .filter_map(|line| line.split(' ').nth(4))
            .map(unescape)
            .filter(|point| below(point))
            .collect();
        for point in points.iter().rev() {
            if let Err(error) = rustix::mount::unmount(point.as_str(), UnmountFlags::DETACH) {
                eprintln!("noded: {point} stays mounted: {error}");
            }
        }
    }

    /// Removes the whole directory.
    pub fn erase(self) {
        if let Err(error) = crate::isolation::remove::tree(&self.path) {
            eprintln!("noded: {} stays: {error}", self.path.display());
        }
    }
}

/// Binds a listening socket `name` in `dir`, however long the path is (a socket's own address holds 107 bytes).
pub fn bind(dir: &Path, name: &str) -> io::Result<UnixListener> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let dir = rustix::fs::open(dir, flags, Mode::empty())?;
    let path = format!("/proc/self/fd/{}/{name}", dir.as_fd().as_raw_fd());
    let listener = UnixListener::bind(&path)?;
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}

fn remove_if_there(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Undoes mountinfo's octal escapes of blank, tab, newline and backslash.
fn unescape(field: &str) -> String {
    field.replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")
}

/// Asks ext4 to lay each directory made in `dir` into a block group of its own. It searches for a free inode from the start of
/// the parent's group and, without a journal, skips those deleted in the last half minute one by one: where sandboxes come
/// and go in one group, a create takes 26 ms instead of 10. Other file systems have no such flag, and no such need.
pub fn spread(dir: &Path) {
    use rustix::fs::{ioctl_getflags, ioctl_setflags, IFlags};
    let Ok(dir) = fs::File::open(dir) else { return };
    if let Ok(flags) = ioctl_getflags(&dir) {
        let _ = ioctl_setflags(&dir, flags | IFlags::TOPDIR);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_has_one_owner() {
        let path = std::env::temp_dir().join(format!("sandmill-state-{}", std::process::id()));
        let first = StateDir::claim(&path).unwrap();
        assert!(StateDir::claim(&path).err().unwrap().contains("another noded"));
        drop(first);
        StateDir::claim(&path).unwrap().erase();
        assert!(!path.exists());
    }

    #[test]
    fn a_long_path_can_be_listened_on() {
        let path = std::env::temp_dir().join(format!("sandmill-long-{}", std::process::id())).join("x".repeat(120));
        fs::create_dir_all(&path).unwrap();
        bind(&path, "s.sock").unwrap();
        assert!(path.join("s.sock").exists());
        fs::remove_dir_all(path.parent().unwrap()).unwrap();
    }

    #[test]
    fn mount_points_are_unescaped() {
        assert_eq!(unescape(r"/a\040b\134c"), r"/a b\c");
    }
}
