//! The state directory: its lock, its control socket, and the file that says where this noded is.

use std::{
    fs::{self, DirBuilder, File},
    io,
    net::SocketAddr,
    os::unix::{fs::DirBuilderExt, net::UnixListener},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use rustix::{fs::FlockOperation, mount::UnmountFlags};
use serde_json::json;

use crate::{isolation::process, local_socket};

/// How often a taken lock is asked for again.
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// A state directory that belongs to this process alone for as long as it lives.
pub struct StateDir {
    path: PathBuf,
    /// Dropped last: with it goes the lock.
    _lock: File,
}

impl StateDir {
    /// Makes what is missing and takes the lock. The error is for a person.
    ///
    /// A noded that was killed while it made a sandbox has left a child that is not yet another program and holds the lock
    /// for a few milliseconds more, so a taken lock is asked for again until `patience` is over.
    pub fn claim(path: &Path, patience: Duration) -> Result<Self, String> {
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
        let deadline = Instant::now() + patience;
        while rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
            if Instant::now() >= deadline {
                return Err(format!("another noded runs on {}; one state directory serves one noded", path.display()));
            }
            std::thread::sleep(LOOK_AGAIN);
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
        local_socket::bind(&self.path, "noded.sock").map_err(said)
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
        let first = StateDir::claim(&path, Duration::ZERO).unwrap();
        assert!(StateDir::claim(&path, Duration::ZERO).err().unwrap().contains("another noded"));
        // A killed noded's child still holds the lock for a moment.
        let child = first._lock.try_clone().unwrap();
        drop(first);
        let waits = std::thread::spawn({
            let path = path.clone();
            move || StateDir::claim(&path, Duration::from_secs(10))
        });
        std::thread::sleep(LOOK_AGAIN * 2);
        assert!(!waits.is_finished());
        drop(child);
        waits.join().unwrap().unwrap().erase();
        assert!(!path.exists());
    }

    #[test]
    fn mount_points_are_unescaped() {
        assert_eq!(unescape(r"/a\040b\134c"), r"/a b\c");
    }
}
