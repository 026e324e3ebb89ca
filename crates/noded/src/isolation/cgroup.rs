//! Limits, accounts and kill groups, on cgroup v1, hybrid and v2.
//!
//! Groups lie under `/sandmill/<node>/` at the top of each hierarchy and nowhere else. In the v2 tree (also the
//! controller-less one of a hybrid machine) a sandbox has `<id>/`, delegated to its root: sandboxd is born into it, and each
//! call gets a group below. v1 has groups for memory, pids and cpu. Memory groups of v1 are pooled and used again: each
//! costs the kernel time and memory in proportion to all others, and a dead one stays for long.

use std::{
    collections::BTreeMap,
    fs, io,
    os::unix::fs::chown,
    path::{Path, PathBuf},
    sync::{
        atomic::{AtomicU64, Ordering},
        Mutex,
    },
    time::{Duration, Instant},
};

use rustix::fd::OwnedFd;
use serde::{Deserialize, Serialize};

use super::StepError;

/// What this machine offers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    None,
    V1,
    Hybrid,
    V2,
}

impl Kind {
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::V1 => "v1",
            Self::Hybrid => "hybrid",
            Self::V2 => "v2",
        }
    }
}

/// Limits of one sandbox that cgroups enforce.
#[derive(Debug, Clone, Copy, Default)]
pub struct Limits {
    pub cpu: Option<f64>,
    pub memory_bytes: Option<u64>,
    pub pids: Option<u64>,
}

/// A sandbox's groups; kept on disk so that a restarted noded finds them.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Group {
    pub v2: Option<PathBuf>,
    pub memory_v1: Option<PathBuf>,
    /// Without a limit of memory: the node's own group, which all such sandboxes share.
    pub shared_memory_v1: Option<PathBuf>,
    pub pids_v1: Option<PathBuf>,
    pub cpu_v1: Option<PathBuf>,
    pub cpuacct_v1: Option<PathBuf>,
    /// OOM kills that the memory group had counted before this sandbox.
    pub oom_kills_before: u64,
}

/// What the kernel counted for a sandbox.
#[derive(Debug, Clone, Copy, Default)]
pub struct Account {
    pub cpu_s: f64,
    pub memory_bytes: u64,
    pub memory_peak_bytes: u64,
    pub pids: u64,
    pub oom_kills: u64,
}

/// Controllers of the v2 tree that reach a sandbox's group.
#[derive(Debug, Clone, Copy, Default)]
struct V2Controllers {
    cpu: bool,
    memory: bool,
    pids: bool,
}

pub struct Cgroups {
    kind: Kind,
    tree: Option<PathBuf>,
    controllers: V2Controllers,
    v1: BTreeMap<&'static str, PathBuf>,
    spare_memory: Mutex<Vec<PathBuf>>,
    next_memory: AtomicU64,
}

/// Spare memory groups kept; more are removed.
const SPARE_GROUPS: usize = 64;
const V1_CONTROLLERS: [&str; 4] = ["memory", "pids", "cpu", "cpuacct"];

impl Cgroups {
    /// Looks at the machine and makes this node's groups. What can't be made is left out, and said by `enforced_by`.
    pub fn detect(node: &str) -> Self {
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let (v2_mount, v1_mounts) = parse_mounts(&mounts);
        let kind = match (&v2_mount, v1_mounts.is_empty()) {
            (None, true) => Kind::None,
            (None, false) => Kind::V1,
            (Some(_), false) => Kind::Hybrid,
            (Some(_), true) => Kind::V2,
        };
        let mut v1 = BTreeMap::new();
        for name in V1_CONTROLLERS {
            // CPU time is in the v2 tree where there is one.
            if name == "cpuacct" && v2_mount.is_some() {
                continue;
            }
            if let Some(mount) = v1_mounts.get(name) {
                let path = mount.join("sandmill").join(node);
                if fs::create_dir_all(&path).is_ok() {
                    v1.insert(name, path);
                }
            }
        }
        let tree = v2_mount.and_then(|mount| {
            let path = mount.join("sandmill").join(node);
            if kind == Kind::V2 {
                for level in [&mount, &mount.join("sandmill"), &path] {
                    let _ = fs::create_dir_all(level);
                    for controller in ["+cpu", "+memory", "+pids"] {
                        let _ = fs::write(level.join("cgroup.subtree_control"), controller);
                    }
                }
            }
            fs::create_dir_all(&path).is_ok().then_some(path)
        });
        let given = tree.as_ref().and_then(|path| fs::read_to_string(path.join("cgroup.subtree_control")).ok());
        let given = given.unwrap_or_default();
        let has = |name| given.split_ascii_whitespace().any(|one| one == name);
        let controllers = V2Controllers { cpu: has("cpu"), memory: has("memory"), pids: has("pids") };
        Self { kind, tree, controllers, v1, spare_memory: Mutex::new(Vec::new()), next_memory: AtomicU64::new(0) }
    }

    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// How each limit is enforced here: `cgroup-v1`, `cgroup-v2` or `none`.
    pub fn enforced_by(&self, limit: &'static str) -> &'static str {
        let v2 = match limit {
            "cpu" => self.controllers.cpu,
            "memory" => self.controllers.memory,
            _ => self.controllers.pids,
        };
        match (v2, self.v1.contains_key(limit)) {
            (true, _) => "cgroup-v2",
            (false, true) => "cgroup-v1",
            (false, false) => "none",
        }
    }

    /// Makes a sandbox's groups with their limits, but for that of memory. On an error what was made is removed.
    pub fn create(&self, id: &str, limits: Limits, uid_base: u32) -> Result<Group, StepError> {
        let mut group = Group::default();
        let made = self.fill(id, limits, uid_base, &mut group);
        if let Err(error) = made {
            self.remove(&group);
            return Err(error);
        }
        Ok(group)
    }

    fn fill(&self, id: &str, limits: Limits, uid_base: u32, group: &mut Group) -> Result<(), StepError> {
        let at = StepError::at;
        if let Some(tree) = &self.tree {
            let path = tree.join(id);
            fs::create_dir(&path).map_err(at("make the cgroup"))?;
            group.v2 = Some(path.clone());
            // Not cgroup.subtree_control: controllers below would leave no room for sandboxd's own process.
            for name in ["", "cgroup.procs", "cgroup.threads"] {
                chown(path.join(name), Some(uid_base), Some(uid_base)).map_err(at("delegate the cgroup"))?;
            }
            let write = |name: &str, value: String| fs::write(path.join(name), value);
            if let (true, Some(pids)) = (self.controllers.pids, limits.pids) {
                write("pids.max", pids.to_string()).map_err(at("limit pids"))?;
            }
            if let (true, Some(cpu)) = (self.controllers.cpu, limits.cpu) {
                write("cpu.max", format!("{} {PERIOD_US}", quota_us(cpu))).map_err(at("limit cpu"))?;
            }
        }
        if !self.controllers.memory && limits.memory_bytes.is_some() && self.v1.contains_key("memory") {
            let path = self.take_memory().map_err(at("make the memory cgroup"))?;
            group.memory_v1 = Some(path.clone());
            group.oom_kills_before = oom_kills(&path.join("memory.oom_control"));
        }
        if !self.controllers.memory && group.memory_v1.is_none() {
            group.shared_memory_v1 = self.v1.get("memory").cloned();
        }
        if let (false, Some(root), Some(pids)) = (self.controllers.pids, self.v1.get("pids"), limits.pids) {
            let path = make(root, id).map_err(at("make the pids cgroup"))?;
            group.pids_v1 = Some(path.clone());
            fs::write(path.join("pids.max"), pids.to_string()).map_err(at("limit pids"))?;
        }
        if let (false, Some(root), Some(cpu)) = (self.controllers.cpu, self.v1.get("cpu"), limits.cpu) {
            let path = make(root, id).map_err(at("make the cpu cgroup"))?;
            group.cpu_v1 = Some(path.clone());
            fs::write(path.join("cpu.cfs_period_us"), PERIOD_US.to_string()).map_err(at("limit cpu"))?;
            fs::write(path.join("cpu.cfs_quota_us"), quota_us(cpu).to_string()).map_err(at("limit cpu"))?;
        }
        if let Some(root) = self.v1.get("cpuacct") {
            group.cpuacct_v1 = Some(make(root, id).map_err(at("make the cpuacct cgroup"))?);
        }
        Ok(())
    }

    /// Sets the limit of memory, once sandboxd runs: before its exec the new process shares our memory, and whoever is killed
    /// for want of memory takes everyone along that shares it.
    pub fn limit_memory(&self, group: &Group, bytes: u64) -> Result<(), StepError> {
        let at = StepError::at;
        if let (true, Some(path)) = (self.controllers.memory, &group.v2) {
            fs::write(path.join("memory.max"), bytes.to_string()).map_err(at("limit memory"))?;
            // Without swap accounting there is no such file, and no swap to limit.
            let _ = fs::write(path.join("memory.swap.max"), "0");
        }
        if let Some(path) = &group.memory_v1 {
            set_memory_v1(path, Some(bytes)).map_err(at("limit memory"))?;
        }
        Ok(())
    }

    /// A memory group that nobody uses: a spare one, or a new one.
    fn take_memory(&self) -> io::Result<PathBuf> {
        if let Some(spare) = self.spare_memory.lock().expect("no panic while held").pop() {
            return Ok(spare);
        }
        let root = &self.v1["memory"];
        loop {
            let number = self.next_memory.fetch_add(1, Ordering::Relaxed);
            match make(root, &format!("m{number}")) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {} // a live sandbox's, from before a restart
                made => return made,
            }
        }
    }

    /// Memory groups that a killed noded left: spare if empty, in use otherwise. Called once what it left half-done is gone.
    pub fn find_spares(&self) {
        let Some(entries) = self.v1.get("memory").and_then(|root| fs::read_dir(root).ok()) else { return };
        let empty = entries.flatten().map(|entry| entry.path()).filter(|path| {
            path.is_dir() && fs::read_to_string(path.join("cgroup.procs")).is_ok_and(|procs| procs.is_empty())
        });
        *self.spare_memory.lock().expect("no panic while held") = empty.collect();
    }

    /// Removes a sandbox's groups, whose processes have ended; waits a moment for the kernel to notice. Says what is left.
    pub fn remove(&self, group: &Group) -> Vec<PathBuf> {
        let mut left = Vec::new();
        if let Some(path) = &group.v2 {
            let _ = fs::write(path.join("cgroup.kill"), "1");
            for entry in fs::read_dir(path).into_iter().flatten().flatten() {
                if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                    remove_group(&entry.path(), &mut left);
                }
            }
            remove_group(path, &mut left);
        }
        for path in [&group.pids_v1, &group.cpu_v1, &group.cpuacct_v1].into_iter().flatten() {
            remove_group(path, &mut left);
        }
        if let Some(path) = &group.memory_v1 {
            self.give_memory_back(path, &mut left);
        }
        left
    }

    fn give_memory_back(&self, path: &Path, left: &mut Vec<PathBuf>) {
        let roomy = self.spare_memory.lock().expect("no panic while held").len() < SPARE_GROUPS;
        let reset = || -> io::Result<()> {
            if !fs::read_to_string(path.join("cgroup.procs"))?.is_empty() {
                return Err(io::Error::other("still has processes"));
            }
            set_memory_v1(path, None)?;
            fs::write(path.join("memory.force_empty"), "0")?;
            fs::write(path.join("memory.max_usage_in_bytes"), "0")
        };
        if roomy && reset().is_ok() {
            self.spare_memory.lock().expect("no panic while held").push(path.to_owned());
        } else {
            let _ = fs::write(path.join("memory.force_empty"), "0");
            remove_group(path, left);
        }
    }

    /// Removes this node's groups; those of live sandboxes stay.
    pub fn close(&self) {
        let spares = std::mem::take(&mut *self.spare_memory.lock().expect("no panic while held"));
        for path in spares {
            remove_group(&path, &mut Vec::new());
        }
        for path in self.v1.values().chain(self.tree.iter()) {
            if fs::remove_dir(path).is_ok() {
                if let Some(top) = path.parent() {
                    let _ = fs::remove_dir(top); // stays while another node has groups
                }
            }
        }
    }

    /// Kills whatever is in the groups of a sandbox that is known by nothing but its name, and removes them. Says what is left.
    pub fn kill_named(&self, id: &str) -> Vec<PathBuf> {
        let group = |name: &str| self.v1.get(name).map(|root| root.join(id)).filter(|path| path.exists());
        let group = Group {
            v2: self.tree.as_ref().map(|tree| tree.join(id)).filter(|path| path.exists()),
            pids_v1: group("pids"),
            cpu_v1: group("cpu"),
            cpuacct_v1: group("cpuacct"),
            ..Group::default()
        };
        for path in [&group.pids_v1, &group.cpu_v1, &group.cpuacct_v1].into_iter().flatten() {
            for pid in fs::read_to_string(path.join("cgroup.procs")).unwrap_or_default().lines() {
                if let Some(pidfd) = pid.parse().ok().and_then(|pid| super::process::open(pid).ok()) {
                    let _ = super::process::signal(&pidfd, libc::SIGKILL); // gone already
                }
            }
        }
        self.remove(&group)
    }

    /// Directory names in the v2 tree and in v1's per-sandbox groups: what exists, for the sweep at start.
    pub fn existing(&self) -> Vec<PathBuf> {
        let roots = self.tree.iter().chain(self.v1.iter().filter(|(name, _)| **name != "memory").map(|(_, path)| path));
        roots
            .flat_map(|root| fs::read_dir(root).into_iter().flatten().flatten())
            .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
            .map(|entry| entry.path())
            .collect()
    }
}

impl Group {
    /// The groups of this sandbox alone that have its name.
    pub fn named(&self) -> impl Iterator<Item = &PathBuf> {
        [&self.v2, &self.pids_v1, &self.cpu_v1, &self.cpuacct_v1].into_iter().flatten()
    }

    /// The `tasks` files of the v1 groups, through which a single thread enters them.
    pub fn tasks(&self) -> io::Result<Vec<OwnedFd>> {
        let all = [&self.memory_v1, &self.shared_memory_v1, &self.pids_v1, &self.cpu_v1, &self.cpuacct_v1];
        let open = |path: &PathBuf| fs::File::options().write(true).open(path.join("tasks")).map(OwnedFd::from);
        all.into_iter().flatten().map(open).collect()
    }

    /// The v2 directory, opened for sandboxd.
    pub fn open(&self) -> io::Result<Option<OwnedFd>> {
        let Some(path) = &self.v2 else { return Ok(None) };
        let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::DIRECTORY | rustix::fs::OFlags::CLOEXEC;
        Ok(Some(rustix::fs::open(path, flags, rustix::fs::Mode::empty())?))
    }

    /// What the kernel has counted so far; zeros where it counts nothing.
    pub fn account(&self) -> Account {
        let mut account = Account::default();
        if let Some(path) = &self.v2 {
            account.cpu_s = keyed(&path.join("cpu.stat"), "usage_usec").unwrap_or(0) as f64 / 1e6;
            account.memory_bytes = number(&path.join("memory.current")).unwrap_or(0);
            account.memory_peak_bytes = number(&path.join("memory.peak")).unwrap_or(0);
            account.oom_kills = oom_kills(&path.join("memory.events"));
            account.pids = number(&path.join("pids.current")).unwrap_or(0);
        }
        if let (None, Some(path), 0) = (&self.memory_v1, &self.v2, account.memory_bytes) {
            account.memory_bytes = resident(path);
        }
        if let Some(path) = &self.cpuacct_v1 {
            account.cpu_s = number(&path.join("cpuacct.usage")).unwrap_or(0) as f64 / 1e9;
        }
        if let Some(path) = &self.memory_v1 {
            account.memory_bytes = number(&path.join("memory.usage_in_bytes")).unwrap_or(0);
            account.memory_peak_bytes = number(&path.join("memory.max_usage_in_bytes")).unwrap_or(0);
            account.oom_kills = oom_kills(&path.join("memory.oom_control")).saturating_sub(self.oom_kills_before);
        }
        if let Some(path) = &self.pids_v1 {
            account.pids = number(&path.join("pids.current")).unwrap_or(0);
        }
        account
    }
}

/// Resident memory of all processes of a group that no controller counts for; shared pages count for each.
fn resident(group: &Path) -> u64 {
    let below = fs::read_dir(group).into_iter().flatten().flatten().map(|entry| entry.path());
    let groups = below.filter(|path| path.is_dir()).chain([group.to_owned()]);
    let procs: Vec<String> = groups.filter_map(|path| fs::read_to_string(path.join("cgroup.procs")).ok()).collect();
    let pages = |pid: &str| -> Option<u64> {
        fs::read_to_string(format!("/proc/{pid}/statm")).ok()?.split(' ').nth(1)?.parse().ok()
    };
    let pages: u64 = procs.iter().flat_map(|text| text.lines()).filter_map(pages).sum();
    pages * rustix::param::page_size() as u64
}

const PERIOD_US: u64 = 100_000;

fn quota_us(cpu: f64) -> u64 {
    ((cpu * PERIOD_US as f64).round() as u64).max(1000)
}

fn make(root: &Path, name: &str) -> io::Result<PathBuf> {
    let path = root.join(name);
    fs::create_dir(&path)?;
    Ok(path)
}

/// Sets or lifts the limit of memory, and of memory + swap where the kernel counts it (which must never be the smaller).
fn set_memory_v1(path: &Path, bytes: Option<u64>) -> io::Result<()> {
    let (plain, both) = (path.join("memory.limit_in_bytes"), path.join("memory.memsw.limit_in_bytes"));
    match bytes {
        Some(bytes) => {
            fs::write(plain, bytes.to_string())?;
            if both.exists() {
                fs::write(both, bytes.to_string())?;
            }
        }
        None => {
            if both.exists() {
                fs::write(both, "-1")?;
            }
            fs::write(plain, "-1")?;
        }
    }
    Ok(())
}

/// Removes one group; the kernel may need a moment after the last process.
fn remove_group(path: &Path, left: &mut Vec<PathBuf>) {
    let deadline = Instant::now() + Duration::from_secs(2);
    let mut pause = Duration::from_micros(100);
    loop {
        match fs::remove_dir(path) {
            Ok(()) => return,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return,
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) && Instant::now() < deadline => {
                std::thread::sleep(pause);
                pause = (pause * 2).min(Duration::from_millis(20));
            }
            Err(_) => {
                left.push(path.to_owned());
                return;
            }
        }
    }
}

fn number(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

fn keyed(path: &Path, key: &str) -> Option<u64> {
    let text = fs::read_to_string(path).ok()?;
    text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(' ')?.trim().parse().ok())
}

fn oom_kills(path: &Path) -> u64 {
    keyed(path, "oom_kill").unwrap_or(0)
}

/// The v2 mount and the v1 mount of each controller, from the text of /proc/self/mountinfo.
fn parse_mounts(text: &str) -> (Option<PathBuf>, BTreeMap<String, PathBuf>) {
    let (mut v2, mut v1) = (None, BTreeMap::new());
    for line in text.lines() {
        let Some((left, right)) = line.split_once(" - ") else { continue };
        let (Some(point), Some(kind)) = (left.split(' ').nth(4), right.split(' ').next()) else { continue };
        match kind {
            "cgroup2" => v2 = v2.or_else(|| Some(PathBuf::from(point))),
            "cgroup" => {
                for option in right.rsplit(' ').next().unwrap_or_default().split(',') {
                    v1.entry(option.to_owned()).or_insert_with(|| PathBuf::from(point));
                }
            }
            _ => {}
        }
    }
    v1.retain(|name, _| V1_CONTROLLERS.contains(&name.as_str()));
    (v2, v1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hybrid_mounts() {
        let text = "30 29 0:26 / /sys/fs/cgroup/cpu rw,relatime shared:1 - cgroup cgroup rw,cpu,cpuacct\n\
                    31 29 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
                    32 29 0:28 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,name=systemd\n\
                    33 29 0:29 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";
        let (v2, v1) = parse_mounts(text);
        assert_eq!(v2, Some("/sys/fs/cgroup/unified".into()));
        let names: Vec<&str> = v1.keys().map(String::as_str).collect();
        assert_eq!(names, ["cpu", "cpuacct", "memory"]);
    }

    #[test]
    fn v2_only() {
        let (v2, v1) = parse_mounts("25 1 0:22 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n");
        assert_eq!(v2, Some("/sys/fs/cgroup".into()));
        assert!(v1.is_empty());
    }

    #[test]
    fn a_quota_is_never_zero() {
        assert_eq!(quota_us(0.5), 50_000);
        assert_eq!(quota_us(0.0001), 1000);
    }
}
