//! What this machine gives and lacks, and the command that mends it.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use serde::Serialize;

/// One thing looked at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Check {
    pub name: &'static str,
    pub status: Status,
    pub found: String,
    pub needed: &'static str,
    /// A command, where one mends it.
    pub fix: Option<&'static str>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    Ok,
    /// Something that not everybody needs is missing, or a limit is low.
    Warn,
    /// Sandboxes can't be made.
    Fail,
}

/// Looks at the machine as it is now; it changes nothing.
#[derive(Debug, Clone)]
pub struct Doctor {
    state_dir: PathBuf,
}

impl Doctor {
    pub fn new(state_dir: &Path) -> Self {
        Self { state_dir: state_dir.to_owned() }
    }

    /// All checks, the vital ones first. Takes some milliseconds, and blocks.
    pub fn examine(&self) -> Vec<Check> {
        let mut checks = vec![kernel(), user_namespaces(), restrictions(), overlay(), self.file_system()];
        checks.extend(cgroups());
        checks.push(cgroup_moves());
        checks.extend([pids(), files(), mounts(), inotify(), disk_limits(), self.space()]);
        checks.extend(network());
        checks
    }

    fn file_system(&self) -> Check {
        let name = fs_name(&self.state_dir);
        let able = matches!(name.as_str(), "ext4" | "xfs" | "btrfs" | "tmpfs" | "f2fs");
        Check {
            name: "state directory",
            status: if able { Status::Ok } else { Status::Fail },
            found: name,
            needed:
                "a file system that can be an overlay's upper layer and be id-mapped: ext4, xfs, btrfs, tmpfs, f2fs",
            fix: (!able).then_some("sandmill serve --state-dir DIR, with DIR on such a file system"),
        }
    }

    fn space(&self) -> Check {
        let free = rustix::fs::statvfs(&self.state_dir).map_or(0, |stat| stat.f_bavail * stat.f_frsize);
        let enough = free > 2 << 30;
        Check {
            name: "disk space",
            status: if enough { Status::Ok } else { Status::Warn },
            found: format!("{} MB free", free >> 20),
            needed: "2 GB for sandboxes' changes and images",
            fix: (!enough).then_some("sandmill image rm NAME"),
        }
    }
}

fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default().trim().to_owned()
}

fn number(path: &str) -> u64 {
    read(path).parse().unwrap_or(0)
}

fn ok_if(ok: bool, otherwise: Status) -> Status {
    if ok {
        Status::Ok
    } else {
        otherwise
    }
}

fn kernel() -> Check {
    let release = read("/proc/sys/kernel/osrelease");
    let able = version(&release) >= (6, 15);
    Check {
        name: "kernel",
        status: ok_if(able, Status::Fail),
        found: release,
        needed: "6.15: overlays over detached id-mapped mounts",
        fix: (!able)
            .then_some("install a newer kernel (Debian: apt-get install -t trixie-backports linux-image-amd64)"),
    }
}

fn version(release: &str) -> (u32, u32) {
    let mut parts = release.split(['.', '-']).map(|part| part.parse().unwrap_or(0));
    (parts.next().unwrap_or(0), parts.next().unwrap_or(0))
}

fn user_namespaces() -> Check {
    let most = number("/proc/sys/user/max_user_namespaces");
    let able = most > 0 && Path::new("/proc/self/ns/user").exists();
    Check {
        name: "user namespaces",
        status: ok_if(able, Status::Fail),
        found: format!("user.max_user_namespaces = {most}"),
        needed: "one for each sandbox",
        fix: (!able).then_some("sysctl -w user.max_user_namespaces=100000"),
    }
}

/// Ubuntu confines processes in user namespaces by AppArmor; some distributions switch namespaces off for all but root.
/// noded is root, and what it makes is not touched by either; a nested sandbox would be.
fn restrictions() -> Check {
    let apparmor = read("/proc/sys/kernel/apparmor_restrict_unprivileged_userns") == "1";
    let unprivileged = read("/proc/sys/kernel/unprivileged_userns_clone");
    let found = match (apparmor, unprivileged.as_str()) {
        (true, _) => "AppArmor restricts unprivileged user namespaces (noded, as root, is not affected)",
        (false, "0") => "only root makes user namespaces (noded is root)",
        _ => "none",
    };
    Check {
        name: "restrictions of namespaces",
        status: Status::Ok,
        found: found.to_owned(),
        needed: "none that affects root",
        fix: None,
    }
}

fn overlay() -> Check {
    let there = read("/proc/filesystems").lines().any(|line| line.ends_with("\toverlay"));
    Check {
        name: "overlayfs",
        status: ok_if(there, Status::Fail),
        found: if there { "in the kernel" } else { "not in the kernel" }.to_owned(),
        needed: "each sandbox's root is an overlay",
        fix: (!there).then_some("modprobe overlay"),
    }
}

fn cgroups() -> Vec<Check> {
    let mounts = read("/proc/self/mountinfo");
    let kinds: Vec<(&str, &str)> = mounts
        .lines()
        .filter_map(|line| line.split_once(" - "))
        .filter_map(|(_, right)| Some((right.split(' ').next()?, right.rsplit(' ').next()?)))
        .collect();
    let unified = kinds.iter().any(|(kind, _)| *kind == "cgroup2");
    let in_v2 = ["/sys/fs/cgroup/cgroup.controllers", "/sys/fs/cgroup/unified/cgroup.controllers"].map(read).join(" ");
    let mut checks = vec![Check {
        name: "cgroup v2 tree",
        status: ok_if(unified, Status::Warn),
        found: if unified { "mounted" } else { "not mounted" }.to_owned(),
        needed: "kill groups: a timeout ends all that a call started, at once (without it processes are searched)",
        fix: (!unified).then_some("mkdir -p /sys/fs/cgroup/unified && mount -t cgroup2 none /sys/fs/cgroup/unified"),
    }];
    for (name, fix) in [
        ("memory", "add cgroup_enable=memory to the kernel's command line"),
        ("cpu", "mount -t cgroup -o cpu none /sys/fs/cgroup/cpu"),
        ("pids", "mount -t cgroup -o pids none /sys/fs/cgroup/pids"),
    ] {
        let v1 = kinds.iter().any(|(kind, options)| *kind == "cgroup" && options.split(',').any(|one| one == name));
        let v2 = in_v2.split_ascii_whitespace().any(|one| one == name);
        checks.push(Check {
            name: match name {
                "memory" => "limit of memory",
                "cpu" => "limit of cpu",
                _ => "limit of pids",
            },
            status: ok_if(v1 || v2, Status::Warn),
            found: match (v1, v2) {
                (_, true) => "cgroup v2",
                (true, false) => "cgroup v1",
                (false, false) => "no controller",
            }
            .to_owned(),
            needed: "a cgroup controller that is not taken by the other kind of tree",
            fix: (!v1 && !v2).then_some(fix),
        });
    }
    checks
}

/// Without the option, the first process that enters a group after a quiet moment waits for an RCU grace period: 5 to 16 ms
/// of every create on a machine that is otherwise busy, 0.3 ms with it.
fn cgroup_moves() -> Check {
    let mounts = read("/proc/self/mountinfo");
    let tree = mounts.lines().find(|line| line.contains(" - cgroup2 "));
    let favoured = tree.is_none_or(|line| line.contains("favordynmods"));
    Check {
        name: "speed of cgroups",
        status: ok_if(favoured, Status::Warn),
        found: if favoured { "favordynmods" } else { "entering a cgroup waits for a grace period" }.to_owned(),
        needed: "the v2 tree's mount option favordynmods: a create is some 10 ms faster",
        fix: (!favoured)
            .then_some("mount -t cgroup2 -o remount,favordynmods none $(findmnt -nt cgroup2 -o TARGET | head -1)"),
    }
}

fn pids() -> Check {
    let most = number("/proc/sys/kernel/pid_max");
    let enough = most >= 131_072;
    Check {
        name: "process ids",
        status: ok_if(enough, Status::Warn),
        found: format!("kernel.pid_max = {most}"),
        needed: "131072: thousands of sandboxes with several processes each",
        fix: (!enough).then_some("sysctl -w kernel.pid_max=4194304"),
    }
}

fn files() -> Check {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).maximum.unwrap_or(u64::MAX);
    let enough = limit >= 65_536;
    Check {
        name: "open files",
        status: ok_if(enough, Status::Warn),
        found: format!("hard limit {limit}"),
        needed: "65536: a few for each sandbox and connection",
        fix: (!enough).then_some("ulimit -Hn 1048576 (before the start), or LimitNOFILE=1048576 in the unit"),
    }
}

fn mounts() -> Check {
    let most = number("/proc/sys/fs/mount-max");
    let enough = most >= 1000;
    Check {
        name: "mounts of a namespace",
        status: ok_if(enough, Status::Fail),
        found: format!("fs.mount-max = {most}"),
        needed: "1000: each sandbox has its own namespace with some twenty",
        fix: (!enough).then_some("sysctl -w fs.mount-max=100000"),
    }
}

fn inotify() -> Check {
    let (instances, watches) =
        (number("/proc/sys/fs/inotify/max_user_instances"), number("/proc/sys/fs/inotify/max_user_watches"));
    let enough = instances >= 128 && watches >= 65_536;
    Check {
        name: "file watches",
        status: ok_if(enough, Status::Warn),
        found: format!("{instances} instances, {watches} watches a user (each sandbox counts as users of its own)"),
        needed: "128 and 65536: editors and build tools watch trees",
        fix: (!enough).then_some("sysctl -w fs.inotify.max_user_instances=1024 fs.inotify.max_user_watches=1048576"),
    }
}

fn disk_limits() -> Check {
    let kernel = read("/proc/filesystems").lines().any(|line| line.ends_with("\tbtrfs"));
    let tool = runs("mkfs.btrfs", "--version");
    let (status, found, fix) = match (kernel, tool) {
        (true, true) => (Status::Ok, "btrfs quota groups on a loop file", None),
        (true, false) => (Status::Warn, "tmpfs only (in memory): no mkfs.btrfs", Some("apt-get install btrfs-progs")),
        (false, _) => (Status::Warn, "tmpfs only (in memory): no btrfs in the kernel", Some("modprobe btrfs")),
    };
    Check { name: "limits of disk", status, found: found.to_owned(), needed: "btrfs and mkfs.btrfs", fix }
}

fn network() -> Vec<Check> {
    [("ip", "-V", "apt-get install iproute2"), ("nft", "--version", "apt-get install nftables")]
        .into_iter()
        .map(|(name, flag, fix)| {
            let there = runs(name, flag);
            Check {
                name: if name == "ip" { "network: ip" } else { "network: nft" },
                status: ok_if(there, Status::Warn),
                found: if there { "there" } else { "missing" }.to_owned(),
                needed: "sandboxes with network \"all\" only",
                fix: (!there).then_some(fix),
            }
        })
        .collect()
}

fn runs(program: &str, flag: &str) -> bool {
    Command::new(program).arg(flag).output().is_ok_and(|output| output.status.success())
}

/// Name of the file system that holds `path`, by the longest mount point above it.
fn fs_name(path: &Path) -> String {
    let mounts = read("/proc/self/mountinfo");
    let of = |line: &str| {
        let (left, right) = line.split_once(" - ")?;
        let point = left.split(' ').nth(4)?.to_owned();
        path.starts_with(&point).then(|| (point.len(), right.split(' ').next().unwrap_or_default().to_owned()))
    };
    // Of two at the same point the later one is on top.
    mounts
        .lines()
        .filter_map(of)
        .max_by_key(|(length, _)| *length)
        .map_or_else(|| "unknown".to_owned(), |(_, name)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions() {
        assert_eq!(version("6.18.44-fc"), (6, 18));
        assert_eq!(version("5.15.0-91-generic"), (5, 15));
        assert_eq!(version(""), (0, 0));
    }

    #[test]
    fn what_is_not_well_says_how_to_mend_it() {
        for check in Doctor::new(Path::new("/")).examine() {
            assert!(check.status == Status::Ok || check.fix.is_some(), "{check:?}");
            assert!(!check.found.is_empty() && !check.needed.is_empty(), "{check:?}");
        }
    }
}
