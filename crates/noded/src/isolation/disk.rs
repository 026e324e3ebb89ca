//! Where a sandbox's changes lie, and the limit on them: a plain directory (no limit), a btrfs subvolume with a quota
//! group, or a tmpfs. What a machine gives differs; `Backend::name` says what enforces a limit, and a limit that nothing
//! can enforce is an error.
//!
//! Unsafe code because btrfs's calls are raw ioctls; every function is safe to call.
#![allow(unsafe_code)]

use std::{
    fs, io,
    os::fd::{AsFd, AsRawFd},
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
    process::Command,
    sync::Mutex,
};

use sandmill_wire::ApiError;
use serde::{Deserialize, Serialize};

use super::mount::{self, FsContext};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Backend {
    Plain,
    Btrfs,
    Tmpfs,
}

/// A sandbox's disk.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Disk {
    pub backend: Backend,
    /// Upper and work directories are made below it.
    pub root: PathBuf,
}

impl Disk {
    /// What enforces a limit of bytes.
    pub fn bytes_enforced_by(&self) -> &'static str {
        match self.backend {
            Backend::Plain => "none",
            Backend::Btrfs => "btrfs-qgroup",
            Backend::Tmpfs => "tmpfs",
        }
    }

    /// What enforces a limit of inodes: exactly on tmpfs; on btrfs their metadata counts towards the bytes.
    pub fn inodes_enforced_by(&self) -> &'static str {
        match self.backend {
            Backend::Plain => "none",
            Backend::Btrfs => "btrfs-metadata",
            Backend::Tmpfs => "tmpfs",
        }
    }
}

enum Pool {
    Untried,
    Mounted,
    Unavailable(String),
}

pub struct Disks {
    file: PathBuf,
    mount_point: PathBuf,
    pool: Mutex<Pool>,
}

impl Disks {
    /// Nothing is touched until the first sandbox asks for a limit, but for a pool that lives on from before a restart.
    pub fn new(state_dir: &Path) -> Self {
        let disks = Self {
            file: state_dir.join("disk.btrfs"),
            mount_point: state_dir.join("disk"),
            pool: Mutex::new(Pool::Untried),
        };
        if disks.file.exists() {
            let _ = disks.pool();
        }
        disks
    }

    /// A disk for one sandbox: limited when bytes or inodes are asked for.
    pub fn make(&self, id: &str, own_dir: &Path, bytes: Option<u64>, inodes: Option<u64>) -> Result<Disk, ApiError> {
        let failed = |error: io::Error| {
            ApiError::new(500, "disk_failed", format!("the sandbox's disk could not be made: {error}"))
        };
        match (bytes, inodes) {
            (None, None) => Ok(Disk { backend: Backend::Plain, root: own_dir.to_owned() }),
            (Some(bytes), None) if self.pool().is_ok() => {
                let root = self.mount_point.join(id);
                subvolume_create(&self.mount_point, id).map_err(failed)?;
                let disk = Disk { backend: Backend::Btrfs, root };
                if let Err(error) = limit(&disk.root, bytes) {
                    let _ = self.remove(&disk);
                    return Err(failed(error));
                }
                Ok(disk)
            }
            _ => {
                let root = own_dir.join("disk");
                tmpfs(&root, bytes, inodes).map_err(|error| {
                    let pool = self.pool().err().unwrap_or_default();
                    ApiError::new(
                        501,
                        "limit_unsupported",
                        format!("no disk limit is possible here: {pool}; tmpfs: {error}"),
                    )
                    .hint("run `sandmill doctor`, or leave disk_mb and inodes out")
                })?;
                Ok(Disk { backend: Backend::Tmpfs, root })
            }
        }
    }

    /// Removes what `make` made, and all in it.
    pub fn remove(&self, disk: &Disk) -> io::Result<()> {
        match disk.backend {
            Backend::Plain => Ok(()), // part of the sandbox's own directory
            Backend::Tmpfs => {
                if let Ok(path) = mount::c_path(&disk.root) {
                    // SAFETY: a NUL-terminated path; EINVAL says that nothing is mounted there (after a restart).
                    unsafe { libc::umount2(path.as_ptr(), libc::MNT_DETACH) };
                }
                Ok(())
            }
            Backend::Btrfs => {
                if self.pool().is_err() || !disk.root.exists() {
                    return Ok(());
                }
                let name = disk.root.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
                subvolume_destroy(&self.mount_point, &name)
            }
        }
    }

    /// Bytes in use by a limited disk.
    pub fn used_bytes(&self, disk: &Disk) -> Option<u64> {
        match disk.backend {
            Backend::Plain => None,
            Backend::Tmpfs => {
                let all = rustix::fs::statvfs(&disk.root).ok()?;
                Some((all.f_blocks - all.f_bfree) * all.f_frsize)
            }
            Backend::Btrfs => referenced(&disk.root).ok(),
        }
    }

    /// Names of subvolumes that exist, for the sweep at start.
    pub fn existing(&self) -> Vec<Disk> {
        let mounted = matches!(*self.pool.lock().expect("no panic while held"), Pool::Mounted);
        let entries = if mounted { fs::read_dir(&self.mount_point).ok() } else { None };
        let entries = entries.into_iter().flatten().flatten();
        entries.map(|entry| Disk { backend: Backend::Btrfs, root: entry.path() }).collect()
    }

    /// Lets go of the pool: with its last user the loop device goes too. The file is removed when `remove_file`.
    pub fn close(&self, remove_file: bool) {
        let mut pool = self.pool.lock().expect("no panic while held");
        if let (Pool::Mounted, Ok(path)) = (&*pool, mount::c_path(&self.mount_point)) {
            // SAFETY: a NUL-terminated path of a mount of ours.
            unsafe { libc::umount2(path.as_ptr(), 0) };
            *pool = Pool::Untried;
        }
        if remove_file {
            let _ = fs::remove_file(&self.file);
        }
        let _ = fs::remove_dir(&self.mount_point);
    }

    /// Mounts the pool if it isn't; says why it can't be.
    fn pool(&self) -> Result<(), String> {
        let mut pool = self.pool.lock().expect("no panic while held");
        if let Pool::Untried = *pool {
            *pool = match self.mount_pool() {
                Ok(()) => Pool::Mounted,
                Err(why) => Pool::Unavailable(format!("btrfs: {why}")),
            };
        }
        match &*pool {
            Pool::Unavailable(why) => Err(why.clone()),
            _ => Ok(()),
        }
    }

    fn mount_pool(&self) -> Result<(), String> {
        if !self.file.exists() {
            self.make_file()?;
        }
        fs::create_dir_all(&self.mount_point).map_err(|error| error.to_string())?;
        // mount(8) finds a loop device that already backs the file (sandboxes of a killed noded hold it) and sets autoclear.
        let mut command = Command::new("mount");
        command.args(["-t", "btrfs", "-o", "loop,noatime,nodev"]).arg(&self.file).arg(&self.mount_point);
        run(&mut command)?;
        quota_enable(&self.mount_point).map_err(|error| format!("quotas: {error}"))
    }

    fn make_file(&self) -> Result<(), String> {
        let folder = self.file.parent().unwrap_or(Path::new("/"));
        let space = rustix::fs::statvfs(folder).map_err(|error| error.to_string())?;
        let free = space.f_bavail * space.f_frsize;
        let size = (free / 10 * 9) & !0xf_ffff;
        if size < 256 << 20 {
            return Err("less than 285 MB of disk are free".to_owned());
        }
        let fresh = self.file.with_extension("new");
        let made = || -> io::Result<()> {
            let file = fs::File::create(&fresh)?;
            file.set_len(size) // sparse: takes what is written
        };
        made().map_err(|error| error.to_string())?;
        run(Command::new("mkfs.btrfs").arg("-q").arg(&fresh))
            .map_err(|why| format!("{why} (apt-get install btrfs-progs)"))?;
        fs::rename(&fresh, &self.file).map_err(|error| error.to_string())
    }
}

fn run(command: &mut Command) -> Result<(), String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let done = command.output().map_err(|error| format!("{name}: {error}"))?;
    if done.status.success() {
        return Ok(());
    }
    Err(format!("{name}: {}", String::from_utf8_lossy(&done.stderr).trim()))
}

fn tmpfs(root: &Path, bytes: Option<u64>, inodes: Option<u64>) -> io::Result<()> {
    fs::create_dir_all(root)?;
    let context = FsContext::open(c"tmpfs")?;
    context.set(c"mode", c"755")?;
    let text = |number: u64| std::ffi::CString::new(number.to_string()).expect("digits hold no NUL");
    if let Some(bytes) = bytes {
        context.set(c"size", &text(bytes))?;
    }
    if let Some(inodes) = inodes {
        context.set(c"nr_inodes", &text(inodes))?;
    }
    mount::attach(context.mount(mount::MOUNT_ATTR_NODEV)?, root)
}

const SUBVOL_CREATE: libc::c_ulong = 0x5000_940e;
const SNAP_DESTROY: libc::c_ulong = 0x5000_940f;
const INO_LOOKUP: libc::c_ulong = 0xd000_9412;
const QUOTA_CTL: libc::c_ulong = 0xc010_9428;
const QGROUP_LIMIT: libc::c_ulong = 0x8030_942b;
const QUOTA_ENABLE: u64 = 1;
const LIMIT_MAX_REFERENCED: u64 = 1;
const FIRST_FREE_OBJECT: u64 = 256;

#[repr(C)]
struct VolumeArgs {
    fd: i64,
    name: [u8; 4088],
}

#[repr(C)]
struct LookupArgs {
    tree: u64,
    object: u64,
    name: [u8; 4080],
}

fn ioctl<T>(file: &impl AsFd, request: libc::c_ulong, argument: &mut T) -> io::Result<()> {
    // SAFETY: every request here is called with the structure that the kernel defines for it, alive for the call.
    let result = unsafe { libc::ioctl(file.as_fd().as_raw_fd(), request, std::ptr::from_mut(argument)) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

fn volume_call(parent: &Path, name: &str, request: libc::c_ulong) -> io::Result<()> {
    let parent = fs::File::open(parent)?;
    let mut arguments = Box::new(VolumeArgs { fd: 0, name: [0; 4088] });
    let bytes = Path::new(name).as_os_str().as_bytes();
    arguments.name.get_mut(..bytes.len()).ok_or(io::ErrorKind::InvalidInput)?.copy_from_slice(bytes);
    ioctl(&parent, request, &mut *arguments)
}

fn subvolume_create(parent: &Path, name: &str) -> io::Result<()> {
    volume_call(parent, name, SUBVOL_CREATE)
}

fn subvolume_destroy(parent: &Path, name: &str) -> io::Result<()> {
    volume_call(parent, name, SNAP_DESTROY)
}

fn quota_enable(mount_point: &Path) -> io::Result<()> {
    let mut arguments = [QUOTA_ENABLE, 0];
    match ioctl(&fs::File::open(mount_point)?, QUOTA_CTL, &mut arguments) {
        Err(error) if error.raw_os_error() == Some(libc::EEXIST) => Ok(()),
        other => other,
    }
}

/// Limits the referenced bytes of a subvolume.
fn limit(subvolume: &Path, bytes: u64) -> io::Result<()> {
    // qgroupid 0: the one of this subvolume; then flags, max_rfer, max_excl, rsv_rfer, rsv_excl.
    let mut arguments = [0, LIMIT_MAX_REFERENCED, bytes, 0, 0, 0];
    ioctl(&fs::File::open(subvolume)?, QGROUP_LIMIT, &mut arguments)
}

/// Referenced bytes of a subvolume, after a sync (the accounts are kept a transaction at a time).
fn referenced(subvolume: &Path) -> io::Result<u64> {
    let file = fs::File::open(subvolume)?;
    rustix::fs::syncfs(&file)?;
    let mut arguments = Box::new(LookupArgs { tree: 0, object: FIRST_FREE_OBJECT, name: [0; 4080] });
    ioctl(&file, INO_LOOKUP, &mut *arguments)?;
    for entry in fs::read_dir("/sys/fs/btrfs")?.flatten() {
        let path = entry.path().join(format!("qgroups/0_{}/referenced", arguments.tree));
        // Two file systems may both have this id: ours is the one whose device is a loop on our file; only one is mounted here.
        if let Some(bytes) = fs::read_to_string(path).ok().and_then(|text| text.trim().parse().ok()) {
            return Ok(bytes);
        }
    }
    Err(io::ErrorKind::NotFound.into())
}
