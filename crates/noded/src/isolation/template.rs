//! What all sandboxes of a node share: the read-only /dev and /sys, one super block each, bind-mounted into every sandbox; and
//! the furnishing, a layer on top of every image with what no image can know.

use std::{
    fs, io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    os::unix::fs::symlink,
    path::{Path, PathBuf},
};

use rustix::fs::{chmod, makedev, mknodat, FileType, Mode, CWD};

use super::mount::{self, FsContext, MOUNT_ATTR_NODEV, MOUNT_ATTR_NOEXEC, MOUNT_ATTR_NOSUID, MOUNT_ATTR_RDONLY};

/// Mounted in noded's own mount namespace, under the state directory.
pub struct Templates {
    dev: PathBuf,
    sys: PathBuf,
    views: PathBuf,
    furnishing: PathBuf,
}

/// Views of limits kept; beyond it all are made anew (sandboxes that run hold theirs by its mount).
const VIEWS: usize = 1000;

/// Character devices of a sandbox: name, major, minor. All harmless, all world-accessible.
const DEVICES: [(&str, u32, u32); 6] =
    [("null", 1, 3), ("zero", 1, 5), ("full", 1, 7), ("random", 1, 8), ("urandom", 1, 9), ("tty", 5, 0)];

const LINKS: [(&str, &str); 6] = [
    ("ptmx", "pts/ptmx"),
    ("fd", "/proc/self/fd"),
    ("stdin", "/proc/self/fd/0"),
    ("stdout", "/proc/self/fd/1"),
    ("stderr", "/proc/self/fd/2"),
    ("core", "/proc/kcore"),
];

impl Templates {
    /// Makes both under `dir`, which noded's mount namespace keeps to itself.
    pub fn make(dir: &Path) -> io::Result<Self> {
        let made = Self {
            dev: dir.join("dev"),
            sys: dir.join("sys"),
            views: dir.join("limits"),
            furnishing: dir.join("furnishing"),
        };
        for path in [&made.dev, &made.sys, &made.views] {
            fs::create_dir_all(path)?;
            let context = FsContext::open(c"tmpfs")?;
            context.set(c"mode", c"755")?;
            context.set(c"size", c"16m")?;
            mount::attach(context.mount(0)?, path)?;
        }
        for (name, major, minor) in DEVICES {
            let path = made.dev.join(name);
            mknodat(CWD, &path, FileType::CharacterDevice, Mode::from_raw_mode(0o666), makedev(major, minor))?;
            chmod(&path, Mode::from_raw_mode(0o666))?; // whatever the umask
        }
        for name in ["pts", "shm", "mqueue"] {
            fs::create_dir(made.dev.join(name))?;
        }
        for (name, target) in LINKS {
            symlink(target, made.dev.join(name))?;
        }
        made.fill_sys()?;
        Ok(made)
    }

    /// The layer of mount points and `files` (name in /etc, text), on the state directory's own file system like every other
    /// layer, so that inode numbers stay what they are. What sandboxes of an earlier noded use is left as it is.
    pub fn furnish(&self, files: &[(&str, String)]) -> io::Result<()> {
        for name in ["dev", "etc", "proc", "sys"] {
            let path = self.furnishing.join(name);
            fs::create_dir_all(&path)?;
            chmod(&path, Mode::from_raw_mode(0o755))?;
        }
        for (name, text) in files {
            let path = self.furnishing.join("etc").join(name);
            if fs::read(&path).ok().as_deref() != Some(text.as_bytes()) {
                fs::write(&path, text)?;
                chmod(&path, Mode::from_raw_mode(0o644))?;
            }
        }
        chmod(&self.furnishing, Mode::from_raw_mode(0o755))?;
        Ok(())
    }

    /// Topmost lower layer of a sandbox's root.
    pub fn furnishing(&self) -> &Path {
        &self.furnishing
    }

    /// What programs look up in /sys without being told about the host: its CPUs, and where the limits are shown.
    fn fill_sys(&self) -> io::Result<()> {
        let cpu = self.sys.join("devices/system/cpu");
        fs::create_dir_all(&cpu)?;
        for name in ["online", "possible", "present"] {
            fs::write(
                cpu.join(name),
                fs::read(format!("/sys/devices/system/cpu/{name}")).unwrap_or_else(|_| b"0\n".to_vec()),
            )?;
        }
        let page = self.sys.join("kernel/mm/transparent_hugepage");
        fs::create_dir_all(&page)?;
        fs::write(page.join("enabled"), "always [madvise] never\n")?;
        fs::create_dir_all(self.sys.join("fs/cgroup"))
    }

    /// A directory that says these limits as the v2 tree does; sandboxes with the same limits share it.
    pub fn limits(&self, cpu: Option<f64>, memory_bytes: Option<u64>, pids: Option<u64>) -> io::Result<PathBuf> {
        let max = |value: Option<u64>| value.map_or_else(|| "max".to_owned(), |value| value.to_string());
        let cpu = max(cpu.map(|cpu| (cpu * 100_000.0).round() as u64));
        let (memory, pids) = (max(memory_bytes), max(pids));
        let view = self.views.join(format!("{cpu}-{memory}-{pids}"));
        if view.exists() {
            return Ok(view);
        }
        if fs::read_dir(&self.views)?.count() > VIEWS {
            for entry in fs::read_dir(&self.views)? {
                super::remove::tree(&entry?.path())?;
            }
        }
        let draft = self.views.join(format!(".{:?}", std::thread::current().id()));
        fs::create_dir_all(draft.join("memory"))?;
        fs::write(draft.join("cpu.max"), format!("{cpu} 100000\n"))?;
        fs::write(draft.join("memory.max"), format!("{memory}\n"))?;
        fs::write(draft.join("pids.max"), format!("{pids}\n"))?;
        match fs::rename(&draft, &view) {
            // Another create was faster.
            Err(_) if view.exists() => super::remove::tree(&draft)?,
            renamed => renamed?,
        }
        Ok(view)
    }

    /// A detached read-only /dev.
    pub fn dev(&self, owners: BorrowedFd<'_>) -> io::Result<OwnedFd> {
        detached(&self.dev, MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC, owners)
    }

    /// A detached read-only /sys.
    pub fn sys(&self, owners: BorrowedFd<'_>) -> io::Result<OwnedFd> {
        detached(&self.sys, MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC | MOUNT_ATTR_NODEV, owners)
    }
}

/// With `owners`' id map, so that root owns it inside.
fn detached(path: &Path, attributes: u64, owners: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let tree = mount::clone_tree(path)?;
    mount::set_attributes(tree.as_fd(), attributes, Some(owners))?;
    Ok(tree)
}
